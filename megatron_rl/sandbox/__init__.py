"""Containers and processes for untrusted code: programs that models write, tools, and scorers of other packages."""
