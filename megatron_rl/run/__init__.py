"""Everything before and around a run: plan, memory, checks, doctor, and the run itself."""
