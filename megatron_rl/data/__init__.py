"""Sequences and trajectories, their packing into micro-batches, balancing over ranks, and records on disk."""
