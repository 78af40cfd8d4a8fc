"""Sampling from the SGLang servers: requests of a step, weight pushes, recovery of servers, and trajectories."""
