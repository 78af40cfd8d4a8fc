"""Scripts that run in the sandbox, in a Python without this package. The package `verifiers` reads them as text."""
