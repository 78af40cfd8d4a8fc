"""The carrier of a sequence: trajectories, packing into micro-batches, balancing over ranks, records on disk."""
