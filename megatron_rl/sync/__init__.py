"""Weight sync from the trainer to the rollout engines. Weights travel in buckets, and both sides compare checksums."""
