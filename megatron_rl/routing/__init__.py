"""Expert routes over time: prediction, recording, replay and comparison."""

from megatron_rl.config.route_cost import cache_cost
from megatron_rl.platform import activate
from megatron_rl.routing.predictor import RoutePredictor, predictive_loss
from megatron_rl.routing.table import topk_agreement

activate()  # before any module here imports Megatron

__all__ = ["RoutePredictor", "cache_cost", "predictive_loss", "topk_agreement"]
