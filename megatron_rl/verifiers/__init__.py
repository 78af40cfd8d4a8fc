"""Checks of answers: mathematics, numbers, programs, instructions. Each is a pure function of texts or runs in the sandbox."""
