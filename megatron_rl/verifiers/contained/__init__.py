"""Scripts that run in the sandbox, in a Python without this package. They are read as text."""
