"""The report's charts: which metrics share one, under which names, on which scale."""

from __future__ import annotations

from typing import Any

from megatron_rl.metrics.logger import TIMES

CHARTS: tuple[dict[str, Any], ...] = (
    {
        "title": "Evaluation",
        "note": "held-out prompts: mean reward, best of n, greedy",
        "series": {"eval/score": "score", "eval/pass@*": "pass@*", "eval/greedy": "greedy"},
        "range": [0, 1],
        "markers": True,
    },
    {
        "title": "Different right answers",
        "note": "of an evaluation's n responses to a prompt",
        "series": {"eval/distinct@*": "of *"},
        "markers": True,
    },
    {"title": "Reward", "note": "mean over the step's rollouts", "series": {"reward/mean": "reward"}},
    {"title": "Entropy", "note": "of the policy, nats per token", "series": {"entropy": "entropy"}},
    {
        "title": "Mismatch",
        "note": "KL from the engine that samples to the trainer, nats per token",
        "series": {"mismatch/kl": "KL (k3)", "corrected/kl": "of the tokens that stay in the update"},
        "scale": "log",
    },
    {
        "title": "Clip fraction",
        "note": "tokens held back by the clip",
        "series": {"loss/clip_fraction": "clipped"},
        "range": [0, 0.01],
    },
    {"title": "Policy loss", "note": "as it is minimised", "series": {"loss/policy": "loss"}},
    {"title": "KL to the reference", "note": "nats per token", "series": {"kl/reference": "KL"}},
    {"title": "Response length", "note": "tokens, mean", "series": {"response/length": "tokens"}},
    {"title": "Gradient norm", "note": "before clipping", "series": {"update/grad_norm": "norm"}, "scale": "log"},
    {
        "title": "Throughput",
        "note": "prompt and response tokens per second",
        "series": {"throughput/tokens_per_s": "tokens/s", "throughput/tokens_per_s_per_gpu": "a GPU of the trainer"},
    },
    {
        "title": "GPU utilization",
        "note": "MFU of the updates: model FLOPs as a share of the bf16 peak",
        "series": {"throughput/mfu": "MFU"},
    },
    {
        "title": "GPU memory",
        "note": "GB, of the trainer's process that has most",
        "series": {"memory/peak_gb": "allocated, peak", "memory/reserved_gb": "reserved, peak"},
        "unit": "GB",
    },
    {
        "title": "Where a step's time goes",
        "note": "seconds",
        "series": {f"time/{part}_s": part for part in TIMES if part != "step"},
        "kind": "area",
        "wide": True,
        "unit": "s",
    },
)
"""A series "a*b" stands for all metrics "a", anything, "b"; a chart without data is left out."""

MISMATCH_CHARTS: tuple[dict[str, Any], ...] = (
    {
        "title": "Importance ratios",
        "note": "largest and smallest trainer / engine ratio of a token",
        "series": {
            "mismatch/ratio_max": "largest",
            "mismatch/ratio_min": "smallest",
            "corrected/weight_max": "largest weight after correction",
        },
        "scale": "log",
    },
    {
        "title": "Effective sample size",
        "note": "of the ratios, as a share of the tokens or of the sequences",
        "series": {"mismatch/ess": "tokens", "mismatch/sequence_ess": "sequences"},
        "range": [0.95, 1],
    },
    {
        "title": "Chi-square divergence",
        "note": "of the trainer from the engine: mean of (ratio - 1)^2",
        "series": {"mismatch/chi2": "all tokens", "corrected/chi2": "tokens that stay in the update"},
        "scale": "log",
    },
    {
        "title": "Perplexity gap",
        "note": "trainer's minus engine's, of the sampled tokens",
        "series": {"mismatch/ppl_gap": "gap"},
    },
    {
        "title": "Bias of the tail",
        "note": "engine's minus trainer's log-prob of sampled tokens with p < 0.01; the paper predicts above 0",
        "series": {"mismatch/tail_bias": "mean"},
    },
    {
        "title": "Out of the update",
        "note": "share of the tokens",
        "series": {
            "corrected/masked": "weight 0",
            "corrected/vetoed": "by the veto",
            "corrected/rejected": "by the rejection",
        },
        "range": [0, 0.01],
    },
    {
        "title": "Pruned vocabulary",
        "note": "probability outside the safe set: mean, and the largest of a step",
        "series": {"pruning/pruned_mass": "mean", "pruning/pruned_mass_max": "largest"},
        "scale": "log",
    },
    {
        "title": "Drift of the policy",
        "note": "KL(engine || policy) after a step, nats per token; the engine is refreshed by it",
        "series": {"sync/kl": "KL (k3)"},
        "scale": "log",
    },
    {
        "title": "Sample size under drift",
        "note": "effective share of the tokens",
        "series": {"sync/ess": "ESS"},
        "range": [0.95, 1],
    },
    {
        "title": "Age of the engine's weights",
        "note": "steps, before a refresh",
        "series": {"sync/staleness": "steps", "sync/refreshed": "refreshed"},
    },
)

ROUTING_CHARTS: tuple[dict[str, Any], ...] = (
    {
        "title": "Routing agreement",
        "note": "experts in common: replayed route and current router, mean over tokens, layers and updates",
        "series": {"routing/agreement": "all updates", "routing/update_*/agreement": "update *"},
        "range": [0.98, 1],
    },
    {
        "title": "Route KL",
        "note": "recorded against current router, nats per token and layer",
        "series": {"routing/kl": "all updates", "routing/update_*/kl": "update *"},
        "scale": "log",
    },
    {
        "title": "Predictor loss",
        "note": "as it is minimised, from the second update on",
        "series": {"routing/predictor_loss": "all updates", "routing/update_*/predictor_loss": "update *"},
        "scale": "log",
    },
    {
        "title": "Routing staleness",
        "note": "soft total variation between recorded and current router, 0 to 1",
        "series": {"routing/staleness": "staleness"},
    },
    {
        "title": "Engine agreement",
        "note": "experts in common: rollout engine and trainer",
        "series": {"routing/engine_agreement": "share"},
        "range": [0.98, 1],
    },
    {
        "title": "Tokens without a route",
        "note": "routed freely instead",
        "series": {"routing/fallback_tokens": "tokens"},
    },
)
"""Its series after the first one are the inner updates of a rollout batch."""

EXPERT_CHARTS: tuple[dict[str, Any], ...] = (
    {
        "title": "Router entropy",
        "note": "of the distribution over experts, nats per token",
        "series": {"routing/entropy": "all layers", "routing/layer_*/entropy": "layer *"},
    },
    {
        "title": "Busiest expert",
        "note": "its tokens, as a multiple of an expert's mean",
        "series": {"routing/load_max": "all layers", "routing/layer_*/load_max": "layer *"},
    },
    {
        "title": "Active experts",
        "note": "share that had a token in an update",
        "series": {"routing/active_experts": "all layers", "routing/layer_*/active_experts": "layer *"},
        "range": [0, 1],
    },
    {
        "title": "Overlap of prototypes",
        "note": "mean |cos| of two experts of a layer",
        "series": {"vp2o/overlap": "all layers", "vp2o/layer_*/overlap": "layer *"},
    },
    {
        "title": "Kernel of inactive neighbors",
        "note": "mean cos of the prototypes of pairs that repel",
        "series": {"vp2o/inactive_kernel": "all layers", "vp2o/layer_*/inactive_kernel": "layer *"},
    },
    {
        "title": "Kernel of neighbours",
        "note": "mean cos of the prototypes of pairs that attract",
        "series": {"vp2o/neighbor_kernel": "all layers", "vp2o/layer_*/neighbor_kernel": "layer *"},
    },
    {
        "title": "Attraction",
        "note": "norm of the experts' mixed gradients, before clipping",
        "series": {"vp2o/attraction": "all layers", "vp2o/layer_*/attraction": "layer *"},
        "scale": "log",
    },
    {
        "title": "Repulsion",
        "note": "norm of what is added to the experts' gradients, before clipping",
        "series": {"vp2o/repulsion": "all layers", "vp2o/layer_*/repulsion": "layer *"},
        "scale": "log",
    },
    {
        "title": "Orthogonality loss",
        "note": "of the outputs of a token's experts, mean over tokens",
        "series": {"routing/orthogonality": "all layers", "routing/layer_*/orthogonality": "layer *"},
    },
    {
        "title": "Barycentre shift",
        "note": "from the engine's prototypes, as the update proposed it; the trust region looks at the largest layer",
        "series": {"vp2o/shift": "mean of layers", "vp2o/layer_*/shift": "layer *"},
    },
    {"title": "Backtracks", "note": "by the trust region, in a step", "series": {"update/backtracks": "backtracks"}},
    {"title": "Rejected updates", "note": "by the trust region, in a step", "series": {"update/rejected": "rejected"}},
)
"""Of every MoE model, and what VP2O adds."""
