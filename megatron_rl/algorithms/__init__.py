"""Pure functions on tensors: advantages, losses, KL, off-policy correction. No Megatron, no I/O, no state."""
