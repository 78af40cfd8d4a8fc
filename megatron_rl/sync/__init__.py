"""Trainer -> rollout engine: weights in buckets over one of three transports, checksums of both sides compared."""
