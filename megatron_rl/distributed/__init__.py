"""Processes of a run: torch.distributed, Megatron's parallel state, and errors that all processes share."""
