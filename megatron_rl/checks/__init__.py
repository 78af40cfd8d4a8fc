"""Checks before anything starts: config keys, models, memory, machine."""
