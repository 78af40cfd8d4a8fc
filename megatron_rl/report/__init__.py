"""Records and pages of a run: metrics of a step, sample rollouts, the report page, the status."""
