"""Expert routes over time: predicted, recorded, replayed, compared."""

from megatron_rl.platform import activate
from megatron_rl.routing.agreement import topk_agreement
from megatron_rl.routing.cost import cache_cost
from megatron_rl.routing.predictor import RoutePredictor, predictive_loss

activate()  # before any module here imports Megatron

__all__ = ["RoutePredictor", "cache_cost", "predictive_loss", "topk_agreement"]
