"""Conversion of Hugging Face model folders to Megatron models and back, with Megatron-Bridge.

`load` (build.py) is the entry point. `check_parallel` (parallel_check.py) needs no Megatron and can run first.
"""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
