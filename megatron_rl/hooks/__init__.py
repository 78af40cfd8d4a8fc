"""Features of the trainer as update hooks: routing replay, route predictors, router balance, guards."""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
