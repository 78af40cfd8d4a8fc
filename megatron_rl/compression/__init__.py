"""Smaller models: structured pruning, sparsity, quantization, and the calibration that they choose by."""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
