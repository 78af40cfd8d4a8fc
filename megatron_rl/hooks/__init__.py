"""Update hooks, which add features to the trainer: routing replay, route predictors, router balance, checks before updates."""

from megatron_rl.platform import activate

activate()  # before any module here imports Megatron
