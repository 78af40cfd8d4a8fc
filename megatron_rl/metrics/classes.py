"""Classes of tokens by their probability p under the trainer's policy. This module does not import torch."""

BELOW = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Upper limits of the classes of p."""
