"""Keys of the learning algorithm: losses, advantages, mismatch correction, routing replay, VP2O."""

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
    """The KL penalty that keeps the policy near a reference model."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model. 0: no penalty, and no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence of a token, for placement `loss`. With placement `reward` the estimator is always
    k1, log policy - log reference."""
    placement: Annotated[Literal["loss", "reward"], only_with(".coefficient", example=0.05)] = "loss"
    """`loss`: add the KL as a term of the loss. `reward`: subtract the KL from rewards. With advantages that are computed token
    by token (gae, reinforce_plus_plus, reinforce_plus_plus_baseline), each token's KL is subtracted from the reward of this
    token. With all others, the KL of the whole response is subtracted from the reward of the response."""
    target: Annotated[PositiveFloat | None, only_with(".coefficient", example=0.1)] = None
    """Target of the KL divergence from the reference model, in nats per token. A controller adapts the coefficient to reach
    this target (Ziegler et al. 2019). After each step, the controller changes the coefficient by at most 20 % x number of
    responses / horizon. The controller compares the target with the KL of the sampling policy on its own samples (metric
    kl/sampled). null: the coefficient is fixed."""
    horizon: Annotated[Positive, only_with(".target", example=0.1)] = 10_000
    """Number of responses over which the controller of `target` changes the coefficient by at most 20 %."""
    reference: Annotated[str | None, only_with(".coefficient", example=0.05)] = None
    """Hugging Face folder of the reference model; by default model.path."""


OF_TOKENS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages (algorithm.advantage) that are computed token by token."""


@section
class AlgorithmConfig:
    """Advantages and the policy loss."""

    advantage: str = "grpo"
    """Advantage estimator: a name from this list, or a function of your own as module:name. For whole responses with
    reward r: `grpo`: (r - mean) / std over the responses to a prompt; `dr_grpo`: r - mean; `rloo`: r - mean of the
    other responses; `tilt`: group size x softmax of r / tilt_temperature (use it with loss `reinforce`). For single
    tokens: `gae`: PPO's generalized advantage estimation with a critic (section critic); `reinforce_plus_plus`: sum of
    the rewards from this token on, whitened over the step; `reinforce_plus_plus_baseline`: the same for r - mean over
    the responses to a prompt."""
    gamma: Annotated[Fraction, only_with(".advantage", *OF_TOKENS)] = 1.0
    """Discount factor per token of later rewards, for advantages that are computed token by token."""
    lam: Annotated[Fraction, only_with(".advantage", "gae")] = 0.95
    """gae: lambda. At 0, the return of a token is estimated from its reward and the value of the next token; at 1, from all
    later rewards."""
    bootstrap_truncated: Annotated[bool, only_with(".advantage", "gae")] = True
    """gae: treatment of a response that a limit cut off. true: the critic's value after the last token replaces the
    score, as an estimate of the rewards that the missing tokens would bring (the reward part `overlong` still counts).
    false: the response keeps the score of the verifier, usually 0."""
    whiten: bool | None = None
    """true: scale advantages to mean 0 and standard deviation 1 over all tokens of a step. false: leave them unscaled.
    null: scale only advantages that are computed token by token."""
    advantage_clip: PositiveFloat | None = None
    """Largest absolute value of an advantage. The clip is the last operation on advantages. null: no limit."""
    tilt_temperature: Annotated[PositiveFloat, only_with(".advantage", "tilt")] = 1.0
    """tilt: temperature beta of the weights exp(r / beta), with r the reward. A smaller value gives more weight to the
    best response."""
    loss: str = "ppo"
    """Policy loss: a name from this list, or a loss of your own as module:name. A ratio divides the current probability
    by the old one. `ppo`: clipped ratio of each token, as in PPO and GRPO; `gspo`: clipped ratio of the whole sequence;
    `reinforce`: no ratio; `cispo`: a clipped ratio as a weight without gradient; `sapo`: a soft gate instead of the
    clip."""
    clip_low: NonNegativeFloat | None = 0.2
    """Clip the ratio at 1 - clip_low; null: no lower clip. The GSPO paper uses clip_low 3e-4 and clip_high 4e-4 for its
    sequence ratio."""
    clip_high: NonNegativeFloat | None = 0.2
    """Clip the ratio at 1 + clip_high; null: no upper clip. A clip_high above clip_low is DAPO's clip-higher."""
    tau_pos: Annotated[PositiveFloat, only_with(".loss", "sapo")] = 1.0
    """sapo: temperature of the gate for advantages above 0. With a higher value, the weight of a token falls faster as
    the ratio moves away from 1."""
    tau_neg: Annotated[PositiveFloat, only_with(".loss", "sapo")] = 1.05
    """sapo: temperature of the gate for all other advantages."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """Averaging of the token losses of an update. `token_mean`: mean over all tokens; `sequence_mean`: mean over the
    tokens of each sequence, then mean over sequences; `sequence_sum`: sum over the tokens of each sequence /
    rollout.max_new_tokens (a constant), then mean over sequences (Dr. GRPO, with advantage `dr_grpo`; verl's
    seq-mean-token-sum-norm)."""
    target_kl: Annotated[PositiveFloat | None, only_with_any("batch.epochs", "batch.updates_per_step")] = None
    """Early stopping within a step: limit of the KL from the policy at the start of the step, in nats per token (metric
    loss/old_kl). If the forward pass of an update measures a larger KL, the run skips this update and the later updates of the
    step. null: no early stopping. (kl.target is a different feature.)"""
    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus: the loss is reduced by entropy_coefficient x the policy's entropy."""
    entropy_reward: NonNegativeFloat = 0.0
    """Maximum-entropy RL: add entropy_reward x -log probability to the reward of each token. This reward also raises the value
    of states with many possible continuations; entropy_coefficient considers each token alone."""
    on_policy: bool = False
    """Guarantee that each update trains the very policy that sampled the responses. The run stops before an update if a
    response, a server or the trainer has other weights than those pushed last. It also stops if the ratio in the loss
    is not exactly 1."""
    kl: KLConfig = KLConfig()


@section
class SFTConfig:
    """Supervised fine-tuning (`megatron-rl sft`)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share e of each label that is spread evenly over the vocabulary. The loss is (1 - e) x the negative
    log-likelihood of the label + e x the mean negative log-likelihood over the vocabulary. Smoothing keeps the model
    from overconfidence."""


@section
class RewardModelConfig:
    """Training of a reward model (`megatron-rl reward`) from the preferences in data.path."""

    loss: Literal["bradley_terry", "hinge", "squared_gap", "plackett_luce", "squared_error", "cross_entropy"] = (
        "bradley_terry"
    )
    """Loss of the reward model. For pairs and lists: `bradley_terry`: -log sigmoid of the score difference; `hinge`:
    the amount by which the difference is below a margin; `squared_gap`: squared error between the difference and a
    margin; `plackett_luce`: negative log-likelihood of a list's order. For single responses and for steps (process
    rewards): `squared_error`: squared difference from the given score; `cross_entropy`: cross entropy with a label from
    0 to 1, and the model's output as the logit."""
    pooling: Literal["last", "mean"] = "last"
    """Reduction of a response's token values to its score. `last`: the value after the last token, as in Hugging Face's
    classifiers; `mean`: the mean of the values after all tokens."""
    margin: Annotated[NonNegativeFloat | None, only_with(".loss", "bradley_terry", "hinge", "squared_gap")] = None
    """Margin of the score difference. For hinge and squared_gap: the wanted difference (default 1). For bradley_terry:
    a number that is subtracted from the difference (default 0). A row's own margin (data.margin_key) takes
    precedence."""
    center: Annotated[NonNegativeFloat, only_with(".loss", "bradley_terry")] = 0.0
    """Weight of the mean of (chosen score + rejected score)^2, which keeps scores near 0."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), only_with(".loss", "bradley_terry")] = 0.0
    """bradley_terry: assumed probability that a label is wrong and the rejected response is better, as in conservative
    DPO."""
    top: Annotated[Positive | None, only_with(".loss", "plackett_luce")] = None
    """plackett_luce: number of top places of a list whose order the loss uses. 1: only which response is the best.
    null: the whole order."""


@section
class DPOConfig:
    """Direct preference optimization (`megatron-rl dpo`) on the preferences in data.path."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "kto"] = "sigmoid"
    """Preference loss. `sigmoid`: the loss of the DPO paper; `ipo`: squared error between the difference of the two
    log-ratios and 1 / (2 beta); `hinge`: SLiC's loss; `robust`: a sigmoid loss that stays unbiased if the share of
    wrong labels is label_smoothing; `kto`: a loss of single labeled responses, or of both responses of a pair."""
    beta: PositiveFloat = 0.1
    """Strength of the implied KL penalty: a larger value keeps the policy nearer to the reference model."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), only_with(".loss", "sigmoid", "robust")] = 0.0
    """Share of the pairs whose labels are assumed to be swapped. With loss `sigmoid` this is conservative DPO."""
    length_normalized: Annotated[bool, not_with(".loss", "kto", example="sigmoid")] = False
    """Use the mean of the log-ratios of a response's tokens instead of their sum."""
    sft_coefficient: NonNegativeFloat = 0.0
    """Weight of an additional loss: the negative log-likelihood of the chosen responses, as a mean over their tokens."""
    desirable_weight: Annotated[PositiveFloat, only_with(".loss", "kto")] = 1.0
    """kto: weight of the responses labeled as good."""
    undesirable_weight: Annotated[PositiveFloat, only_with(".loss", "kto")] = 1.0
    """kto: weight of the responses labeled as bad."""
    reference: str | None = None
    """Hugging Face folder of the reference model; by default model.path."""
    precompute_reference: bool = False
    """Compute the reference model's log-probs of all responses before the first step, then free the memory of the
    reference model."""


@section
class CriticConfig:
    """The critic of PPO (algorithm.advantage: gae): a separate model with a value head, on the trainer's ranks."""

    path: str | None = None
    """Hugging Face folder of the critic's initial weights, a reward model or a language model; by default model.path.
    The critic must have the policy's tokenizer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the critic; see the section optimizer."""
    freeze: list[str] = dataclasses.field(default_factory=list)
    """Weights of the critic that are not trained; see model.freeze."""
    clip: PositiveFloat | None = 0.2
    """Limit on the change of a value during a step (PPO's value clip). A value gets no gradient once the updates of the
    step have moved it toward its return by more than this limit. null: no limit."""
    warmup_steps: Count = 0
    """Number of first steps in which only the critic is trained, not the policy."""


@section
class DistillationConfig:
    """A teacher model, for `megatron-rl sft` on demonstrations and for `megatron-rl train` on the model's own samples."""

    teacher: str | None = None
    """Hugging Face folder of the teacher, of any size and family, with the model's tokenizer. The trainer's processes
    run the teacher in their own parallel layout. null: the trainer's processes run no teacher."""
    address: str | None = None
    """SGLang server of the teacher (http://host:port), instead of `teacher`. The server returns the log-probs of the
    sampled tokens, for placement `advantage`."""
    api_key: Secret | None = None
    """Reference to the API key of the teacher's server: env:NAME or file:PATH."""
    recorded: bool = False
    """Learn from the teacher's log-probs that are recorded in the demonstrations (rollout.demonstrations.top_log_probs). No
    teacher runs. The loss is a divergence whose classes are the recorded tokens and one class for all other tokens. Only
    sft can do this, with direction `forward` or `reverse`."""
    placement: Literal["loss", "advantage"] = "loss"
    """`loss`: add a term to the loss, the divergence between the whole distributions of teacher and model at each
    token, computed in chunks. `advantage` (train only): add log teacher - log policy of each sampled token to the
    advantage of this token, so that updates lower the reverse KL."""
    direction: Annotated[Literal["forward", "reverse", "jensen_shannon"], only_with(".placement", "loss")] = "forward"
    """Divergence of the loss. `forward`: KL(teacher || model); `reverse`: KL(model || teacher); `jensen_shannon`: KL of
    both models to their mixture (GKD)."""
    mix: Annotated[float, Field(gt=0, lt=1), only_with(".direction", "jensen_shannon")] = 0.5
    """jensen_shannon: weight of the teacher in the mixture."""
    temperature: Annotated[PositiveFloat, only_with(".placement", "loss")] = 1.0
    """Temperature that divides the logits of model and teacher in the loss. The loss multiplies the divergence by the
    square of the temperature (Hinton et al. 2015)."""
    coefficient: NonNegativeFloat = 1.0
    """Weight of the teacher's divergence, in the loss or in the advantage."""
    feature_layers: list[tuple[Count, Count]] = dataclasses.field(default_factory=list)
    """Pairs (layer of the model, layer of the teacher) of decoder layers, counted from 0. A loss term reduces the
    difference between the outputs of the two layers at the trained tokens. Both models must have the same hidden
    size."""
    feature_loss: Annotated[Literal["mse", "cosine"], only_with(".feature_layers", example=[[0, 0]])] = "mse"
    """Loss of feature_layers: `mse`: mean squared difference of the outputs; `cosine`: 1 - cosine similarity."""
    feature_coefficient: Annotated[NonNegativeFloat, only_with(".feature_layers", example=[[0, 0]])] = 1.0
    """Weight of the loss of feature_layers, which is a sum over the pairs of layers."""
    task_coefficient: NonNegativeFloat = 0.0
    """Weight of the task itself: the likelihood of the demonstrations (sft) or the advantages from rewards (train). 0:
    the model learns from the teacher alone, and rewards are only measured."""


@section
class PruningConfig:
    """Dynamic vocabulary pruning: the policy leaves out the tail of the vocabulary."""

    enabled: bool = False
    """Turn on vocabulary pruning. SGLang and the trainer both restrict the policy to tokens whose probability is at
    least rho times that of the likeliest token, and renormalize. Tail tokens are neither sampled nor trained. The veto
    of the paper "Taming the Tail" is a separate key: correction.veto: 1e-4."""
    rho: Annotated[float, Field(gt=0, le=1), only_with_any(".enabled", ".measure")] = math.exp(-13)
    """Smallest probability that a token may have, as a multiple of the likeliest token's probability; by default e^-13
    = 2.26e-6."""
    engine_rho: Annotated[Annotated[float, Field(gt=0, le=1)] | None, only_with(".enabled")] = None
    """rho of the SGLang servers; null: the same as rho. A larger value keeps SGLang from sampling tokens that the
    trainer prunes."""
    measure: Annotated[bool, not_with(".enabled")] = False
    """Without pruning, log the metric mismatch/kl_safe: the mismatch on those sampled tokens that rho would keep."""


@section
class CorrectionConfig:
    """Correction of the mismatch between SGLang's log-probs and the trainer's."""

    mode: Literal["none", "truncate", "mask", "clip"] = "none"
    """Weight of a token in the loss, from the ratio r of its probability in the trainer to that in SGLang. `none`: 1;
    `truncate` (TIS): min(r, high); `mask` (MIS): r if low <= r <= high, else 0; `clip`: r clamped to [low, high]."""
    level: Annotated[Literal["token", "sequence", "geometric"], only_with(".mode", "mask", "truncate", "clip")] = (
        "token"
    )
    """Ratio that `mode` uses: the token's own ratio, the ratio of the whole response, or the geometric mean of the
    ratios of the response."""
    low: Annotated[NonNegativeFloat | None, only_with(".mode", "mask", "clip")] = None
    """Lower bound of the ratio itself (not its distance from 1), a number below 1. With 0.8, ratios from 0.8 on are allowed."""
    high: Annotated[PositiveFloat | None, only_with(".mode", "mask", "truncate", "clip")] = None
    """Upper bound of the ratio itself, a number above 1."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Smallest ratio of a single token that is allowed: if a token's ratio is below this, the update drops the whole
    response. The paper "Taming the Tail" uses 1e-4. null: no veto."""
    reject: Literal["none", "abs_log_ratio", "k2", "k3"] = "none"
    """Statistic of the mismatch of a token, with r = trainer / SGLang. Tokens or responses above the limit reject_above
    are dropped. `abs_log_ratio`: |log r|; `k2`: (log r)^2 / 2; `k3`: r - 1 - log r."""
    reject_level: Annotated[
        Literal["token", "sequence", "geometric"], only_with(".reject", "k3", "k2", "abs_log_ratio")
    ] = "geometric"
    """Unit that `reject` drops. `token`: single tokens, by their own statistic; `sequence`: whole responses, by the sum
    over their tokens; `geometric`: whole responses, by the mean over their tokens."""
    reject_above: Annotated[PositiveFloat | None, only_with(".reject", "k3", "k2", "abs_log_ratio")] = None
    """Largest value of the statistic `reject` that is kept."""
    denominator: Literal["sampled", "kept_sequences", "kept_tokens", "weights"] = "kept_tokens"
    """Denominator of the loss. `sampled`: all tokens of the responses, dropped ones included, so that dropping shrinks
    the gradient; `kept_sequences`: the tokens of all responses that neither veto nor reject dropped as a whole (as in
    "Taming the Tail"); `kept_tokens`: the tokens whose weight is not 0; `weights`: the sum of the weights
    (self-normalized), also for KL and entropy."""
    bypass: bool = False
    """Compute the loss's ratio against SGLang's log-probs instead of the trainer's old log-probs. One ratio then covers
    both the mismatch and the change of the policy."""


PREDICTING: tuple[Literal["pr2", "pr3"], ...] = ("pr2", "pr3")
"""Sources of routes (values of routing.source) that use route predictors."""
FROM_ENGINE: tuple[Literal["r3", "pr3"], ...] = ("r3", "pr3")
"""Sources of routes (values of routing.source) for which SGLang returns the routes with its responses."""


@section
class RoutingConfig:
    """Replay of routes (the chosen experts of each token), and the predictors of later routes."""

    source: Literal["none", "r2", "r3", "pr2", "pr3"] = "none"
    """Source of a token's experts while the trainer learns from the token. `none`: the router chooses again in each
    forward pass; `r2`: replay the routes of the log-prob pass before the first update; `r3`: replay the routes of
    SGLang; `pr2`: like r2, but recorded by routers that predict how the updates will change their choices; `pr3`: like
    pr2, but recorded in SGLang."""
    predictor_loss: Literal["kl", "delta"] = "kl"
    """Loss of the predictors. `kl`: KL divergence from the current router; `delta`: squared error of the change in the
    router's logits."""
    predictor_horizon: Literal["constant", "scaled"] = "scaled"
    """Size of the bias by which a predictor changes the router's logits. `constant` (the Pr2 paper): the same bias for all
    updates of a rollout batch; `scaled`: a bias proportional to the number of earlier updates of the rollout batch. The scaled
    bias is 0 for the first update and has the same average as the constant bias. SGLang's predictor (pr3) always uses the
    average bias."""
    predictor_lr_multiplier: PositiveFloat = 0.1
    """Learning rate of the predictors, as a multiple of optimizer.lr."""
    predictor_decay: Fraction = 0.01
    """Share by which a predictor's weights shrink at each of its updates, because routers do not drift in one direction
    forever. With decay, the predictors' Adam has no momentum. 0 (the Pr2 paper): no decay, and the momentum of the
    section optimizer. Predictors can look ahead at most predictor_lr_multiplier / predictor_decay router updates.
    They need to look ahead (updates_per_step - 1) / 2 router updates."""
    cached_tokens: Positive = 1024
    """Number of evenly spaced tokens of each response whose router inputs and logits are kept for predictors and
    metrics."""
    replay_gates: Annotated[bool, only_with(".source", "r3")] = False
    """With r3, also use SGLang's gate values in the forward pass. Gradients still flow through the trainer's own gates
    (straight-through)."""
    give_up_below: Annotated[Fraction, only_with(".source", "r3")] = 0.0
    """With r3: do not replay an expert if the trainer's gate for it is below this fraction of the weakest gate among
    the trainer's own choices. The trainer's next choice then replaces this expert. 0: replay all experts."""
    features: Annotated[Literal["trainer", "engine"], only_with(".source", "pr3")] = "trainer"
    """Training data of Pr3's predictors. `trainer`: router inputs and logits of the trainer's log-prob pass with the
    replayed routes; `engine`: router inputs and logits that SGLang recorded."""


@section
class VP2OConfig:
    """Stein variational updates over the experts of each MoE layer (arXiv:2606.08032)."""

    enabled: bool = False
    """Measure co-activation and prototypes of the experts, and replace expert gradients by VP2O's transformed gradients."""
    coactivation: Literal["hard", "soft"] = "hard"
    """Measure of how often two experts are active together (Eq. 6). `hard`: the share of tokens that go to both
    experts; `soft`: the mean product of their probabilities in the router's distribution over all experts. `soft` also
    distinguishes experts that are never active on the same token."""
    neighbors: Annotated[Positive | None, not_with(".attract_above")] = None
    """Attraction: number of experts whose gradients an expert follows. They are the expert itself and the experts that are most
    often active on the same tokens. 1: only its own gradient. By default a quarter of the experts, at least 2 and at most 4 (1
    if there are fewer than 4 experts)."""
    attract_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """Instead of neighbors: an expert follows all experts that are active together with it on at least this fraction of
    tokens."""
    attraction: Annotated[Literal["kernel", "mean"], not_with(".neighbors", 1, example=2)] = "kernel"
    """Weights of the neighbors' gradients. `kernel`: kernel value / number of neighbors, as in the paper; these weights
    scale with 1 / temperature. `mean`: positive kernel values divided by their sum; the temperature has no effect."""
    inactive_neighbors: Annotated[Positive | None, not_with(".repel_below")] = None
    """Repulsion: number of experts from whose prototypes an expert's prototype is pushed away. They are the experts that are
    most rarely active on the same tokens. By default a quarter of the experts, at least 1 and at most 4."""
    repel_below: Fraction | None = None
    """Instead of inactive_neighbors: an expert is pushed away from all experts that are active together with it on at
    most this fraction of tokens."""
    repulsion: NonNegativeFloat = 0.1
    """Weight of the repulsion (lambda_rep). 0: no repulsion."""
    repulsion_scale: Annotated[Literal["absolute", "relative"], not_with(".repulsion", 0.0, example=0.1)] = "relative"
    """Scale of the repulsion. `relative`: the norm of the repulsion in a layer is `repulsion` times the norm of the
    attraction of the layer's output projections. `absolute`: no scaling, as in the paper. The sizes of weights and
    losses then determine the repulsion's size relative to the policy gradient, and it may be many times larger."""
    temperature: PositiveFloat | None = None
    """T0: the temperature of the kernel is T0 / number of experts. By default T0 is the number of experts, so that the
    kernel of an expert with itself is 1. T0 scales both the attraction `kernel` and the repulsion scale `absolute`."""
    power_iterations: Positive = 32
    """Number of power iterations that compute a prototype."""
    orthogonality: NonNegativeFloat = 0.01
    """Weight of the loss that makes the outputs of a token's experts orthogonal. The loss is a mean over tokens and a
    sum over layers. 0: no such loss."""
    orthogonality_form: Annotated[Literal["cosine", "projection"], not_with(".orthogonality", 0.0, example=0.01)] = (
        "cosine"
    )
    """Form of the orthogonality loss. `cosine`: mean of cos^2 over the pairs of a token's experts, at most 1.
    `projection`: a sum over pairs, as in the paper. This sum has no bound; with many active experts it can be many
    times larger than the policy loss."""
    orthogonality_tokens: Annotated[Positive, not_with(".orthogonality", 0.0, example=0.01)] = 128
    """Number of evenly spaced tokens of a micro-batch on which the orthogonality loss is measured. Each layer keeps the
    expert outputs of these tokens in memory."""
    trust_region: PositiveFloat | None = None
    """Limit kappa (0 to 2) on how far an update may move the router-weighted prototypes of a layer from those of
    SGLang's weights. null: no limit."""
    on_violation: Annotated[Literal["reject", "backtrack"], only_with(".trust_region", example=0.1)] = "reject"
    """Treatment of an update beyond the trust region. `reject`: skip the update; `backtrack`: halve the learning rate
    of the update until it stays within the region."""
    probe_tokens: Annotated[Positive, only_with(".trust_region", example=0.1)] = 256
    """Number of evenly spaced tokens of a rollout batch, on each process, on which the trust region compares routers."""
