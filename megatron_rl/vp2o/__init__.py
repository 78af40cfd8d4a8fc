"""VP2O: Stein variational policy updates over the experts of each MoE layer (Dia 2026, arXiv 2606.08032)."""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
