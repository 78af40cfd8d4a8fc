"""Expert routes over time: predicted, recorded, replayed, compared. Mathematics and plain data; no Megatron, no I/O."""

from megatron_rl.routing.agreement import topk_agreement
from megatron_rl.routing.cost import cache_cost
from megatron_rl.routing.predictor import RoutePredictor, predictive_loss

__all__ = ["RoutePredictor", "cache_cost", "predictive_loss", "topk_agreement"]
