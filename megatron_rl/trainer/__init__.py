"""Megatron-Core's side: parallel state, packing, forward-backward through its schedules, optimizer, checkpoints."""

from megatron_rl.platform import activate

activate()  # before the first import of Megatron, which looks for a GPU
