"""Expert routes over time: prediction, recording, replay and comparison."""

from megatron_rl.platform import activate
from megatron_rl.routing.predictor import RoutePredictor, predictive_loss
from megatron_rl.routing.table import cache_cost, topk_agreement

activate()  # before any module here imports Megatron

__all__ = ["RoutePredictor", "cache_cost", "predictive_loss", "topk_agreement"]
