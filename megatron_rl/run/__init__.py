"""Code around a run: the doctor, cluster jobs, trainer processes, the run's folder, and the `Run` object itself."""
