"""Rules of config keys for all commands: sizes, data, evaluation, memory, adapters. Does not import torch.

Rules that apply only to reinforcement learning are in `rl_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from packaging.version import Version

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.refusals import Rule
from megatron_rl.config import DistillationConfig, ScorerConfig
from megatron_rl.config.conditions import changed
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.config.plan import OFFLINE
from megatron_rl.servers.flags import asks_routes, speculates

PRECISION_AWARE_TE = Version("2.1")
"""First release of Transformer Engine whose Adam stores, of each fp32 weight, only the bits that the bf16 weight lacks."""


def _teaching(when: Callable[..., object], message: str | Callable[..., str]) -> Rule:
    return Rule(when, message, also=lambda teaches: teaches)


def _sources(settings: DistillationConfig) -> list[str]:
    found = {
        "teacher": settings.teacher is not None,
        "address": settings.address is not None,
        "recorded": settings.recorded,
    }
    return [f"distillation.{name}" for name, there in found.items() if there]


def _without_model(models: dict[str, ScorerConfig]) -> str | None:
    return next((name for name, model in models.items() if model.path is None and model.address is None), None)


def _adapted(when: Callable[..., object], key: str, why: str) -> Rule:
    text = f"{key} with lora.rank = {{lora.rank}}: {why}, or set lora.rank: 0"
    return Rule(when, text, also=lambda lora: lora.rank)


def _recorded(when: Callable[..., object], message: str | Callable[..., str]) -> Rule:
    return Rule(when, message, also=lambda rollout: rollout.demonstrations.top_log_probs)


def _stein(when: Callable[..., object], message: str) -> Rule:
    return Rule(when, message, also=lambda vp2o: vp2o.enabled)


SIZES = (
    Rule(
        lambda rollout, batch, parallel: rollout.context_length - 1 > batch.tokens_per_micro_batch * parallel.context,
        "a sequence of rollout.context_length = {rollout.context_length} tokens does not fit into"
        " batch.tokens_per_micro_batch = {batch.tokens_per_micro_batch}; increase batch.tokens_per_micro_batch",
    ),
    Rule(
        lambda model, parallel: model.moe_dispatcher == "allgather" and parallel.expert > 1,
        "model.moe_dispatcher = allgather needs the same number of tokens on all expert-parallel ranks, which packed"
        " micro-batches do not give; use alltoall",
    ),
    Rule(
        lambda rollout: rollout.server.tensor % rollout.server.expert,
        lambda rollout: (
            f"rollout.server.expert = {rollout.server.expert} does not divide rollout.server.tensor ="
            f" {rollout.server.tensor}; use {math.gcd(rollout.server.tensor, rollout.server.expert)}"
        ),
    ),
    Rule(
        lambda rollout: rollout.colocate and rollout.addresses,
        "rollout.colocate with rollout.addresses: only servers that the trainer starts take turns with it; set"
        " addresses: [], or colocate: false",
    ),
    Rule(
        lambda rollout: rollout.colocate and rollout.address_folder,
        "rollout.colocate with rollout.address_folder: only servers that the trainer starts take turns with it; set"
        " address_folder: null, or colocate: false",
    ),
)
FLAGS = (
    Rule(
        lambda rollout, pruning: speculates(rollout.server.extra_args) and pruning.enabled,
        "rollout.server.extra_args asks for speculative decoding, which skips the logit processor that prunes the"
        " vocabulary in SGLang; leave it out, or set pruning.enabled: false",
        also=lambda rollout: not rollout.external,
    ),
    Rule(
        lambda rollout, routing: speculates(rollout.server.extra_args) and asks_routes(rollout, routing),
        "rollout.server.extra_args asks for speculative decoding, whose draft tokens SGLang cannot record routes for;"
        " leave it out, or set routing.source: r2 and rollout.routes: false",
        also=lambda rollout: not rollout.external,
    ),
)
"""Rules for SGLang's flags (rollout.extra_args)."""
NO_PUSH = (
    Rule(
        lambda precision: precision.rollout == "fp8",
        "precision.rollout = fp8 quantizes weights when they are pushed, but eval and rollout push no weights; set"
        " precision.rollout to bf16",
    ),
)
START = (
    Rule(
        lambda kind, checkpoint, policy_reference, algorithm: (
            kind == "train" and checkpoint.load and policy_reference is not None and algorithm.kl.reference is None
        ),
        "checkpoint.load without algorithm.kl.reference: the policy would start from {checkpoint.load}, but the"
        " reference from {model.path}; convert the checkpoint and give its folder as model.path, or set"
        " algorithm.kl.reference",
    ),
    Rule(
        lambda kind, checkpoint, dpo: kind == "dpo" and checkpoint.load and dpo.reference is None,
        "checkpoint.load without dpo.reference: the policy would start from {checkpoint.load}, but the reference from"
        " {model.path}; convert the checkpoint and give its folder as model.path, or set dpo.reference",
    ),
    Rule(
        lambda model, checkpoint: model.keep_zeros and checkpoint.load,
        "model.keep_zeros with checkpoint.load: zeros are read from model.path only; write the checkpoint as a folder"
        " (megatron-rl convert {checkpoint.load} FOLDER), and give this folder as model.path",
    ),
)
PREFERENCES = (
    Rule(
        lambda dpo, batch: dpo.loss == "kto" and batch.prompts_per_step < 2,
        "batch.prompts_per_step = 1 with dpo.loss = kto: its baseline pairs each prompt with the response to another"
        " prompt; use 2 or more",
    ),
)
REWARDS = (
    Rule(
        lambda kind, data, rewards, teaches: (
            kind == "train" and data.verifier == "none" and not (rewards.models or rewards.judges or teaches)
        ),
        "data.verifier: none scores no response, and rewards.models is empty, so nothing gives a reward; name a"
        " reward model, a judge (rewards.judges), a teacher (distillation.teacher), or another verifier",
    ),
    Rule(
        lambda rewards: _without_model(rewards.models),
        lambda rewards: (
            f"rewards.models.{_without_model(rewards.models)} has neither a path nor an address; set path to the"
            " folder of a reward model"
        ),
    ),
    Rule(
        lambda rewards, rollout: rewards.overlong_buffer > rollout.max_new_tokens,
        "rewards.overlong_buffer = {rewards.overlong_buffer} is more than rollout.max_new_tokens ="
        " {rollout.max_new_tokens}, so every response would get a penalty; make it smaller",
    ),
)
TEACHER = (
    _teaching(
        lambda kind: kind not in ("sft", "train"),
        "only megatron-rl sft and train use a teacher, not {kind}; leave distillation out",
    ),
    _teaching(
        lambda distillation: len(_sources(distillation)) > 1,
        lambda distillation: f"{' and '.join(_sources(distillation)[:2])} are both set; leave one of them out",
    ),
    _teaching(
        lambda distillation: not distillation.coefficient and not distillation.feature_layers,
        "distillation.coefficient = 0: the teacher would have no effect; leave distillation out",
    ),
    _teaching(
        lambda distillation, kind: distillation.placement == "advantage" and kind == "sft",
        "distillation.placement = advantage: demonstrations have no advantages; set it to loss",
    ),
    _teaching(
        lambda distillation, kind: distillation.recorded and kind == "train",
        "distillation.recorded: recorded log-probs belong to demonstrations, but train learns from the model's own"
        " samples; set distillation.teacher",
    ),
    _teaching(
        lambda distillation: distillation.recorded and distillation.temperature != 1.0,
        "distillation.temperature = {distillation.temperature}: recorded log-probs have temperature 1 and cover only"
        " a part of the vocabulary; leave it out, or set distillation.teacher",
    ),
    _teaching(
        lambda distillation: distillation.recorded and distillation.direction == "jensen_shannon",
        "distillation.direction = jensen_shannon: recorded log-probs have temperature 1 and cover only a part of the"
        " vocabulary; set it to forward or reverse",
    ),
    _teaching(
        lambda distillation: distillation.address is not None and distillation.placement == "loss",
        lambda kind: (
            "distillation.address: a server returns only the log-probs of sampled tokens, but the loss needs whole"
            f" distributions; set {'placement: advantage' if kind == 'train' else 'distillation.teacher'}"
        ),
    ),
    _teaching(
        lambda distillation: distillation.feature_layers and distillation.teacher is None,
        lambda distillation: (
            f"distillation.feature_layers = {[list(pair) for pair in distillation.feature_layers]}: this needs a"
            " teacher that the trainer runs; set distillation.teacher"
        ),
    ),
    _teaching(
        lambda distillation, data: distillation.recorded and data.tokens_key is None,
        "distillation.recorded needs the recorded tokens, but data.tokens_key: null leaves them out; set tokens_key:"
        " response_tokens",
    ),
    _teaching(
        lambda kind, algorithm, distillation: (
            kind == "train" and algorithm.entropy_reward and not distillation.task_coefficient
        ),
        "algorithm.entropy_reward with distillation.task_coefficient = 0: it is a part of the rewards, which then"
        " have no effect; set task_coefficient, or leave it out",
    ),
    _teaching(
        lambda kind, algorithm, distillation: (
            kind == "train"
            and algorithm.kl.coefficient
            and algorithm.kl.placement == "reward"
            and not distillation.task_coefficient
        ),
        "algorithm.kl.placement = reward with distillation.task_coefficient = 0: the KL is a part of the rewards,"
        " which then have no effect; set task_coefficient, or leave it out",
    ),
    _teaching(
        lambda kind, distillation, support: (
            kind == "train" and distillation.placement == "advantage" and support != SamplingSupport()
        ),
        "distillation.placement = advantage compares the teacher's log-probs, at temperature 1 over the whole"
        " vocabulary, with the log-probs of the sampling distribution; set rollout.sampling.temperature: 1 without"
        " top_p, top_k and pruning, or set placement: loss",
    ),
)
PRUNE = (
    Rule(
        lambda prune: (
            prune.sparsity == "none"
            and not (prune.layers or prune.heads or prune.width or prune.experts or prune.expert_width)
        ),
        "prune removes nothing: set prune.experts, another size, or prune.sparsity: '2:4'",
    ),
    Rule(
        lambda lora: lora.rank,
        "lora.rank = {lora.rank}: prune works on the model at model.path, without adapters; leave lora out",
    ),
    Rule(
        lambda precision: precision.train not in ("bf16", "fp32"),
        "precision.train = {precision.train}: importance is measured in bf16 or fp32; use one of them",
    ),
    Rule(
        lambda prune: ":" in prune.sparsity and int(prune.sparsity.split(":")[0]) >= int(prune.sparsity.split(":")[1]),
        lambda prune: "prune.sparsity = {0} keeps all {1} of {1} weights; keep fewer, as in 2:4".format(
            prune.sparsity, prune.sparsity.split(":")[1]
        ),
    ),
    Rule(
        lambda prune, model: prune.experts and model.moe_router_fusion,
        "prune.experts with model.moe_router_fusion: the fused router does not report its choice; set"
        " moe_router_fusion: false",
    ),
    Rule(
        lambda prune, model: prune.experts and model.moe_dispatcher != "alltoall",
        "prune.experts needs the output of each expert separately, but model.moe_dispatcher = {model.moe_dispatcher}"
        " sums the outputs; use alltoall",
    ),
)
EVALUATION = (
    Rule(
        lambda kind, rollout, eval: kind == "train" and rollout.load and (eval.prompts or eval.sets),
        lambda eval: (
            "rollout.load starts no SGLang server, which an evaluation needs; set eval.prompts: 0"
            + (", and eval.sets: {}" if eval.sets else "")
        ),
    ),
    Rule(
        lambda kind, eval: kind in ("reward", "dpo") and eval.sets,
        "only train, sft and eval use eval.sets; {kind} evaluates only the held-out rows of data.eval_path; set"
        " eval.sets: {{}}",
    ),
    Rule(
        lambda eval: eval.pass_at and max(eval.pass_at) > eval.most_samples,
        lambda eval: (
            f"eval.pass_at: pass@{max(eval.pass_at)} needs at least that many responses to a prompt, but eval.samples"
            f" is {eval.most_samples}; raise eval.samples, or leave {max(eval.pass_at)} out"
        ),
    ),
    Rule(
        lambda kind, eval: kind in ("train", "reward", "dpo") and eval.likelihood,
        "eval.likelihood works only in megatron-rl eval (megatron-rl sft always measures it); set it to false",
    ),
    Rule(
        lambda eval, pruning: eval.unpruned and not pruning.enabled,
        "eval.unpruned without pruning.enabled: eval/score already measures the unpruned policy; set unpruned: false",
    ),
)
DEMONSTRATIONS = (
    Rule(
        lambda rollout: (rollout.demonstrations.max_tokens or math.inf) < rollout.demonstrations.min_tokens,
        "rollout.demonstrations.max_tokens = {rollout.demonstrations.max_tokens} is below min_tokens ="
        " {rollout.demonstrations.min_tokens}; swap them",
    ),
    _recorded(
        lambda rollout: rollout.load,
        "rollout.demonstrations.top_log_probs = {rollout.demonstrations.top_log_probs}: rollout.load uses no SGLang"
        " server, which top_log_probs needs; leave one of them out",
    ),
    _recorded(
        lambda support: support != SamplingSupport(),
        lambda rollout, support: (
            f"rollout.demonstrations.top_log_probs = {rollout.demonstrations.top_log_probs} records the unchanged"
            f" policy, but sampling changes it ({', '.join(changed(support))}); set rollout.sampling.temperature: 1.0,"
            " top_p: 1.0, top_k: -1, and leave tail_floor and pruning out"
        ),
    ),
    _recorded(
        lambda rollout, vocabulary: vocabulary is not None and rollout.demonstrations.top_log_probs > vocabulary,
        "rollout.demonstrations.top_log_probs = {rollout.demonstrations.top_log_probs}: the model has {vocabulary}"
        " tokens; lower it",
    ),
)
"""Rules for `megatron-rl rollout` when it writes demonstrations."""
ADAPTERS = (
    _adapted(
        lambda model: model.freeze,
        "model.freeze = {model.freeze}",
        "with adapters, no weights of the model are trained; leave it out",
    ),
    _adapted(
        lambda model: model.keep_zeros, "model.keep_zeros", "merging an adapter adds B A to the zeros too; leave it out"
    ),
    _adapted(
        lambda vp2o, kind: vp2o.enabled and kind == "train",
        "vp2o.enabled",
        "it transforms gradients of the experts' weights, but with adapters these have no gradients; set it to false",
    ),
)
NO_ADAPTERS = (
    Rule(
        lambda lora: lora.path,
        "lora.path = {lora.path}: only commands that train read adapters, and this command reads model.path; write"
        " the whole model (megatron-rl convert {lora.path} OUT), set model.path: OUT, and leave lora out",
    ),
)
STEIN = (
    _stein(
        lambda kind: kind in OFFLINE, "vp2o works only in reinforcement learning; set vp2o.enabled: false for {kind}"
    ),
    _stein(
        lambda model: model.moe_router_fusion,
        "vp2o with model.moe_router_fusion: the fused router does not report which experts are active; set"
        " moe_router_fusion: false",
    ),
    _stein(
        lambda vp2o, model: vp2o.orthogonality and model.moe_dispatcher != "alltoall",
        "vp2o.orthogonality needs the output of each expert separately, but model.moe_dispatcher ="
        " {model.moe_dispatcher} sums the outputs; use alltoall, or set vp2o.orthogonality: 0",
    ),
    _stein(
        lambda vp2o: (
            vp2o.temperature is not None
            and vp2o.attraction == "mean"
            and not (vp2o.repulsion and vp2o.repulsion_scale == "absolute")
        ),
        "vp2o.temperature has no effect with vp2o.attraction: mean and without an absolute repulsion; set"
        " vp2o.repulsion instead, or attraction: kernel",
    ),
    _stein(
        lambda vp2o: None not in (vp2o.attract_above, vp2o.repel_below) and vp2o.repel_below >= vp2o.attract_above,
        "vp2o.repel_below = {vp2o.repel_below:g} is not below attract_above = {vp2o.attract_above:g}: pairs of"
        " experts between them would attract and repel at the same time; lower repel_below",
    ),
)
MEMORY = (
    Rule(
        lambda parallel, optimizer: parallel.distributed_optimizer and not OPTIMIZERS[optimizer.name].sharded,
        "Megatron does not shard the state of optimizer.name = {optimizer.name}; set parallel.distributed_optimizer:"
        " false",
    ),
    Rule(
        lambda optimizer, precision: optimizer.cpu_offload and precision.train == "fp32",
        "optimizer.cpu_offload = {optimizer.cpu_offload:g} with precision.train = fp32: only 16-bit weights have fp32"
        " copies to keep on the host; set precision.train: bf16, or cpu_offload: 0",
    ),
    Rule(
        lambda optimizer, machine: 0 < optimizer.cpu_offload < 1 and machine and machine.gpu and not machine.fused_adam,
        "optimizer.cpu_offload = {optimizer.cpu_offload:g}: the share that stays on the GPU needs the Adam of"
        " Transformer Engine or Apex, which a resumed run can distinguish from the host's Adam; install one of them,"
        " or set cpu_offload: 1.0",
    ),
    Rule(
        lambda optimizer: optimizer.cpu_offload and optimizer.precision_aware,
        "optimizer.cpu_offload = {optimizer.cpu_offload:g} with optimizer.precision_aware: the host always keeps"
        " whole fp32 weights; set only one of the two",
    ),
    Rule(
        lambda optimizer, precision: optimizer.precision_aware and precision.train == "fp32",
        "optimizer.precision_aware with precision.train = fp32: only 16-bit weights lack bits of fp32 weights; set"
        " precision.train: bf16",
    ),
    Rule(
        lambda optimizer, machine: (
            optimizer.precision_aware
            and machine
            and not (machine.gpu and Version(machine.transformer_engine or "0") >= PRECISION_AWARE_TE)
        ),
        lambda machine: (
            "optimizer.precision_aware needs a GPU and the Adam of Transformer Engine 2.1 or later (found:"
            f" {machine.transformer_engine or 'none'}{'' if machine.gpu else ', no GPU'}); set it to false, or use"
            " optimizer.cpu_offload"
        ),
    ),
    Rule(
        lambda vp2o, optimizer: vp2o.trust_region is not None and optimizer.cpu_offload,
        "vp2o.trust_region previews each update with the fp32 weights on the GPU, which optimizer.cpu_offload keeps"
        " on the host; set only one of the two",
    ),
    Rule(
        lambda vp2o, optimizer: vp2o.trust_region is not None and optimizer.precision_aware,
        "vp2o.trust_region previews each update with fp32 weights, which optimizer.precision_aware stores in another"
        " form; set only one of the two",
    ),
    Rule(
        lambda precision: precision.gradients == "bf16" and precision.train == "fp32",
        "precision.gradients = bf16 with precision.train = fp32: gradients must have the type of the weights, or"
        " fp32; set precision.train: bf16, or gradients: fp32",
    ),
    Rule(
        lambda precision, vp2o: precision.gradients == "bf16" and vp2o.enabled,
        "precision.gradients = bf16 with vp2o.enabled: the repulsion of VP2O is lost in bf16 sums; set gradients: fp32",
    ),
    Rule(
        lambda parallel, vp2o: parallel.overlap_param_gather and vp2o.enabled,
        "parallel.overlap_param_gather with vp2o.enabled: VP2O reads the experts' weights between passes; set"
        " overlap_param_gather: false",
    ),
)
"""Rules for settings that save optimizer or gradient memory, but that some other keys or this machine exclude.

The external fact `machine` is None if the machine is not known yet.
"""
