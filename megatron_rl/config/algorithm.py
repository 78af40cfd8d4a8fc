"""Keys of what is learned, and how: losses, advantages, correction, routing, VP2O."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.conditions import not_with, only_with, only_with_any
from megatron_rl.config.model import OptimizerConfig
from megatron_rl.config.section import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, Secret, section


@section
class KLConfig:
    """The penalty on the distance to a reference model."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; 0 keeps no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of a token's KL in the loss; in the reward it is k1, log policy - log reference."""
    placement: Annotated[Literal["loss", "reward"], only_with(".coefficient", example=0.05)] = "loss"
    """loss: a term beside the policy's; reward: taken off the reward, at each token for advantages that go from token to token
    (gae, reinforce_plus_plus), else from the response's."""
    target: Annotated[PositiveFloat | None, only_with(".coefficient", example=0.1)] = None
    """KL to the reference, nats per token, that the coefficient is moved to keep (Ziegler et al. 2019): after each step by up
    to 20 % of it times responses / horizon. It is that of the policy that sampled, on its own samples (kl/sampled). null: the
    coefficient is fixed."""
    horizon: Annotated[Positive, only_with(".target", example=0.1)] = 10_000
    """Responses in which the controller may move the coefficient by 20 %."""
    reference: Annotated[str | None, only_with(".coefficient", example=0.05)] = None
    """Hugging Face folder of the reference; by default model.path."""


OF_TOKENS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages (algorithm.advantage) that go from token to token."""


@section
class AlgorithmConfig:
    """Advantages and the policy loss."""

    advantage: str = "grpo"
    """Advantage estimator. Over whole responses: grpo: (r - mean) / std over the responses to a prompt; dr_grpo: r -
    mean; rloo: r - mean of the others; tilt: group size x softmax of r / tilt_temperature (with loss: reinforce); or
    your own function by module:name. Of tokens: gae: PPO's, by the values of a critic (section critic);
    reinforce_plus_plus: rewards to come, whitened over the step; reinforce_plus_plus_baseline: the same of r - mean
    over the responses to a prompt.
    """
    gamma: Annotated[Fraction, only_with(".advantage", *OF_TOKENS)] = 1.0
    """Advantages of tokens: discount of a reward that comes one token later."""
    lam: Annotated[Fraction, only_with(".advantage", "gae")] = 0.95
    """gae: lambda, from 0 (one token and the next one's value) to 1 (all rewards to come)."""
    bootstrap_truncated: Annotated[bool, only_with(".advantage", "gae")] = True
    """gae: a response that a limit has ended would have gone on. true: in place of a score the value behind its last token
    stands for what would have come (part `overlong` counts); false: it is scored as it is, as a verifier scores it 0."""
    whiten: bool | None = None
    """True if advantages are brought to mean 0 and deviation 1 over all tokens of a step; null: those of tokens are."""
    advantage_clip: PositiveFloat | None = None
    """Largest absolute value of an advantage, after all else that makes it. null: no limit."""
    tilt_temperature: Annotated[PositiveFloat, only_with(".advantage", "tilt")] = 1.0
    """tilt: the beta of exp(r / beta): the smaller, the more counts the best response alone."""
    loss: str = "ppo"
    """ppo: PPO and GRPO's clipped token ratio; gspo: the sequence ratio; reinforce: no ratio; cispo: a clipped ratio as a
    weight, without gradient; sapo: a soft gate in the place of the clip; or your own by module:name."""
    clip_low: NonNegativeFloat | None = 0.2
    """The ratio is clipped below 1 - clip_low; null: it is not. GSPO's own are 3e-4 and 4e-4, of its ratio of sequences."""
    clip_high: NonNegativeFloat | None = 0.2
    """The ratio is clipped above 1 + clip_high; null: it is not. DAPO's clip-higher: a clip_high above clip_low."""
    tau_pos: Annotated[PositiveFloat, only_with(".loss", "sapo")] = 1.0
    """sapo: temperature of the gate where the advantage is above 0; the higher, the sooner a token counts less."""
    tau_neg: Annotated[PositiveFloat, only_with(".loss", "sapo")] = 1.05
    """sapo: temperature of the gate elsewhere."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """Mean over all tokens of the update; over sequences of each one's token mean; or over sequences of each one's token sum /
    rollout.max_new_tokens, a constant (Dr. GRPO, with advantage: dr_grpo; verl's seq-mean-token-sum-norm)."""
    target_kl: Annotated[PositiveFloat | None, only_with_any("batch.epochs", "batch.updates_per_step")] = None
    """Early stopping: an update whose pass finds the policy further than this from the one that the step began with
    (loss/old_kl, nats per token) is left out, and with it the step's later ones. null: all are done. (kl.target is another
    thing.)"""
    entropy_coefficient: float = 0.0
    """Weight of the policy's entropy in the loss."""
    entropy_reward: NonNegativeFloat = 0.0
    """Maximum-entropy RL: each token's reward is larger by so much times -log of its probability, so that states from which
    many ways lead are worth more too; entropy_coefficient looks at each token by itself."""
    on_policy: bool = False
    """Claim that each update is of the very policy that sampled. The run stops before an update where a response, a server or
    the trainer has other weights than those that were pushed last, or where the loss's ratio is not exactly 1."""
    kl: KLConfig = KLConfig()


@section
class SFTConfig:
    """Supervised fine-tuning (`megatron-rl sft`)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share e of each label that is spread evenly over the vocabulary: (1 - e) x the negative log-likelihood + e x the mean
    over all tokens of theirs, which keeps the model from certainty."""


@section
class RewardModelConfig:
    """Training of a reward model (`megatron-rl reward`): what is learned from the preferences of data.path."""

    loss: Literal["bradley_terry", "hinge", "squared_gap", "plackett_luce", "squared_error", "cross_entropy"] = (
        "bradley_terry"
    )
    """Loss of the reward model. On pairs and lists: bradley_terry: -log sigmoid of the difference; hinge: what the
    difference lacks of a margin; squared_gap: the squared error of the difference to a margin; plackett_luce: minus the
    log-likelihood of a list's order. Of single responses, and of steps (process rewards): squared_error to the score;
    cross_entropy to a label from 0 to 1, of which the model's number is the logit.
    """
    pooling: Literal["last", "mean"] = "last"
    """The response's score. last: the value behind its last token, as Hugging Face's classifiers have it; mean: the mean of
    the values behind each of its tokens."""
    margin: Annotated[NonNegativeFloat | None, only_with(".loss", "bradley_terry", "hinge", "squared_gap")] = None
    """Margin: what the difference should be (hinge, squared_gap; by default 1), or what Bradley-Terry subtracts from it
    (by default 0). A pair's own column, data.margin_key, comes first.
    """
    center: Annotated[NonNegativeFloat, only_with(".loss", "bradley_terry")] = 0.0
    """Weight of the mean of (chosen + rejected)^2, which keeps scores around 0."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), only_with(".loss", "bradley_terry")] = 0.0
    """bradley_terry: conservative labels, as of conservative DPO: with this probability the rejected one is the better one."""
    top: Annotated[Positive | None, only_with(".loss", "plackett_luce")] = None
    """plackett_luce: only the first so many places of a list count; 1: which response is the best."""


@section
class DPOConfig:
    """Direct preference optimization (`megatron-rl dpo`): what is learned from the preferences of data.path."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "kto"] = "sigmoid"
    """sigmoid: DPO's own; ipo: the squared error of the difference to 1 / (2 beta); hinge: SLiC's; robust: sigmoid, unbiased
    where a share label_smoothing of the labels is wrong; kto: of single responses with a label, or of the two of a pair."""
    beta: PositiveFloat = 0.1
    """Weight of the KL to the reference that the loss stands for: a larger one keeps the policy nearer."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), only_with(".loss", "sigmoid", "robust")] = 0.0
    """Share of the pairs that are taken to be labeled the wrong way round: with sigmoid conservative DPO."""
    length_normalized: Annotated[bool, not_with(".loss", "kto", example="sigmoid")] = False
    """Mean log-ratio of a response's tokens instead of their sum."""
    sft_coefficient: NonNegativeFloat = 0.0
    """Weight of the chosen responses' negative log-likelihood, mean over their tokens, beside the loss."""
    desirable_weight: Annotated[PositiveFloat, only_with(".loss", "kto")] = 1.0
    """kto: weight of the responses labeled as good."""
    undesirable_weight: Annotated[PositiveFloat, only_with(".loss", "kto")] = 1.0
    reference: str | None = None
    """Hugging Face folder of the reference; by default model.path."""
    precompute_reference: bool = False
    """Score all responses by the reference before the first step, and keep it in memory no longer."""


@section
class CriticConfig:
    """The critic of PPO (algorithm.advantage: gae): a model of its own with a value head, on the trainer's ranks."""

    path: str | None = None
    """Hugging Face folder that it starts as: a reward model's, or a language model's; by default model.path. It has the
    policy's tokenizer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """As the section optimizer, for the critic."""
    freeze: list[str] = dataclasses.field(default_factory=list)
    """As model.freeze, for the critic."""
    clip: PositiveFloat | None = 0.2
    """A value that is further than this from the one before the step's updates, and has gone there towards its return, has no
    gradient (PPO); null: no limit."""
    warmup_steps: Count = 0
    """First steps, in which the critic learns and the policy does not."""


@section
class DistillationConfig:
    """A teacher: of `megatron-rl sft` on demonstrations, and of `megatron-rl train` on what the model itself samples."""

    teacher: str | None = None
    """Hugging Face folder of the teacher, of any size and family, with the model's tokenizer. The trainer's processes run it,
    on their own layout. null: there is none."""
    address: str | None = None
    """In its place an SGLang server of the teacher (http://host:port), which tells the log-probs of what was sampled
    (placement: advantage)."""
    api_key: Secret | None = None
    """Where the key of that server is: env:NAME or file:PATH."""
    recorded: bool = False
    """In its place the log-probs that the demonstrations' rows have of it (rollout.demonstrations.top_log_probs): the loss is
    the divergence between the recorded tokens and one class for all others (sft; forward or reverse)."""
    placement: Literal["loss", "advantage"] = "loss"
    """loss: the divergence of both whole distributions at each token, computed in chunks. advantage (train): log teacher - log
    policy of the sampled token is added to its advantage, so that updates lower the reverse KL."""
    direction: Annotated[Literal["forward", "reverse", "jensen_shannon"], only_with(".placement", "loss")] = "forward"
    """loss: forward is KL(teacher || model); reverse is KL(model || teacher); jensen_shannon is both to their mixture (GKD)."""
    mix: Annotated[float, Field(gt=0, lt=1), only_with(".direction", "jensen_shannon")] = 0.5
    """jensen_shannon: the teacher's weight in the mixture."""
    temperature: Annotated[PositiveFloat, only_with(".placement", "loss")] = 1.0
    """loss: what the logits of both are divided by. The divergence counts times its square (Hinton et al. 2015)."""
    coefficient: NonNegativeFloat = 1.0
    """Weight of what the teacher says."""
    feature_layers: list[tuple[Count, Count]] = dataclasses.field(default_factory=list)
    """Pairs of decoder layers, of the model and of the teacher, from 0, whose outputs are drawn together at the counted tokens;
    both models have to have the same hidden size."""
    feature_loss: Annotated[Literal["mse", "cosine"], only_with(".feature_layers", example=[[0, 0]])] = "mse"
    """feature_layers: mean squared difference of the outputs, or 1 - cosine."""
    feature_coefficient: Annotated[NonNegativeFloat, only_with(".feature_layers", example=[[0, 0]])] = 1.0
    """Weight of the features' loss, a sum over the pairs of layers."""
    task_coefficient: NonNegativeFloat = 0.0
    """Weight of the rest: the likelihood of the demonstrations (sft), the advantages of the rewards (train); 0: the teacher
    alone is learned from, and rewards are measured."""


@section
class PruningConfig:
    """Dynamic vocabulary pruning, which leaves the vocabulary's tail out of the policy."""

    enabled: bool = False
    """Engine and trainer both take as the policy the tokens that are within rho of the likeliest one, renormalized, so that
    the vocabulary's tail is neither sampled nor learned from. The paper's veto is a key of its own: correction.veto: 1e-4."""
    rho: Annotated[float, Field(gt=0, le=1), only_with_any(".enabled", ".measure")] = math.exp(-13)
    """A token stays while its probability is at least rho times that of the likeliest; by default e^-13 = 2.26e-6."""
    engine_rho: Annotated[Annotated[float, Field(gt=0, le=1)] | None, only_with(".enabled")] = None
    """The engine's rho; null: the same. A larger one keeps the engine away from tokens outside the trainer's set."""
    measure: Annotated[bool, not_with(".enabled")] = False
    """Without enabled: log mismatch/kl_safe, of the sampled tokens that rho would leave in the trainer's set."""


@section
class CorrectionConfig:
    """The correction of the mismatch between the engine's log-probs and the trainer's."""

    mode: Literal["none", "truncate", "mask", "clip"] = "none"
    """Weight of a token in the loss, from its ratio r = trainer / engine. truncate (TIS): min(r, high); mask (MIS): r
    where low <= r <= high, else 0; clip: r clamped to [low, high]."""
    level: Annotated[Literal["token", "sequence", "geometric"], only_with(".mode", "mask", "truncate", "clip")] = (
        "token"
    )
    """Which ratio counts: the token's, the whole response's, or the geometric mean over the response."""
    low: Annotated[NonNegativeFloat | None, only_with(".mode", "mask", "clip")] = None
    """Lower bound of the ratio itself, so below 1: 0.8 for a threshold of 0.2."""
    high: Annotated[PositiveFloat | None, only_with(".mode", "mask", "truncate", "clip")] = None
    """Upper bound of the ratio itself, so above 1."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A response with a token whose ratio is below this leaves the update; the paper's is 1e-4."""
    reject: Literal["none", "abs_log_ratio", "k2", "k3"] = "none"
    """Drop what is further from the engine than reject_above: abs_log_ratio = |log r|,
    k2 = (log r)^2 / 2, k3 = r - 1 - log r."""
    reject_level: Annotated[
        Literal["token", "sequence", "geometric"], only_with(".reject", "k3", "k2", "abs_log_ratio")
    ] = "geometric"
    """Drop a token by its own statistic, or a response by the sum or the mean over its tokens."""
    reject_above: Annotated[PositiveFloat | None, only_with(".reject", "k3", "k2", "abs_log_ratio")] = None
    """The largest value of the statistic that stays."""
    denominator: Literal["sampled", "kept_sequences", "kept_tokens", "weights"] = "kept_tokens"
    """Denominator of the loss: what it is a mean over. sampled: all tokens of the responses, those without a term too
    (they shrink the gradient); kept_sequences: the tokens of the responses that neither veto nor reject dropped whole
    (the paper's); kept_tokens: those whose weight is not 0; weights: by the sum of the weights (self-normalized), KL
    and entropy too.
    """
    bypass: bool = False
    """The loss's ratio starts from the engine's log-probs instead of the trainer's: one ratio for mismatch and drift."""


PREDICTING: tuple[Literal["pr2", "pr3"], ...] = ("pr2", "pr3")
"""Sources of routes (routing.source) that have predictors."""
FROM_ENGINE: tuple[Literal["r3", "pr3"], ...] = ("r3", "pr3")
"""Sources of routes that the engine sends along."""


@section
class RoutingConfig:
    """Replay of expert choices, and the predictors that anticipate them."""

    source: Literal["none", "r2", "r3", "pr2", "pr3"] = "none"
    """The experts of a token while the trainer learns from it. none: the router's choice, anew in each pass; r2: those of
    the log-prob pass before the first update; r3: those of the engine; pr2: as r2, recorded by routers that
    anticipate how updates will move them; pr3: as pr2, recorded in the engine."""
    predictor_loss: Literal["kl", "delta"] = "kl"
    """Loss of the predictors: KL from the current router, or the squared error of the change of its logits."""
    predictor_horizon: Literal["constant", "scaled"] = "scaled"
    """How far predictors look ahead. constant (the paper's): one bias for all mini-batches of a rollout batch; scaled: in
    proportion to the updates that come before a mini-batch's own, so 0 for the first, and on average as far. An engine that
    predicts (pr3) looks ahead by the average."""
    predictor_lr_multiplier: PositiveFloat = 0.1
    """Learning rate of the predictors, as a multiple of the optimizer's."""
    predictor_decay: Fraction = 0.01
    """Share of itself that a predictor forgets at each of its updates, because no drift goes on forever; for the same reason
    its Adam has no momentum. 0 (the paper's): it forgets nothing and has the optimizer's momentum. Predictors reach no
    further than multiplier / decay updates of a router; (updates_per_step - 1) / 2 is what they have to."""
    cached_tokens: Positive = 1024
    """Tokens of each response, evenly spaced, whose router inputs and logits are kept for predictors and metrics."""
    replay_gates: Annotated[bool, only_with(".source", "r3")] = False
    """With r3: the experts' weights are the engine's too, as values; their gradient is that of the trainer's own weights."""
    give_up_below: Annotated[Fraction, only_with(".source", "r3")] = 0.0
    """With r3: an expert that the engine chose is not replayed where the trainer's router gives it less than this times what it
    gives the weakest of its own choice; the trainer's next own choice takes its place. 0: all are replayed."""
    features: Annotated[Literal["trainer", "engine"], only_with(".source", "pr3")] = "trainer"
    """Data that Pr3's predictors learn from: the trainer's log-prob pass over the replayed routes, or what the engine saw."""


@section
class VP2OConfig:
    """Stein variational updates over the experts of each MoE layer (arXiv:2606.08032)."""

    enabled: bool = False
    """Measure co-activation and prototypes, and replace expert gradients by the transformed ones."""
    coactivation: Literal["hard", "soft"] = "hard"
    """Measure of what two experts have in common (Eq. 6). hard: tokens that go to both; soft: their shares in the
    router's distribution over all experts, multiplied, so that experts that never meet differ too.
    """
    neighbors: Annotated[Positive | None, not_with(".attract_above")] = None
    """Attraction: an expert follows the gradients of this many experts: itself and those most often active on the same tokens.
    1: its own alone. By default a quarter of the experts, 2 to 4 (below 4 experts 1)."""
    attract_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """Instead of neighbors: all experts that share at least this part of the tokens with it."""
    attraction: Annotated[Literal["kernel", "mean"], not_with(".neighbors", 1, example=2)] = "kernel"
    """kernel: gradients are weighted by kernel / neighbors, as in the paper, which scales them with 1 / temperature. mean: a
    weighted mean, by the positive kernels over their sum; the temperature has no part in it."""
    inactive_neighbors: Annotated[Positive | None, not_with(".repel_below")] = None
    """Repulsion: an expert's prototype is pushed from those of this many experts, its inactive neighbors: those most rarely
    active on the same tokens. By default a quarter of the experts, 1 to 4."""
    repel_below: Fraction | None = None
    """Instead of inactive_neighbors: all experts that share at most this part of the tokens with it."""
    repulsion: NonNegativeFloat = 0.1
    """Weight of the repulsion (lambda_rep); 0: none."""
    repulsion_scale: Annotated[Literal["absolute", "relative"], not_with(".repulsion", 0.0, example=0.1)] = "relative"
    """relative: in each layer its norm is `repulsion` times that of the output projections' attraction. absolute: as in the
    paper; its weight beside the policy's gradient depends on the size of weights and losses, and may be many times that."""
    temperature: PositiveFloat | None = None
    """T0: the kernel's temperature is T0 / experts; by default T0 is the number of experts, so that an expert's kernel with
    itself is 1. It scales attraction by the kernel, and absolute repulsion, both alike."""
    power_iterations: Positive = 32
    """Power iterations that find a prototype."""
    orthogonality: NonNegativeFloat = 0.01
    """Weight of the loss that keeps apart what the experts of one token put out, mean over tokens, sum over layers; 0: none."""
    orthogonality_form: Annotated[Literal["cosine", "projection"], not_with(".orthogonality", 0.0, example=0.01)] = (
        "cosine"
    )
    """cosine: mean over the pairs of a token's experts of cos^2, at most 1. projection: as in the paper, a sum over pairs;
    it has no bound, and can outweigh the policy's loss many times where many experts are active."""
    orthogonality_tokens: Annotated[Positive, not_with(".orthogonality", 0.0, example=0.01)] = 128
    """Tokens of one micro-batch, evenly spaced, that stand for all in it: each layer keeps the outputs of their experts."""
    trust_region: PositiveFloat | None = None
    """kappa: no update may move the router-weighted prototypes of a layer further than this from those of the weights that the
    engine has (0 to 2). null: no limit."""
    on_violation: Annotated[Literal["reject", "backtrack"], only_with(".trust_region", example=0.1)] = "reject"
    """Treatment of an update beyond the trust region. reject: nothing of it is done; backtrack: its learning rate is halved
    until it fits."""
    probe_tokens: Annotated[Positive, only_with(".trust_region", example=0.1)] = 256
    """Tokens of a rollout batch on each process, evenly spaced, on which the trust region compares routers."""
