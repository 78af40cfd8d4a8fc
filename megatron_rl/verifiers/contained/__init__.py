"""Scripts that run in the sandbox, in its own Python, which has nothing of this package: each is read as text."""
