"""The report's charts: which metrics share one, under which labels, on which scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.metrics.logger import TIMES


@dataclass(frozen=True)
class Chart:
    """One chart; a chart without data is left out."""

    title: str
    note: str
    series: dict[str, str]
    """{metric: label}; "a*b" stands for all metrics "a", anything, "b", and the label's * for what * was.
    Of several runs only the first is shown."""
    log: bool = False
    reach: tuple[float, float] | None = None
    """The value axis covers at least this."""
    kind: Literal["lines", "points", "areas"] = "lines"
    """points: lines with a mark at each value, not smoothed; areas: stacked."""
    unit: str = ""


def _layers(title: str, note: str, metric: str, **more) -> Chart:
    """A metric's mean over the MoE layers, and each layer's own."""
    room, name = metric.split("/")
    return Chart(title, note, {metric: "all layers", f"{room}/layer_*/{name}": "layer *"}, **more)


def _updates(title: str, note: str, metric: str, **more) -> Chart:
    """A routing metric's mean over the inner updates of a rollout batch, and each update's own."""
    return Chart(title, note, {f"routing/{metric}": "all updates", f"routing/update_*/{metric}": "update *"}, **more)


# fmt: off
SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Curves": (
        Chart("Evaluation", "held-out prompts: mean reward, best of n, greedy",
              {"eval/score": "score", "eval/pass@*": "pass@*", "eval/greedy": "greedy"}, reach=(0, 1), kind="points"),
        Chart("Evaluation sets", "mean reward at the sampling temperature, by the sets of eval.sets",
              {"eval/*/score": "*"}, reach=(0, 1), kind="points"),
        Chart("Evaluation sets, greedy", "mean reward of one response without sampling", {"eval/*/greedy": "*"},
              reach=(0, 1), kind="points"),
        Chart("Different right answers", "of an evaluation's n responses to a prompt",
              {"eval/distinct@*": "of *"}, kind="points"),
        Chart("Reward", "mean over the step's rollouts", {"reward/mean": "reward"}),
        Chart("Advantage", "of the step's tokens", {"advantage/mean": "mean", "advantage/std": "deviation"}),
        Chart("Entropy", "of the policy, nats per token", {"entropy": "entropy"}),
        Chart("Mismatch", "KL from the engine that samples to the trainer, nats per token",
              {"mismatch/kl": "KL (k3)", "corrected/kl": "of the tokens that stay in the update"}, log=True),
        Chart("Clip fraction", "tokens held back by the clip", {"loss/clip_fraction": "clipped"}, reach=(0, 0.01)),
        Chart("Loss", "as it is minimized; of SFT also that of held-out demonstrations",
              {"loss/policy": "loss", "eval/loss": "held out"}),
        Chart("Perplexity", "of a token of held-out demonstrations or texts: exp of their loss",
              {"eval/perplexity": "held out"}, log=True, kind="points"),
        Chart("Bits per byte", "of held-out demonstrations or texts, whatever the tokenizer",
              {"eval/bits_per_byte": "held out"}, kind="points"),
        Chart("KL to the reference", "nats per token",
              {"kl/reference": "as updates find the policy", "kl/sampled": "of the policy that sampled"}),
        Chart("Weight of the KL to the reference", "as it is moved to keep algorithm.kl.target", {"kl/coefficient": "weight"}),
        Chart("Response length", "tokens, mean; of conversations with what they were answered, and what trains",
              {"response/length": "all tokens", "response/trained": "that train"}),
        Chart("Stragglers", "share of the responses that were asked for",
              {"rollout/aborted": "aborted", "rollout/dropped": "dropped"}, reach=(0, 0.1)),
        Chart("Length of the aborted", "tokens that they had by then, mean", {"rollout/aborted_length": "tokens"}),
        Chart("Gradient norm", "before clipping", {"update/grad_norm": "norm"}, log=True),
        Chart("Throughput", "prompt and response tokens per second",
              {"throughput/tokens_per_s": "tokens/s", "throughput/tokens_per_s_per_gpu": "a GPU of the trainer"}),
        Chart("GPU utilization", "MFU of the updates: model FLOPs as a share of the bf16 peak", {"throughput/mfu": "MFU"}),
        Chart("GPU memory", "GB, of the trainer's process that has most",
              {"memory/peak_gb": "allocated, peak", "memory/reserved_gb": "reserved, peak"}, unit="GB"),
        Chart("Where a step's time goes", "seconds",
              {f"time/{part}_s": part for part in TIMES if part != "step"}, kind="areas", unit="s"),
    ),
    "Preferences": (
        Chart("Preference loss", "as it is minimized, and on held-out comparisons",
              {"preference/loss": "loss", "eval/loss": "held out"}),
        Chart("Accuracy", "share of the pairs in which the better response has the higher score",
              {"preference/accuracy": "trained on", "eval/accuracy": "held out"}, reach=(0, 1)),
        Chart("Scores", "of chosen and rejected responses; of a policy beta x log-ratio to the reference",
              {"preference/chosen": "chosen", "preference/rejected": "rejected"}),
        Chart("Margin", "score of the chosen response minus that of the rejected one",
              {"preference/margin": "trained on", "eval/margin": "held out"}),
        Chart("Calibration error", "of sigmoid(margin) as the chance to be right",
              {"preference/calibration_error": "trained on", "eval/calibration_error": "held out"}),
        Chart("Log-probs", "of whole responses, nats", {
            "preference/chosen_log_probs": "chosen", "preference/rejected_log_probs": "rejected"}),
    ),
    "Conversations": (
        Chart("Turns and calls", "of a conversation, mean", {"agent/turns": "replies", "agent/calls": "well-formed calls"}),
        Chart("Malformed calls", "share of all that were tried", {"agent/malformed": "share"}, reach=(0, 0.01)),
        Chart("Endings", "share of the conversations", {
            "agent/end_stop": "answer", "agent/end_turns": "turns", "agent/end_tokens": "tokens", "agent/end_time": "time",
            "agent/end_failure": "a tool's failure"}, reach=(0, 1)),
        Chart("Time of tools", "seconds of a conversation, mean", {"agent/tool_seconds": "seconds"}, unit="s"),
    ),
    "Engine and trainer": (
        Chart("Mismatch, pruned tokens too", "KL (k3) with tokens that the trainer has pruned, whose log-ratio counts as -20",
              {"mismatch/kl_capped": "KL"}, log=True),
        Chart("Mismatch in the safe set", "KL (k3) of the tokens within pruning.rho of the trainer's likeliest, pruned or not",
              {"mismatch/kl_safe": "KL"}, log=True),
        Chart("Mismatch by the plain estimate", "mean of the engine's minus the trainer's log-prob (k1), nats per token",
              {"mismatch/k1": "KL (k1)"}),
        Chart("Importance ratios", "largest and smallest trainer / engine ratio of a token",
              {"mismatch/ratio_max": "largest", "mismatch/ratio_p99": "99 % are below", "mismatch/ratio_p01": "1 % are below",
               "mismatch/ratio_min": "smallest", "corrected/weight_max": "largest weight after correction"}, log=True),
        Chart("Differences of log-probs", "absolute, trainer's and engine's of a sampled token",
              {"mismatch/abs_mean": "mean", "mismatch/abs_median": "median", "mismatch/abs_p99": "99 % are below"}, log=True),
        Chart("Tokens that agree", "share with a ratio between 1/2 and 2", {"mismatch/close": "share"}, reach=(0.99, 1)),
        Chart("Effective sample size", "of the ratios, as a share of the tokens or of the sequences",
              {"mismatch/ess": "tokens", "mismatch/sequence_ess": "sequences"}, reach=(0.95, 1)),
        Chart("Chi-square divergence", "of the trainer from the engine: mean of (ratio - 1)^2",
              {"mismatch/chi2": "all tokens", "corrected/chi2": "tokens that stay in the update"}, log=True),
        Chart("Perplexity gap", "trainer's minus engine's, of the sampled tokens", {"mismatch/ppl_gap": "gap"}),
        Chart("Largest log-perplexity gap", "of a response, nats: |mean difference of its tokens' log-probs|",
              {"mismatch/log_ppl_gap_max": "largest"}, log=True),
        Chart("Bias of the tail", "engine's minus trainer's log-prob of tokens with p < 0.01; the paper predicts above 0",
              {"mismatch/tail_bias": "mean"}),
        Chart("Bias of the tail by its error", "the same in standard errors", {"mismatch/tail_bias_z": "standard errors"}),
        Chart("Logit error", "e for which 2 e (1 - p) bounds the difference of a token's log-probs",
              {"mismatch/epsilon_p99": "of 99 % of the tokens", "mismatch/epsilon_p100": "of all"}, log=True),
        Chart("Out of the update", "share of the tokens",
              {"corrected/masked": "weight 0", "corrected/vetoed": "by the veto", "corrected/rejected": "by the rejection",
               "corrected/bounded": "ratio changed by a bound"},
              reach=(0, 0.01)),
        Chart("Weights after correction", "mean, and effective sample size as a share of the tokens",
              {"corrected/weight_mean": "mean", "corrected/weight_ess": "sample size"}, reach=(0.95, 1)),
        Chart("Tokens that the loss counts", "its denominator, as a share of the update's tokens, or of its responses",
              {"loss/counted": "share"}, reach=(0.95, 1)),
        Chart("Left out of the mismatch", "tokens of a step whose log-ratio is no number, as that of a pruned one",
              {"mismatch/not_finite": "not finite", "pruning/out_of_set": "outside the trainer's set"}),
        Chart("Pruned vocabulary", "probability outside the safe set: mean, and the largest of a step",
              {"pruning/pruned_mass": "mean", "pruning/pruned_mass_max": "largest"}, log=True),
        Chart("Probability of the safe set", "at the states that were sampled: mean, and the smallest of a step",
              {"pruning/coverage": "mean", "pruning/coverage_min": "smallest"}),
        Chart("Bias by pruning", "bounds of what it may cost of the expected reward, by the smallest and by the mean safe set",
              {"pruning/bias_bound": "smallest", "pruning/bias_mean": "mean"}, log=True),
        Chart("Drift of the policy", "KL(engine || policy) after a step, nats per token; the engine is refreshed by it",
              {"sync/kl": "KL (k3)"}, log=True),
        Chart("Sample size under drift", "effective share of the tokens", {"sync/ess": "ESS"}, reach=(0.95, 1)),
        Chart("Age of the engine's weights", "steps, before a refresh",
              {"sync/staleness": "steps", "sync/refreshed": "refreshed"}),
    ),
    "Routing": (
        _updates("Routing agreement", "experts in common: replayed route and current router, mean over tokens and layers",
                 "agreement", reach=(0.98, 1)),
        _updates("Route KL", "recorded against current router, nats per token and layer", "kl", log=True),
        Chart("Agreement after the first update", "as above, of the updates before which routers have moved",
              {"routing/later/agreement": "replayed", "routing/later/agreement_unpredicted": "had nothing been predicted"}),
        Chart("Route KL after the first update", "as above, of the updates before which routers have moved",
              {"routing/later/kl": "replayed", "routing/later/kl_unpredicted": "had nothing been predicted"}, log=True),
        _updates("Predictor loss", "as it is minimized, from the second update on", "predictor_loss", log=True),
        Chart("Routing staleness", "soft total variation between recorded and current router, 0 to 1",
              {"routing/staleness": "staleness"}),
        Chart("Engine agreement", "experts in common: rollout engine and trainer",
              {"routing/engine_agreement": "share"}, reach=(0.98, 1)),
        Chart("Experts given up", "of the engine's, for the trainer's own", {"routing/given_up": "share"}),
        Chart("Tokens without a route", "routed freely instead", {"routing/fallback_tokens": "tokens"}),
    ),
    "Experts": (
        _layers("Router entropy", "of the distribution over experts, nats per token", "routing/entropy"),
        _layers("Busiest expert", "its tokens, as a multiple of an expert's mean", "routing/load_max"),
        _layers("Active experts", "share that had a token in an update", "routing/active_experts", reach=(0, 1)),
        _layers("Overlap of prototypes", "mean |cos| of two experts of a layer", "vp2o/overlap"),
        _layers("Kernel of inactive neighbors", "mean cos of the prototypes of pairs that repel", "vp2o/inactive_kernel"),
        _layers("Kernel of neighbors", "mean cos of the prototypes of pairs that attract", "vp2o/neighbor_kernel"),
        _layers("Attraction", "norm of the experts' mixed gradients, before clipping", "vp2o/attraction", log=True),
        _layers("Repulsion", "norm of what is added to the experts' gradients, before clipping", "vp2o/repulsion", log=True),
        Chart("Repulsion dominates", "share of the layers", {"vp2o/repulsion_dominates": "share"}, reach=(0, 1)),
        _layers("Orthogonality loss", "of the outputs of a token's experts, mean over tokens", "routing/orthogonality"),
        _layers("Gradient of the orthogonality loss", "at the experts' outputs: its norm over that of all else",
                "routing/orthogonality_gradient", log=True),
        _layers("Barycenter shift",
                "from the engine's prototypes, as the update proposed it; the trust region looks at the largest layer",
                "vp2o/shift"),
        Chart("Backtracks", "by the trust region, in a step", {"update/backtracks": "backtracks"}),
        Chart("Rejected updates", "by the trust region, in a step", {"update/rejected": "rejected"}),
    ),
}
# fmt: on
