"""Mathematics on tensors: advantages, losses, preferences, KL, off-policy correction. No Megatron, no I/O.

Pure functions; the controllers of the KL's coefficient (`kl.py`) alone have a state, one number.
"""
