"""Makes Megatron-Core and Megatron-Bridge run without a GPU; `megatron_rl.platform.activate()` turns it on."""
