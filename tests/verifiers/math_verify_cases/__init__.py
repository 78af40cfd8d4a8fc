"""Cases of math-verify 0.9.0's own tests (its source distribution, Apache 2.0): gold, response, expected verdict."""
