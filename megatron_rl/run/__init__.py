"""Everything around a run: doctor, cluster jobs, trainer processes, the run's folder, and the run itself."""
