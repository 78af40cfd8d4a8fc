"""Training with Megatron-Core: parallel state, packing, pipelined forward-backward passes, optimizer, checkpoints."""

from megatron_rl.platform import activate

activate()  # must run before the first import of Megatron, which looks for a GPU
