"""Mathematics on tensors: advantages, losses, preferences, KL, off-policy correction. No Megatron, no I/O.

All functions are pure. Only the controllers of the KL coefficient (`kl.py`) hold state, which is one number.
"""
