"""Hugging Face folders as Megatron models and back, through Megatron-Bridge.

`load` (build.py) is the entry; `check_parallel` (parallel_check.py) needs no Megatron and can run before anything starts.
"""
