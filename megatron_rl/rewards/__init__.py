"""Rewards: verifiers, reward models, judges, and the shaping of their numbers."""
