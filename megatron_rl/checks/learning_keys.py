"""Rules of what is learned, and how: losses, advantages, correction, routes, VP2O, schedules, teachers, preferences."""

from __future__ import annotations

from megatron_rl.algorithms.correction_choice import Correction
from megatron_rl.checks.rules import Rule, Rules
from megatron_rl.config import (
    FROM_ENGINE,
    PREDICTING,
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    CorrectionConfig,
    CriticConfig,
    DataConfig,
    DistillationConfig,
    DPOConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    PruneConfig,
    PruningConfig,
    RewardsConfig,
    RolloutConfig,
    RoutingConfig,
    SyncConfig,
    VP2OConfig,
)
from megatron_rl.config.plan import OFFLINE, Kind, total_updates
from megatron_rl.errors import UserError
from megatron_rl.servers.flags import asks_routes


def advantages(algorithm: AlgorithmConfig, critic: CriticConfig, batch: BatchConfig, steps: int) -> Rules:
    """Rules of estimators, the critic and the controller of the KL."""
    kl = algorithm.kl
    yield Rule(
        algorithm.advantage == "gae" and critic.warmup_steps >= steps,
        f"critic.warmup_steps = {critic.warmup_steps} leaves none of the {steps} steps to the policy; make it smaller, or"
        " steps larger",
    )
    responses = batch.prompts_per_step * batch.samples_per_prompt
    yield Rule(
        kl.target is not None and responses >= 5 * kl.horizon,
        f"algorithm.kl.horizon = {kl.horizon}: the {responses} responses of a step are five horizons or more, each"
        f" of which may take a fifth of the coefficient; set horizon: {10 * responses}",
    )
    yield Rule(
        algorithm.advantage == "tilt" and algorithm.whiten,
        "algorithm.whiten with advantage = tilt: its weights are those of a likelihood, never below 0, and would no"
        " longer be; set whiten: null",
    )


def policy_loss(
    algorithm: AlgorithmConfig, batch: BatchConfig, correction: CorrectionConfig, routing: RoutingConfig
) -> Rules:
    """Rules of the loss and of epochs."""
    yield Rule(
        algorithm.aggregation == "sequence_sum" and correction.denominator == "weights",
        "correction.denominator = weights divides by a sum of weights, and algorithm.aggregation = sequence_sum by a"
        " constant; set denominator: kept_sequences or sampled, or aggregation: token_mean",
    )
    yield Rule(
        algorithm.target_kl is not None and batch.updates == 1,
        "algorithm.target_kl does nothing with one update a step, which is always done; set batch.epochs or"
        " batch.updates_per_step to 2 or more, or target_kl: null",
    )
    yield Rule(
        routing.source in PREDICTING and batch.epochs > 1,
        f"batch.epochs = {batch.epochs} with routing.source = {routing.source}: predictors anticipate the"
        " routers of the one update that learns from a response; set epochs: 1, or routing.source: r2 or r3",
    )


_BOUNDS = {
    "truncate": "; set correction.high: 2.0",
    "mask": "; set correction.low: 0.5 and high: 2.0",
    "clip": "; set correction.low: 0.5 and high: 2.0",
}


def corrections(correction: CorrectionConfig, routing: RoutingConfig, batch: BatchConfig) -> Rules:
    """Rules of bounds that are missing or cross, and of two corrections of one thing."""
    try:
        Correction.of(correction)
    except ValueError as error:
        raise UserError(f"config: correction: {error}{_BOUNDS.get(correction.mode, '')}") from None
    yield Rule(
        (correction.low or 0.0) > 1 or (correction.high is not None and correction.high < 1),
        f"correction.low = {correction.low}, high = {correction.high} leave out a ratio of 1, at which nothing"
        " is wrong: bounds are of the ratio trainer / engine itself; set low: 0.8 and high: 1.2 for a threshold of 0.2",
    )
    for key, given, valid in (
        ("veto", correction.veto is not None, "null"),
        ("mode", correction.mode != "none", "none"),
        ("reject", correction.reject != "none", "none"),
    ):
        yield Rule(
            correction.bypass and given,
            f"correction.{key} with correction.bypass: there are no log-probs of the old policy to compare the"
            f" engine's with, as its ratio is part of the loss's; set correction.bypass: false, or {key}: {valid}",
        )
    yield Rule(
        correction.bypass and routing.source in ("r2", *PREDICTING) and batch.updates > 1,
        f"correction.bypass leaves out the pass in which routing.source = {routing.source} records the"
        " routes; set bypass: false, or routing.source: r3",
    )


def routes(routing: RoutingConfig, rollout: RolloutConfig, model: ModelConfig, batch: BatchConfig) -> Rules:
    """Rules of sources of routes."""
    source = routing.source
    yield Rule(
        rollout.gates and not asks_routes(rollout, routing),
        "rollout.gates = true asks for the weights of no experts: set rollout.routes: true",
    )
    yield Rule(
        source != "none" and model.moe_router_fusion,
        f"routing.source = {source} with model.moe_router_fusion: the fused router would ignore the routes;"
        " turn the fusion off, or use routing.source = none",
    )
    yield Rule(
        source in PREDICTING and batch.updates_per_step < 2,
        f"routing.source = {source} predicts how routers move from one update of a rollout batch to the next;"
        " batch.updates_per_step = 1 has no next: raise it, or use r2 or r3",
    )


def refresh(sync: SyncConfig, routing: RoutingConfig, correction: CorrectionConfig) -> Rules:
    """Rules of old rollouts that would be taken for new ones."""
    drifts = sync.refresh.when == "drift"
    yield Rule(
        drifts and routing.source in FROM_ENGINE,
        f"sync.refresh.when = drift with routing.source = {routing.source}: what is replayed must be of the"
        " weights that are trained, and the engine's would be older; set sync.refresh.when: always, or routing.source: r2",
    )
    yield Rule(
        drifts and not correction.bypass and correction.mode == "none",
        f"sync.refresh.when = drift samples from weights that are up to {sync.refresh.max_staleness} steps old, and"
        " nothing corrects for it; set correction.bypass: true (the loss's ratio starts from the engine's log-probs), or"
        " correction.mode: truncate with high: 2.0",
    )


def on_policy(
    algorithm: AlgorithmConfig,
    batch: BatchConfig,
    sync: SyncConfig,
    rollout: RolloutConfig,
    correction: CorrectionConfig,
) -> Rules:
    """Rules of what makes the claim of algorithm.on_policy untrue from the start."""
    moved = "the later updates of a step are of a policy that has moved"
    for contradicts, key, why, remedy in (
        (
            batch.updates_per_step > 1,
            f"batch.updates_per_step = {batch.updates_per_step}",
            moved,
            "set it to 1",
        ),
        (batch.epochs > 1, f"batch.epochs = {batch.epochs}", moved, "set it to 1"),
        (
            sync.refresh.when == "drift",
            "sync.refresh.when = drift",
            "samples may come from weights that are steps old",
            "set it to always",
        ),
        (rollout.load, "rollout.load", "a record was sampled by another run's weights", "leave it out"),
        (
            correction.bypass,
            "correction.bypass",
            "the ratio starts from the engine's log-probs, which are never exactly the trainer's",
            "set it to false",
        ),
    ):
        yield Rule(
            algorithm.on_policy and contradicts,
            f"{key} with algorithm.on_policy: {why}; {remedy}, or set algorithm.on_policy: false",
        )


def stein(vp2o: VP2OConfig, model: ModelConfig, kind: Kind) -> Rules:
    """Rules of parts of VP2O that cannot work, or do nothing."""
    if not vp2o.enabled:
        return
    yield Rule(kind in OFFLINE, f"vp2o is of reinforcement learning; set vp2o.enabled: false for {kind}")
    yield Rule(
        model.moe_router_fusion,
        "vp2o with model.moe_router_fusion: the fused router does not tell which experts are active together;"
        " turn the fusion off",
    )
    yield Rule(
        vp2o.orthogonality and model.moe_dispatcher != "alltoall",
        f"vp2o.orthogonality needs what each expert of a token puts out, which model.moe_dispatcher ="
        f" {model.moe_dispatcher} adds up on the way; use alltoall, or set vp2o.orthogonality: 0",
    )
    absolute = vp2o.repulsion and vp2o.repulsion_scale == "absolute"
    yield Rule(
        vp2o.temperature is not None and vp2o.attraction == "mean" and not absolute,
        "vp2o.temperature with vp2o.attraction: mean and without an absolute repulsion does nothing; set"
        " vp2o.repulsion instead, or attraction: kernel",
    )
    attract, repel = vp2o.attract_above, vp2o.repel_below
    if attract is not None and repel is not None:
        yield Rule(
            repel >= attract,
            f"vp2o.repel_below = {repel:g} is not below attract_above = {attract:g}: pairs"
            " between them would attract and repel at once",
        )


def schedules(
    kind: Kind,
    steps: int,
    batch: BatchConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig,
    optimizer: OptimizerConfig,
) -> Rules:
    """Rules of warm-ups that leave nothing of the updates, and of epochs of what has no rollout batch."""
    yield Rule(
        kind != "train" and batch.epochs > 1,
        f"batch.epochs = {batch.epochs} is of reinforcement learning, and megatron-rl {kind} goes through"
        " its data by steps; raise steps instead, and set epochs: 1",
    )
    has_critic = kind == "train" and algorithm.advantage == "gae"
    learners = [("optimizer", optimizer, total_updates(steps, batch, algorithm.advantage, critic, kind))]
    learners += [("critic.optimizer", critic.optimizer, steps * batch.updates)] if has_critic else []
    for key, own, updates in learners:
        decay_steps = own.decay_steps or updates
        yield Rule(
            own.warmup_steps >= decay_steps,
            f"{key}.warmup_steps = {own.warmup_steps} leaves nothing of the {decay_steps} updates to train;"
            f" the largest is {decay_steps - 1}",
        )


def teachers(
    kind: Kind,
    teaches: bool,
    distillation: DistillationConfig,
    data: DataConfig,
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    pruning: PruningConfig,
) -> Rules:
    """Rules of distillation, with what would be left out of the advantages without a word."""
    if not teaches:
        return
    yield Rule(
        kind not in ("sft", "train"),
        f"a teacher is of megatron-rl sft and train, and {kind} has none; leave distillation out",
    )
    sources = {
        "teacher": distillation.teacher is not None,
        "address": distillation.address is not None,
        "recorded": distillation.recorded,
    }
    given = [f"distillation.{name}" for name, there in sources.items() if there]
    yield Rule(len(given) > 1, f"{' and '.join(given[:2])} are both given; leave one of them out")
    yield Rule(
        not distillation.coefficient and not distillation.feature_layers,
        "distillation.coefficient = 0: the teacher would teach nothing; leave distillation out",
    )
    yield Rule(
        distillation.placement == "advantage" and kind == "sft",
        "distillation.placement = advantage: demonstrations have no advantages; set it to loss",
    )
    yield Rule(
        distillation.recorded and kind == "train",
        "distillation.recorded: a record is of demonstrations, and train learns from what the model samples; set"
        " distillation.teacher",
    )
    recorded = "recorded log-probs are those of temperature 1, and of a part of the tokens"
    yield Rule(
        distillation.recorded and distillation.temperature != 1.0,
        f"distillation.temperature = {distillation.temperature}: {recorded}; leave it out, or set distillation.teacher",
    )
    yield Rule(
        distillation.recorded and distillation.direction == "jensen_shannon",
        f"distillation.direction = jensen_shannon: {recorded}; set it to forward or reverse",
    )
    yield Rule(
        distillation.address is not None and distillation.placement == "loss",
        "distillation.address: a server tells the log-probs of sampled tokens alone, and the loss asks for whole"
        f" distributions; set {'placement: advantage' if kind == 'train' else 'distillation.teacher'}",
    )
    yield Rule(
        distillation.feature_layers and distillation.teacher is None,
        f"distillation.feature_layers = {[list(pair) for pair in distillation.feature_layers]}: only a model beside this"
        " one has layers to look at; set distillation.teacher",
    )
    yield Rule(
        distillation.recorded and data.tokens_key is None,
        "distillation.recorded learns what a teacher said of recorded tokens, and data.tokens_key: null leaves"
        " them out; set tokens_key: response_tokens",
    )
    if kind != "train":
        return
    kl, sampling = algorithm.kl, rollout.sampling
    for key, shapes in (
        ("algorithm.entropy_reward", algorithm.entropy_reward > 0),
        ("algorithm.kl.placement = reward", kl.coefficient > 0 and kl.placement == "reward"),
    ):
        yield Rule(
            shapes and not distillation.task_coefficient,
            f"{key} with distillation.task_coefficient = 0: it is a part of the rewards, of which nothing counts;"
            " set task_coefficient, or leave it out",
        )
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.tail_floor is not None or pruning.enabled
    yield Rule(
        distillation.placement == "advantage" and (sampling.temperature != 1 or cut),
        "distillation.placement = advantage compares the teacher's log-probs, at temperature 1 over the whole"
        " vocabulary, with those of what is sampled from; set rollout.sampling.temperature: 1 and neither top_p, top_k nor"
        " pruning, or placement: loss",
    )


def starts(
    kind: Kind, checkpoint: CheckpointConfig, dpo: DPOConfig, algorithm: AlgorithmConfig, model: ModelConfig
) -> Rules:
    """Rules of a reference that nobody names: it is the policy's start, and a checkpoint is no folder to read it from."""
    key, named, wanted = (
        ("dpo.reference", dpo.reference, True)
        if kind == "dpo"
        else ("algorithm.kl.reference", algorithm.kl.reference, kind == "train" and algorithm.kl.coefficient > 0)
    )
    yield Rule(
        checkpoint.load and wanted and named is None,
        f"checkpoint.load without {key}: the policy would begin as {checkpoint.load}, and its reference as"
        f" {model.path}; convert the checkpoint and give its folder as model.path, or name the reference",
    )
    yield Rule(
        model.keep_zeros and checkpoint.load,
        "model.keep_zeros with checkpoint.load: the zeros are those of model.path; write the checkpoint as a"
        f" folder (megatron-rl convert {checkpoint.load} FOLDER), and give that as model.path",
    )


def preferences(dpo: DPOConfig, batch: BatchConfig) -> Rules:
    """Rules of direct preference optimization."""
    yield Rule(
        dpo.loss == "kto" and batch.prompts_per_step < 2,
        "batch.prompts_per_step = 1 with dpo.loss = kto, whose baseline takes each prompt with the response to"
        " another one; use 2 or more",
    )


def reward_parts(kind: Kind, data: DataConfig, rewards: RewardsConfig, rollout: RolloutConfig, teaches: bool) -> Rules:
    """Rules of where rewards come from."""
    yield Rule(
        kind == "train" and data.verifier == "none" and not (rewards.models or rewards.judges or teaches),
        "data.verifier: none judges no response, and rewards.models is empty, so that nothing gives a reward;"
        " name a reward model, a judge (rewards.judges), a teacher (distillation.teacher), or another verifier",
    )
    for name, scorer in rewards.models.items():
        yield Rule(
            scorer.path is None and scorer.address is None,
            f"rewards.models.{name} has neither a path nor an address; give it the folder of a reward model",
        )
    yield Rule(
        rewards.overlong_buffer > rollout.max_new_tokens,
        f"rewards.overlong_buffer = {rewards.overlong_buffer} is more than rollout.max_new_tokens ="
        f" {rollout.max_new_tokens}, so that every response would be punished; make it smaller",
    )


def pruned_parts(prune: PruneConfig, lora: LoRAConfig, precision: PrecisionConfig, model: ModelConfig) -> Rules:
    """Rules of megatron-rl prune: what would remove nothing, or cannot go with it."""
    sizes = (prune.layers, prune.heads, prune.width, prune.experts, prune.expert_width)
    yield Rule(
        sizes == (None,) * len(sizes) and prune.sparsity == "none",
        "prune removes nothing: set prune.experts, another size, or prune.sparsity: '2:4'",
    )
    yield Rule(
        lora.rank,
        f"lora.rank = {lora.rank}: prune cuts the model at model.path, without adapters; leave lora out",
    )
    yield Rule(
        precision.train not in ("bf16", "fp32"),
        f"precision.train = {precision.train}: importance is measured in bf16 or fp32; take one of them",
    )
    if prune.sparsity not in ("none", "unstructured"):
        keep, of = map(int, prune.sparsity.split(":"))
        yield Rule(
            keep >= of,
            f"prune.sparsity = {prune.sparsity} leaves all {of} of {of} weights; take fewer, such as 2:4",
        )
    yield Rule(
        prune.experts is not None and model.moe_router_fusion,
        "prune.experts with model.moe_router_fusion: the fused router does not tell its choice; set it to false",
    )
    yield Rule(
        prune.experts is not None and model.moe_dispatcher != "alltoall",
        f"prune.experts needs what each expert of a token puts out, which model.moe_dispatcher ="
        f" {model.moe_dispatcher} adds up on the way; use alltoall",
    )


def loss_hints(algorithm: AlgorithmConfig) -> list[str]:
    """Lines for the start of a run whose loss has settings that are another loss's."""
    hints = []
    clips = [clip for clip in (algorithm.clip_low, algorithm.clip_high) if clip is not None]
    if algorithm.loss == "gspo" and max(clips, default=0.0) >= LOOSE_OF_SEQUENCES:
        hints.append(
            "algorithm.loss: gspo clips the ratio of whole sequences, which hardly ever reaches clip_low ="
            f" {algorithm.clip_low}, clip_high = {algorithm.clip_high}, bounds for tokens; GSPO's own are 3e-4 and 4e-4"
        )
    if algorithm.loss in ("gspo", "sapo") and algorithm.aggregation != "sequence_mean":
        hints.append(
            f"algorithm.loss: {algorithm.loss} with aggregation: {algorithm.aggregation}: its paper takes the mean over"
            " sequences of each one's mean (sequence_mean)"
        )
    return hints


LOOSE_OF_SEQUENCES = 0.05
"""Bound of a sequence's ratio, a geometric mean over its tokens, from which on it is taken for one of tokens."""
