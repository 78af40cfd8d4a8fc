"""Everything a run shows of itself: the mismatch between trainer and engine, the log, the report."""
