"""Rewards: verifiers, reward models and judges, the length penalty, clipping and whitening."""
