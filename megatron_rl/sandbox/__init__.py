"""Containers and processes for untrusted code: programs that models write, tools, and other packages' scoring functions."""
