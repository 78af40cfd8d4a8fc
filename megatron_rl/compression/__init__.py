"""Smaller models: structured pruning, sparsity, quantization, and the calibration on which their choices are based."""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
