"""Megatron-Core and Megatron-Bridge without a GPU; `megatron_rl.platform.activate()` switches it on."""
