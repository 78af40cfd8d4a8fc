"""Simulation of training steps: how long each part takes on given hardware. It is only arithmetic and does not use torch."""
