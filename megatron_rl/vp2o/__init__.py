"""VP2O: Stein variational policy updates over the experts of each MoE layer (papers/003)."""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
