"""Metrics with their reductions, the log of a run, mismatch statistics and scores of evaluations."""
