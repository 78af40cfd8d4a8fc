"""NCCL settings that trainer and engine must share. They must be set before either one joins the common process group."""

ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}
"""Default values of environment variables. A value that is already set is kept; set the same value for external servers. SGLang
0.5.23 also sets this variable (`sglang/srt/entrypoints/engine.py`). All members of a process group must allocate memory in the
same way (see vLLM's known issues)."""
