"""Several servers on one machine, in turn, under the same loads: this makes the table in docs/performance.md."""
