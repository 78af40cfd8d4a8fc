"""Smaller models by structured pruning, sparsity and quantization, and the calibration that guides them."""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
