"""Measurements: nothing here is imported by the packages, but for `octavo bench`, which runs what was typed."""
