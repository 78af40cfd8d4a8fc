"""Containers and processes in which code of others runs: model-written programs, tools, scorers."""
