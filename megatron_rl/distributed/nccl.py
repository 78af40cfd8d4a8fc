"""Settings of NCCL that trainer and engine must share, before either starts the group of both."""

ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}
"""Defaults; whoever has set one already keeps it, and sets it for external servers too. SGLang 0.5.23 sets this one for
itself (`sglang/srt/entrypoints/engine.py`), and both ends of a group have to allocate alike (vLLM's known issues)."""
