"""SGLang plugin for test_push_fp8.py: block FP8 weights on a CPU, laid out as SGLang's Triton kernels have them on a GPU.

Without it SGLang asserts that the CPU has AMX and packs the weights for it. They can be pushed and hashed, not multiplied.
"""

from __future__ import annotations


def install() -> None:
    from sglang.srt.layers.quantization import fp8

    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        method.process_weights_after_loading_block_quant = lambda self, layer: None
