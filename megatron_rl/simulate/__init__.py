"""Simulation of a training step: where its time goes on hardware with a few known numbers. Arithmetic only, without torch."""
