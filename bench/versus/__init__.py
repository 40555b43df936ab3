"""Several servers on one machine, in turn and several times, under the same loads: how the README's table is made."""
