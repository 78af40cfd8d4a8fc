"""NCCL settings that trainer and engine must share, before either creates the group of both."""

ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}
"""Default values. A value that is already set in the environment is kept; set the same value for external servers. SGLang
0.5.23 also sets this variable (`sglang/srt/entrypoints/engine.py`), and both ends of a group must allocate memory in the
same way (see vLLM's known issues)."""
