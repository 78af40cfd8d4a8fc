"""Checks of answers: mathematics, numbers, programs, instructions.

A check is a pure function of texts or runs in the sandbox.
"""
