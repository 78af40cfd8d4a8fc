"""Smaller models: structured pruning, sparsity, quantization, and the calibration that they choose by."""
