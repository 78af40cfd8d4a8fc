"""Metrics and their reductions, the log of a run, statistics of the mismatch, and scores of evaluations."""
