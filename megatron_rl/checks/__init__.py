"""Refusals before anything starts: keys, models, machine."""
