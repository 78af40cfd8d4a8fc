"""Logs and pages of a run: the metrics of a step, samples, the report, the status."""
