"""Choices of the config that contradict each other are refused before anything starts, with the nearest valid one."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from megatron_rl_plugin.processors import PRUNE_TAIL

from megatron_rl.algorithms.correction_choice import DENOMINATORS
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.key_rules import MEMORY
from megatron_rl.checks.model_and_machine import places
from megatron_rl.checks.preflight import correction_bounds, preflight
from megatron_rl.checks.refusals import refuse
from megatron_rl.checks.rl_rules import LEARNING, loss_hints
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.models.precision import Machine
from megatron_rl.trainer.objective import correction_of

GAE = {"algorithm": {"advantage": "gae"}}
REFUSED = {
    "likelihoods where rewards are learned from": (
        {"eval": {"likelihood": True}},
        r"eval\.likelihood works only in megatron-rl eval.*; set it to false",
    ),
    "a hook that there is not": (
        {"hooks": ["megatron_rl.hooks.guards:OnPolice"]},
        r"config: hooks: megatron_rl\.hooks\.guards has no 'OnPolice'; did you mean 'OnPolicy'",
    ),
    "on-policy with several updates": (
        {"algorithm": {"on_policy": True}, "batch": {"updates_per_step": 2}},
        r"batch\.updates_per_step = 2 with algorithm\.on_policy: .*; set it to 1, or set algorithm\.on_policy: false",
    ),
    "on-policy with several epochs": (
        {"algorithm": {"on_policy": True}, "batch": {"epochs": 3}},
        r"batch\.epochs = 3 with algorithm\.on_policy: .*; set it to 1, or set algorithm\.on_policy: false",
    ),
    "predictors with several epochs": (
        {"routing": {"source": "pr2"}, "batch": {"updates_per_step": 2, "epochs": 2}},
        r"batch\.epochs = 2 with routing\.source = pr2: .*; set epochs: 1, or routing\.source: r2 or r3",
    ),
    "routes that no pass records": (
        {"routing": {"source": "r2"}, "batch": {"epochs": 2}, "correction": {"bypass": True}},
        r"bypass skips the forward pass in which routing\.source = r2 records the routes",
    ),
    "an early stop of one update": (
        {"algorithm": {"target_kl": 0.01}},
        r"algorithm\.target_kl = 0\.01 does nothing without batch\.epochs or batch\.updates_per_step; set batch\.epochs or ba",
    ),
    "temperatures of no gate": (
        {"algorithm": {"tau_neg": 1.5}},
        r"algorithm\.tau_neg = 1\.5 does nothing with algorithm\.loss = ppo; set algorithm\.loss: sapo, or leave it out",
    ),
    "a constant divisor of weights": (
        {
            "algorithm": {"aggregation": "sequence_sum"},
            "correction": {"mode": "truncate", "high": 2.0, "denominator": "weights"},
        },
        r"denominator = weights divides by a sum of weights, and .*sequence_sum by a constant; set denominator: kept_seq",
    ),
    "a warm-up as long as all updates": (
        {"steps": 3, "batch": {"updates_per_step": 2, "epochs": 2}, "optimizer": {"warmup_steps": 12}},
        r"optimizer\.warmup_steps = 12 is not below the 12 updates of the schedule; the largest value is 11",
    ),
    "a warm-up as long as the updates behind the critic's": (
        {**GAE, "steps": 3, "critic": {"warmup_steps": 1}, "batch": {"epochs": 2}, "optimizer": {"warmup_steps": 4}},
        r"optimizer\.warmup_steps = 4 is not below the 4 updates of the schedule; the largest value is 3",
    ),
    "a critic's warm-up as long as all updates": (
        {**GAE, "steps": 3, "batch": {"epochs": 2}, "critic": {"optimizer": {"warmup_steps": 6}}},
        r"critic\.optimizer\.warmup_steps = 6 is not below the 6 updates of the schedule; the largest value is 5",
    ),
    "a warm-up as long as the decay": (
        {"optimizer": {"warmup_steps": 5, "decay": "linear", "decay_steps": 5}},
        r"optimizer\.warmup_steps = 5 is not below the 5 updates of the schedule",
    ),
    "on-policy with old samples": (
        {
            "algorithm": {"on_policy": True},
            "sync": {"refresh": {"when": "drift"}},
            "correction": {"mode": "truncate", "high": 2.0},
        },
        r"sync\.refresh\.when = drift with algorithm\.on_policy: .*; set it to always",
    ),
    "on-policy of a record": (
        {"algorithm": {"on_policy": True}, "rollout": {"load": "somewhere"}, "eval": {"prompts": 0}},
        r"rollout\.load with algorithm\.on_policy: .*; leave it out",
    ),
    "on-policy with the engine's ratio": (
        {"algorithm": {"on_policy": True}, "correction": {"bypass": True}},
        r"correction\.bypass with algorithm\.on_policy: .*; set it to false",
    ),
    "nothing of that name": (
        {"model": {"freeze": ["*.rooter.*"]}},
        r"freeze: '\*\.rooter\.\*' matches.* mean \*\.router\.\*",
    ),
    "biases that there are not": (
        {"model": {"moe_bias_update_rate": 1e-3}},
        r"model\.moe_bias_update_rate = 0\.001 does nothing: the routers of Qwen3MoeForCausalLM have no expert biases",
    ),
    "no sinks": (
        {"model": {"attention_sinks": "ignored"}},
        "Qwen3MoeForCausalLM has no attention sinks; set it to exact",
    ),
    "frozen layers of a replicated optimizer": (
        {"model": {"freeze": ["decoder.layers.0.*"]}, "parallel": {"distributed_optimizer": False}},
        r"freeze has decoder\.layers\.0\.\S+ and not decoder\.layers\.\d\.\S+:.* set parallel.distributed_optimizer: true",
    ),
    "frozen experts": (
        {"model": {"freeze": ["*.experts.*"]}, "vp2o": {"enabled": True}},
        r"freeze with vp2o\.enabled: decoder\.layers\.0\.mlp\.experts\.local_experts\.0\.linear_fc1\.weight would",
    ),
    "low above high": (
        {"correction": {"mode": "mask", "low": 2.0, "high": 0.5}},
        "correction: low = 2 is above high = 0.5.*set correction.low: 0.5 and high: 2.0",
    ),
    "one left out": (
        {"correction": {"mode": "truncate", "high": 0.2}},
        "exclude a ratio of 1.*set low: 0.8 and high: 1.2 for a threshold of 0.2",
    ),
    "truncated below": (
        {"correction": {"mode": "truncate", "low": 0.5, "high": 2.0}},
        "low = 0.5 does nothing with correction.mode = truncate; set correction.mode: mask or clip",
    ),
    "level of nothing": (
        {"correction": {"level": "sequence"}},
        "level = sequence does nothing with correction.mode = none; set correction.mode: mask",
    ),
    "speculation": (
        {"pruning": {"enabled": True}, "rollout": {"server": {"extra_args": ["--speculative-algorithm", "NGRAM"]}}},
        "speculative decoding, which skips the logit processor.*pruning.enabled: false",
    ),
    "speculation with routes": (
        {"rollout": {"routes": True, "server": {"extra_args": ["--speculative-algorithm=NGRAM"]}}},
        "speculative decoding, whose draft tokens SGLang cannot record routes for; leave it out",
    ),
    "a flag that has a key": (
        {"rollout": {"server": {"extra_args": ["--dtype", "half"]}}},
        "extra_args has --dtype, which is precision.rollout; set that key instead",
    ),
    "experts of a server": (
        {"rollout": {"server": {"tensor": 4, "expert": 6}}},
        "rollout.server.expert = 6 does not divide rollout.server.tensor = 4; use 2",
    ),
    "GPUs by a flag": (
        {"rollout": {"server": {"extra_args": ["--base-gpu-id", "4"]}}},
        "extra_args has --base-gpu-id, which is rollout.server.count, or rollout.colocate; set that key",
    ),
    "turns with servers of others": (
        {"rollout": {"colocate": True, "addresses": ["http://10.0.0.1:30000"]}},
        r"colocate with rollout.addresses.*set addresses: \[\], or colocate: false",
    ),
    "no such transport": (
        {"sync": {"transport": "distribute"}},
        "sync.transport: there is no weight transport 'distribute'; did you mean 'distributed'.*module:name",
    ),
    "a transport of no file": (
        {"sync": {"transport": "lost/rdma.py:Rdma"}},
        "sync.transport.*there is no file lost/rdma.py",
    ),
    "no transport at all": (
        {"rollout": {"colocate": True}, "sync": {"transport": "dataclasses:dataclass"}},
        r"sync.transport: dataclasses:dataclass is no subclass of Transport \(megatron_rl/sync/transport.py\)",
    ),
    "two on one GPU": (
        {"rollout": {"colocate": True}},
        "colocate with sync.transport = distributed: NCCL takes no two processes.*set sync.transport: tensor",
    ),
    "no bound": ({"correction": {"mode": "truncate"}}, "'truncate' needs high; set correction.high: 2.0"),
    "neither bound": ({"correction": {"mode": "clip"}}, "'clip' needs low, high or both; set"),
    "bound without a mode": (
        {"correction": {"high": 2.0}},
        "high = 2 does nothing with correction.mode = none; set correction.mode: mask",
    ),
    "no limit": ({"correction": {"reject": "k3"}}, "reject 'k3' needs reject_above"),
    "limit alone": (
        {"correction": {"reject_above": 0.1}},
        "reject_above = 0.1 does nothing with correction.reject = none; set correction.reject: k3",
    ),
    "level alone": (
        {"correction": {"reject_level": "token"}},
        "reject_level = token does nothing with correction.reject = none; set correction.reject: k3",
    ),
    "rho alone": (
        {"pruning": {"rho": 1e-4}},
        "rho = 0.0001 does nothing without pruning.enabled or pruning.measure; set pruning.enabled or pruning.measure,",
    ),
    "the engine's rho alone": (
        {"pruning": {"measure": True, "engine_rho": 1e-4}},
        "engine_rho = 0.0001 does nothing without pruning.enabled; set pruning.enabled: true, or leave it out",
    ),
    "a laxer engine": (
        {"pruning": {"enabled": True, "rho": 1e-4, "engine_rho": 1e-5}},
        "engine_rho = 1e-05 is below rho = 0.0001: .*ratio 0 and no gradient; set engine_rho: null, or above rho",
    ),
    "measured twice": (
        {"pruning": {"enabled": True, "measure": True}},
        "pruning.measure = true does nothing beside pruning.enabled; set one of the two",
    ),
    "pass of too many": (
        {"eval": {"pass_at": [2, 8]}},
        "pass@8 needs at least that many .* eval.samples is 4; raise eval.samples",
    ),
    "unpruned anyway": ({"eval": {"unpruned": True}}, "eval.unpruned without pruning.enabled: .*set unpruned: false"),
    "veto with bypass": (
        {"correction": {"bypass": True, "veto": 1e-4}},
        "correction.veto with correction.bypass: bypass computes no log-probs.*set correction.bypass: false, or veto: null",
    ),
    "mode with bypass": ({"correction": {"bypass": True, "mode": "truncate", "high": 2.0}}, "or mode: none"),
    "rejection with bypass": (
        {"correction": {"bypass": True, "reject": "abs_log_ratio", "reject_above": 1.0}},
        "or reject: none",
    ),
    "bypass without a ratio": (
        {"correction": {"bypass": True}, "algorithm": {"loss": "reinforce"}},
        "loss = reinforce: this loss has no ratio.*algorithm.loss: ppo",
    ),
    "bypass of the recording": (
        {
            "correction": {"bypass": True},
            "routing": {"source": "r2"},
            "batch": {"prompts_per_step": 4, "updates_per_step": 2},
        },
        "skips the forward pass in which routing.source = r2 records.*routing.source: r3",
    ),
    "top_p alone": (
        {"rollout": {"sampling": {"top_p": 0.9}}},
        "top_p = 0.9 with top_k = -1: the engine returns the kept tokens only.*set top_k: 1024, or truncate with pruning",
    ),
    "greedy top_k": ({"rollout": {"sampling": {"top_k": 1}}}, "top_k = 1: .*set top_k: 2"),
    "too many": ({"rollout": {"sampling": {"top_k": 5000}}}, "top_k = 5000: .*set top_k: 1024"),
    "no tokens": ({"rollout": {"sampling": {"top_k": 0}}}, "top_k = 0: set -1 to keep all tokens"),
    "two truncations": (
        {"rollout": {"sampling": {"top_p": 0.9, "top_k": 50}}, "pruning": {"enabled": True}},
        "only one kind of truncation.*set top_p: 1.0 and top_k: -1, or pruning.enabled: false",
    ),
}


VP2O = {"vp2o": {"enabled": True}}
REFUSED |= {
    "vp2o of nothing": (
        {"vp2o": {"repulsion": 0.2}},
        "vp2o.repulsion = 0.2 does nothing without vp2o.enabled; set vp2o.enabled: true",
    ),
    "experts over ranks that do not divide them": (
        {**VP2O, "parallel": {"expert": 3}},
        "parallel.expert = 3 does not divide the model's 8 experts; choose one of 1, 2, 4, 8",
    ),
    "vp2o behind a fused router": (
        {**VP2O, "model": {"moe_router_fusion": True}},
        "does not report which experts are active; set moe_router_fusion: false",
    ),
    "outputs that are added up on the way": (
        {**VP2O, "model": {"moe_dispatcher": "allgather"}},
        "orthogonality needs.*model.moe_dispatcher = allgather.*use alltoall, or set vp2o.orthogonality: 0",
    ),
    "excess of no region": (
        {"vp2o": {"enabled": True, "on_violation": "backtrack"}},
        "on_violation = backtrack does nothing without vp2o.trust_region; set vp2o.trust_region: 0.1",
    ),
    "vp2o's probes of nothing": (
        {"vp2o": {"enabled": True, "probe_tokens": 64}},
        "probe_tokens = 64 does nothing without vp2o.trust_region; set vp2o.trust_region: 0.1",
    ),
    "vp2o's tokens of nothing": (
        {"vp2o": {"enabled": True, "orthogonality": 0.0, "orthogonality_tokens": 64}},
        "orthogonality_tokens = 64 does nothing with vp2o.orthogonality = 0; set vp2o.orthogonality: 0.01",
    ),
    "vp2o's form of nothing": (
        {"vp2o": {"enabled": True, "orthogonality": 0.0, "orthogonality_form": "projection"}},
        "orthogonality_form = projection does nothing with vp2o.orthogonality = 0; set vp2o.orthogonality: 0.01",
    ),
    "vp2o's scale of nothing": (
        {"vp2o": {"enabled": True, "repulsion": 0.0, "repulsion_scale": "absolute"}},
        "repulsion_scale = absolute does nothing with vp2o.repulsion = 0; set vp2o.repulsion: 0.1",
    ),
    "vp2o's neighbors twice": (
        {"vp2o": {"enabled": True, "neighbors": 2, "attract_above": 0.5}},
        "neighbors = 2 does nothing beside vp2o.attract_above; set one of the two",
    ),
    "vp2o's inactive_neighbors twice": (
        {"vp2o": {"enabled": True, "inactive_neighbors": 2, "repel_below": 0.5}},
        "inactive_neighbors = 2 does nothing beside vp2o.repel_below; set one of the two",
    ),
    "vp2o that leaves no pair alone": (
        {"vp2o": {"enabled": True, "neighbors": 4, "inactive_neighbors": 4}},
        "inactive_neighbors = 4 cover all pairs of .* 8 experts per layer; set vp2o.neighbors: 2 and vp2o.inactive_n.*: 2",
    ),
    "vp2o's temperature of nothing": (
        {"vp2o": {"enabled": True, "attraction": "mean", "temperature": 2.0}},
        "temperature has no effect with vp2o.attraction: mean and without an absolute repulsion; set vp2o.repulsion instead",
    ),
    "vp2o's mean of one": (
        {"vp2o": {"enabled": True, "attraction": "mean", "neighbors": 1}},
        "attraction = mean does nothing with vp2o.neighbors = 1; set vp2o.neighbors: 2",
    ),
    "vp2o of bounds that cross": (
        {"vp2o": {"enabled": True, "attract_above": 0.1, "repel_below": 0.2}},
        "repel_below = 0.2 is not below attract_above = 0.1",
    ),
    "drift that nothing looks at": (
        {"sync": {"refresh": {"kl": 0.1}}},
        "sync.refresh.kl = 0.1 does nothing with sync.refresh.when = always; set sync.refresh.when: drift",
    ),
    "old rollouts": (
        {"sync": {"refresh": {"when": "drift"}}},
        "up to 8 steps old without a correction; set correction.bypass: true",
    ),
    "old routes": (
        {
            "sync": {"refresh": {"when": "drift"}},
            "routing": {"source": "r3"},
            "rollout": {"routes": True},
            "correction": {"bypass": True},
        },
        "when = drift with routing.source = r3: replayed routes must come from the trained weights",
    ),
}
REFUSED |= {
    "shards of an optimizer that Megatron does not shard": (
        {"optimizer": {"name": "sgd"}},
        "does not shard the state of optimizer.name = sgd; set parallel.distributed_optimizer: false",
    ),
    "state on the host of an optimizer that has none there": (
        {"optimizer": {"name": "sgd", "cpu_offload": 1.0}, "parallel": {"distributed_optimizer": False}},
        "cpu_offload = 1 does nothing with optimizer.name = sgd; set optimizer.name: adam, or leave it out",
    ),
    "momentum of Adam": (
        {"optimizer": {"momentum": 0.5}},
        "momentum = 0.5 does nothing with optimizer.name = adam; set optimizer.name: sgd, or leave it out",
    ),
    "state on the host of an optimizer that is not sharded": (
        {"optimizer": {"cpu_offload": 1.0}, "parallel": {"distributed_optimizer": False}},
        "cpu_offload = 1 does nothing with parallel.distributed_optimizer = false; set parallel.distributed_optimizer: true",
    ),
    "state on the host of fp32 weights": (
        {"optimizer": {"cpu_offload": 1.0}, "precision": {"train": "fp32"}},
        "only 16-bit weights have fp32 copies to keep on the host; set precision.train: bf16, or cpu_offload: 0",
    ),
    "state on the host and completed weights": (
        {"optimizer": {"cpu_offload": 1.0, "precision_aware": True}},
        "cpu_offload = 1 with optimizer.precision_aware: the host always keeps whole fp32 weights; set only one of the two",
    ),
    "an Adam that is not here": (
        {"optimizer": {"precision_aware": True}},
        "precision_aware needs a GPU and the Adam of Transformer Engine 2.1 .*set it to false, or use optimizer.cpu_off",
    ),
    "completed weights of an optimizer that is not sharded": (
        {"optimizer": {"precision_aware": True}, "parallel": {"distributed_optimizer": False}},
        "precision_aware = true does nothing with parallel.distributed_optimizer = false; set parallel.dist.*: true",
    ),
    "completed weights in fp32": (
        {"optimizer": {"precision_aware": True}, "precision": {"train": "fp32"}},
        "only 16-bit weights lack bits of fp32 weights; set precision.train: bf16",
    ),
    "short moments of an Adam that has none": (
        {"optimizer": {"moments": "bf16"}},
        "moments = bf16 does nothing without optimizer.precision_aware; set optimizer.precision_aware: true",
    ),
    "a preview of what is on the host": (
        {"vp2o": {"enabled": True, "trust_region": 0.1}, "optimizer": {"cpu_offload": 0.5}},
        "trust_region previews each update .*optimizer.cpu_offload keeps on the host; set only one of the two",
    ),
    "bf16 gradients of fp32 weights": (
        {"precision": {"train": "fp32", "gradients": "bf16"}},
        "gradients must have the type of the weights, or fp32; set precision.train: bf16, or gradients: fp32",
    ),
    "vp2o in bf16 sums": (
        {**VP2O, "precision": {"gradients": "bf16"}},
        "gradients = bf16 with vp2o.enabled: .*set gradients: fp32",
    ),
    "nothing to gather": (
        {"parallel": {"overlap_param_gather": True, "distributed_optimizer": False}},
        "overlap_param_gather = true does nothing with parallel.distributed_optimizer = false; set .*: true, or leave it out",
    ),
    "vp2o of weights on their way": (
        {**VP2O, "parallel": {"overlap_param_gather": True}},
        "overlap_param_gather with vp2o.enabled: .*set overlap_param_gather: false",
    ),
}
AHEAD = {"correction": {"mode": "truncate", "high": 2.0}, "rollout": {"max_staleness": 1}}
REFUSED |= {
    f"routes of older predictors, features of the {side}": (
        {
            **AHEAD,
            "routing": {"source": "pr3", "features": side},
            "batch": {"prompts_per_step": 4, "updates_per_step": 2},
        },
        r"rollout\.max_staleness with routing\.source: pr3: .*; set max_staleness: 0",
    )
    for side in ("trainer", "engine")
}
SAMPLES_AGAIN = {"rollout": {"dynamic_sampling": {"max_rounds": 10}}}
REFUSED |= {
    "stragglers of a record": (
        {"rollout": {"over_sample_rate": 0.5, "load": "somewhere"}, "eval": {"prompts": 0}},
        r"rollout\.over_sample_rate = 0\.5 with rollout\.load: no responses are sampled; set over_sample_rate: 0",
    ),
    "stragglers that nobody can end": (
        {"rollout": {"over_sample_rate": 0.5, "program": "openai_agent"}, "agent": {"function": "a:b"}},
        r"rollout\.over_sample_rate = 0\.5 with rollout\.program: openai_agent: .*; set over_sample_rate: 0",
    ),
    "a rate of no prompt": (
        {"rollout": {"over_sample_rate": 1e-12}, "batch": {"prompts_per_step": 10}},
        r"over_sample_rate = 1e-12 adds no prompt to batch\.prompts_per_step = 10; set over_sample_rate: 0\.1, or 0",
    ),
    "more prompts, of which none is left out": (
        {"rollout": {"dynamic_sampling": {"over_sampling": 1.5}}},
        r"over_sampling = 1\.5 does nothing without rollout\.dynamic_sampling\.max_rounds; set .*max_rounds: 10",
    ),
    "spread in groups of one": (
        {**SAMPLES_AGAIN, "batch": {"samples_per_prompt": 1}, "algorithm": {"advantage": "reinforce_plus_plus"}},
        r"rollout\.dynamic_sampling with batch\.samples_per_prompt: 1: .* set 2 or more, or set .*max_rounds: 0",
    ),
    "spread of rewards that come later": (
        {**SAMPLES_AGAIN, "rewards": {"models": {"liked": {"address": "http://localhost:1"}}}},
        r"rollout\.dynamic_sampling with rewards\.models, which score only after the rollout",
    ),
    "spread of what a judge says later": (
        {**SAMPLES_AGAIN, "rewards": {"judges": {"wise": {"address": "http://localhost:1/v1", "model": "m"}}}},
        r"rollout\.dynamic_sampling with rewards\.judges, which score only after the rollout",
    ),
    "features of responses that may be left out": (
        {**SAMPLES_AGAIN, "routing": {"source": "pr3", "features": "engine"}},
        r"rollout\.dynamic_sampling with routing\.source: pr3: ",
    ),
}
REFUSED |= {
    "lambda of nothing": (
        {"algorithm": {"lam": 0.9}},
        r"algorithm\.lam = 0\.9 does nothing with algorithm\.advantage = grpo; set algorithm\.advantage: gae, or leave it out",
    ),
    "discount of whole responses": (
        {"algorithm": {"gamma": 0.9}},
        r"algorithm\.gamma = 0\.9 does nothing .* = grpo; set algorithm\.advantage: gae, reinforce_plus_plus or",
    ),
    "temperature of no tilt": (
        {"algorithm": {"tilt_temperature": 0.5}},
        r"tilt_temperature = 0\.5 does nothing .*; set algorithm\.advantage: tilt",
    ),
    "weights of a likelihood below 0": (
        {"algorithm": {"advantage": "tilt", "whiten": True}},
        r"algorithm\.whiten with advantage = tilt: .*; set whiten: null",
    ),
    "a critic that nobody asks": (
        {"critic": {"clip": 0.1}},
        r"critic\.clip = 0\.1 does nothing with .*; set algorithm\.advantage: gae",
    ),
    "a target of no penalty": (
        {"algorithm": {"kl": {"target": 0.1}}},
        r"kl\.target = 0\.1 does nothing without algorithm\.kl\.coefficient; set .*coefficient: 0\.1",
    ),
    "a place of no penalty": (
        {"algorithm": {"kl": {"placement": "reward"}}},
        r"kl\.placement = reward does nothing .* set algorithm\.kl\.coefficient: 0\.05",
    ),
    "a reference of no penalty": (
        {"algorithm": {"kl": {"reference": "somewhere"}}},
        r"kl\.reference = somewhere does nothing .* set algorithm\.kl\.coefficient: 0\.05",
    ),
    "a horizon of what stays": (
        {"algorithm": {"kl": {"coefficient": 0.1, "horizon": 100}}},
        r"kl\.horizon = 100 does nothing .* set algorithm\.kl\.target",
    ),
    "a horizon of one step": (
        {
            "algorithm": {"kl": {"coefficient": 0.1, "target": 0.1, "horizon": 4}},
            "batch": {"prompts_per_step": 5, "samples_per_prompt": 4},
        },
        r"kl\.horizon = 4: a step has 20 responses, five horizons or more.* set horizon: 200",
    ),
    "a critic alone": (
        {**GAE, "steps": 3, "critic": {"warmup_steps": 3}},
        r"critic\.warmup_steps = 3 leaves none of the 3 steps for training the policy",
    ),
    "no critic in that folder": (
        {**GAE, "critic": {"path": "nowhere"}},
        r"critic\.path = nowhere: does not exist; give a Hugging Face folder, or an id of the hub",
    ),
    "nothing of the critic's of that name": (
        {**GAE, "critic": {"freeze": ["*.rooter.*"]}},
        r"config: critic\.freeze: '\*\.rooter\.\*' matches.* mean \*\.router\.\*",
    ),
    "momentum of the critic's Adam": (
        {**GAE, "critic": {"optimizer": {"momentum": 0.5}}},
        "critic.optimizer.momentum = 0.5 does nothing with critic.optimizer.name = adam",
    ),
    "the critic's state on the host": (
        {**GAE, "critic": {"optimizer": {"cpu_offload": 1.0}}, "precision": {"train": "fp32"}},
        r"only 16-bit weights have fp32 copies to keep on the host.* \(of the critic\)",
    ),
}
HOPPER = Machine((9, 0), None, None, "13.0")
NO_EXPERTS = {
    "dense": (("qwen3",), VP2O, "Qwen3ForCausalLM is dense; set vp2o.enabled: false"),
    "one expert": (
        ("qwen3_moe", "--experts", "1", "--topk", "1"),
        VP2O,
        "Qwen3MoeForCausalLM has one expert per layer; set vp2o.enabled: false",
    ),
    "one expert a token": (
        ("qwen3_moe", "--topk", "1"),
        VP2O,
        "sends each token to a single expert, which has no other output to be orthogonal to; set vp2o.orthogonality: 0",
    ),
}


@pytest.mark.parametrize("case", NO_EXPERTS)
def test_vp2o_needs_experts(case, tiny_model, monkeypatch):
    model, changes, message = NO_EXPERTS[case]
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = build_config({"model": {"path": str(tiny_model(*model))}, **changes})
    with pytest.raises(UserError, match=message):
        preflight(config, "train")


def test_a_critic_reads_the_policys_tokens_on_the_policys_ranks(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = str(tiny_model("qwen3_moe", "--tokenizer", "numbers"))
    dense = tiny_model("qwen3", "--layers", "3", "--tokenizer", "numbers")

    def check(critic: Path, **keys: object) -> None:
        keys = GAE | keys | {"model": {"path": model}, "critic": {"path": str(critic)}}
        preflight(build_config({"batch": {"prompts_per_step": 2}} | keys), "train")

    check(dense)
    with pytest.raises(
        UserError, match=r"critic\.path = .* another tokenizer than .*\(token '.*' is here .*, there .*\)"
    ):
        check(tiny_model("qwen3_moe"))
    small = shutil.copytree(dense, tmp_path / "small")
    (small / "config.json").write_text(json.dumps(json.loads((small / "config.json").read_text()) | {"vocab_size": 9}))
    with pytest.raises(UserError, match=r"critic\.path = .* embeddings for 9 tokens, but the tokenizer has \d\d+; use"):
        check(small)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"pipeline = 2 does not divide the model's 3 layers.* \(of the critic\)"):
        check(dense, parallel={"pipeline": 2})


def test_a_demonstration_is_one_sequence_of_one_update(tiny_model, monkeypatch):
    """SFT asks for no responses: its sizes are those of the demonstrations, and what RL would refuse is none of its."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    batch = {"prompts_per_step": 5, "samples_per_prompt": 4, "updates_per_step": 3}
    config = build_config({"model": {"path": str(tiny_model("qwen3_moe"))}, "batch": batch})
    _, plan, _ = preflight(config, "sft")
    assert (plan.trajectories_per_step, plan.trajectories_per_update, plan.updates_per_step) == (5, 5, 1)
    with pytest.raises(UserError, match="updates_per_step = 3 does not divide"):
        preflight(config, "train")


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_a_warm_up_is_of_the_commands_own_updates(kind, tiny_model, monkeypatch):
    """Learning from data has one update a step; a run that learns nothing has no schedule."""
    monkeypatch.setenv("WORLD_SIZE", "1")

    def look(as_kind, warmup, **batch):
        sections = {"batch": {"prompts_per_step": 4, **batch}, "optimizer": {"warmup_steps": warmup}}
        preflight(build_config({"steps": 3, "model": {"path": str(tiny_model("qwen3_moe"))}, **sections}), as_kind)

    look(kind, 2, updates_per_step=3)
    with pytest.raises(UserError, match=r"optimizer\.warmup_steps = 3 is not below the 3 updates of the schedule"):
        look(kind, 3, updates_per_step=3)
    with pytest.raises(
        UserError, match=rf"batch\.epochs = 2 works only in reinforcement learning; for megatron-rl {kind}, increase"
    ):
        look(kind, 0, epochs=2)
    look("sample", 3, epochs=2)
    look("train", 5, epochs=2)


def test_a_loss_with_another_losss_settings_is_told():
    """GSPO with bounds of tokens, or the mean over tokens; with its own, and for every other loss, nothing is said."""

    def hints(**algorithm):
        return loss_hints(build_config({"algorithm": algorithm}).algorithm)

    clip, mean = hints(loss="gspo")
    assert "clip_low = 0.2, clip_high = 0.2" in clip and "3e-4 and 4e-4" in clip and "\n" not in clip
    assert "gspo with aggregation: token_mean" in mean and "aggregation: sequence_mean" in mean
    own = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"}
    assert hints(loss="gspo", **own) == hints(loss="gspo", **own | {"clip_low": None, "clip_high": None}) == []
    assert len(hints(loss="gspo", **own | {"clip_high": 0.28})) == 1
    assert len(hints(loss="sapo")) == 1 and not hints(loss="sapo", aggregation="sequence_mean")
    assert not hints() and not hints(loss="cispo") and not hints(aggregation="sequence_sum")


def test_vp2o_is_of_reinforcement_learning(tiny_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = build_config({"model": {"path": str(tiny_model("qwen3_moe"))}, **VP2O})
    preflight(config, "train")
    with pytest.raises(UserError, match="set vp2o.enabled: false for sft"):
        preflight(config, "sft")


@pytest.mark.parametrize("key", ["moe_aux_loss", "moe_z_loss", "moe_bias_update_rate"])
def test_a_model_without_experts_has_nothing_to_balance(key, tiny_model, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dense = build_config({"model": {"path": str(tiny_model("llama")), key: 0.01}})
    for kind in ("train", "sft"):
        with pytest.raises(
            UserError, match=rf"model\.{key} = 0\.01 does nothing: LlamaForCausalLM has no experts; set it"
        ):
            preflight(dense, kind)


def test_biases_of_experts_move_where_the_whole_model_learns_from_data(tiny_model, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    settings = {"model": {"path": str(tiny_model("deepseek_v3")), "moe_bias_update_rate": 1e-3}}
    config = build_config(settings)
    for kind in ("sft", "reward", "dpo"):
        preflight(config, kind)
    with pytest.raises(
        UserError, match=r"moe_bias_update_rate = 0\.001: bias updates would change the policy without its loss"
    ):
        preflight(config, "train")
    with pytest.raises(UserError, match=r"moe_bias_update_rate = 0\.001 with lora\.rank: .* set one of the two to 0"):
        preflight(build_config({**settings, "lora": {"rank": 4}}), "sft")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_the_start(case, tiny_model, monkeypatch):
    changes, message = REFUSED[case]
    size = changes.get("parallel", {}).get("expert", 1)
    monkeypatch.setenv("WORLD_SIZE", str(size))
    model = {"path": str(tiny_model("qwen3_moe")), **changes.get("model", {})}
    config = build_config({**changes, "model": model, "batch": {"prompts_per_step": 12, **changes.get("batch", {})}})
    with pytest.raises(UserError, match=message) as refusal:
        preflight(config, "train")
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith("config: ")


def test_memory_savers_on_a_gpu():
    half, aware = ({"optimizer": keys} for keys in ({"cpu_offload": 0.5}, {"precision_aware": True, "moments": "bf16"}))
    with pytest.raises(
        UserError, match="needs the Adam of Transformer Engine or Apex, .*install one of them, or set cpu_offload: 1.0"
    ):
        refuse(build_config(half), *MEMORY, machine=HOPPER)
    refuse(build_config({"optimizer": {"cpu_offload": 1.0}}), *MEMORY, machine=HOPPER)
    refuse(build_config(half), *MEMORY, machine=replace(HOPPER, fused_adam=True))
    for version in (None, "2.0.1"):
        with pytest.raises(UserError, match=rf"Transformer Engine 2.1 or later \(found: {version or 'none'}\)"):
            machine = replace(HOPPER, transformer_engine=version, fused_adam=True)
            refuse(build_config(aware), *MEMORY, machine=machine)
    machine = replace(HOPPER, transformer_engine="2.10.0", fused_adam=True)
    refuse(build_config(aware), *MEMORY, machine=machine)


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.5, float("nan")])
def test_rho_outside_its_interval(rho):
    with pytest.raises(UserError, match=r"'pruning.rho' = .*(greater than 0|less than or equal to 1|a finite number)"):
        build_config({"pruning": {"rho": rho}})
    build_config({"pruning": {"rho": 1.0}})


def test_min_p_is_the_prunings_rho():
    with pytest.raises(UserError, match=r"min_p'; use pruning.rho with .*leave it out instead of 0"):
        build_config({"rollout": {"sampling": {"min_p": 0.1}}})


def test_an_evaluation_corrects_nothing(tiny_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    changes = REFUSED["veto with bypass"][0]
    preflight(build_config({"model": {"path": str(tiny_model("qwen3_moe"))}, **changes}), "sample")


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bounds", [{"high": 2.0}, {"low": 0.5}, {"low": 0.5, "high": 2.0}])
def test_one_bound_is_enough_for_a_mask(level, bounds):
    """With every denominator, alone or beside the veto and pruning; the objective that comes of it has the same bounds."""
    for denominator in DENOMINATORS:
        correction = {"mode": "mask", "level": level, "veto": 1e-4, "denominator": denominator, **bounds}
        for changed in (correction, {"denominator": denominator, "veto": 1e-4}, {"denominator": denominator}):
            config = build_config({"correction": changed, "pruning": {"enabled": True}})
            refuse(config, correction_bounds, *LEARNING)
            found = correction_of(config.correction)
            assert all(getattr(found, key) == value for key, value in changed.items())


def test_a_record_of_another_support_is_refused():
    support = SamplingSupport(temperature=0.5, min_p=0.1)
    support.check_recorded({"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.1})
    SamplingSupport(temperature=0.5).check_recorded({})  # of a release that did not say, and never truncated
    with pytest.raises(ValueError, match=r"under min_p 0 and not 0.1 "):
        support.check_recorded({})
    with pytest.raises(
        ValueError, match=r"under temperature 1 and not 0.5, min_p 0 and not 0.1 .*set rollout.sampling"
    ):
        support.check_recorded({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0})


def test_a_stricter_engine():
    """It samples and records by its own rho; the trainer scores by its own."""
    config = build_config({"pruning": {"enabled": True, "engine_rho": math.exp(-10)}})
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    assert support.log_rho == pytest.approx(-13.0)
    assert support.request()["custom_params"]["log_rho"] == pytest.approx(-10.0)
    assert support.sampled()["min_p"] == math.exp(-10)
    support.check_recorded({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": math.exp(-10)})
    with pytest.raises(ValueError, match=r"min_p 2.26033e-06 and not 4.53999e-05 \(min_p is pruning.engine_rho or rho"):
        support.check_recorded({"min_p": math.exp(-13)})
    whole = support.unpruned
    assert whole.log_rho is None and "custom_params" not in whole.request() and whole.options() == {}
    same = SamplingSupport(min_p=0.1)
    assert same.sampled() == SamplingSupport(min_p=0.1, engine_min_p=0.1).sampled()
    assert same.request() == SamplingSupport(min_p=0.1, engine_min_p=0.1).request()


def test_the_request_of_a_support():
    """What SGLang is asked for; that it does so is tests/rollout/test_support.py."""
    config = build_config({"pruning": {"enabled": True}, "rollout": {"sampling": {"temperature": 0.5}}})
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    assert support.log_rho == pytest.approx(-13.0)
    assert support.request()["custom_params"] == {"log_rho": support.log_rho, "temperature": 0.5}
    for asked in (support.request(), SamplingSupport().request()):  # a server may have other defaults
        assert (asked["min_p"], asked["repetition_penalty"], asked["presence_penalty"]) == (0.0, 1.0, 0.0)
    assert support.options() == {"custom_logit_processor": PRUNE_TAIL}, "a name, which the server looks up"
    assert SamplingSupport().options() == {} and SamplingSupport().log_rho is None
    assert SamplingSupport(top_p=0.9, top_k=50).options() == {"return_sampling_mask": True}


@pytest.mark.parametrize("floor", [0.0, 1.0, -0.5])
def test_agreement_floor_outside_its_interval(floor):
    with pytest.raises(UserError, match=r"'rollout.agreement_floor' = .*(greater than 0|less than 1)"):
        build_config({"rollout": {"agreement_floor": floor}})
    assert build_config({"rollout": {"agreement_floor": None}}).rollout.agreement_floor is None


def test_a_push_ends_within_the_patience_of_the_other_processes(tiny_model, monkeypatch):
    """The other processes wait for the first, which waits for servers."""
    keys = {"model": {"path": str(tiny_model("qwen3_moe"))}, "batch": {"prompts_per_step": 4}}
    config = build_config(keys | {"sync": {"timeout_s": 300}, "parallel": {"timeout_s": 300}})
    preflight(config, "train")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match=r"parallel.timeout_s = 300 s .*sync.timeout_s = 300 s.*increase parallel.timeout_s"
    ):
        preflight(config, "train")
    preflight(config, "sample")


def test_weights_reach_gpus_with_peer_access_alone(monkeypatch):
    """The bucket is on the first GPU; of four that the servers have, one cannot read it."""
    config = build_config({"rollout": {"colocate": True, "server": {"tensor": 2}}, "sync": {"transport": "tensor"}})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda device, peer: True)
    refuse(config, places, kind="train")
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda device, peer: device != 3)
    with pytest.raises(UserError, match=r"GPU 3 has no peer access to GPU 0.*set sync.transport: disk"):
        refuse(config, places, kind="train")


GPU = {
    "the CPU part alone": (
        (9, 0),
        False,
        {},
        "built without nvcc, only for the CPU: tools/setup.sh --gpu .*kernels: any",
    ),
    "an old GPU": ((7, 5), True, {}, "compute capability 8.0 or later, and this GPU has 7.5; model.kernels: any"),
    "no flash attention for these heads": ((9, 0), True, {"head_dim": 20}, "supports heads of 20 .*kernels: any"),
}


@pytest.mark.parametrize("case", GPU)
def test_a_gpu_computes_in_plain_torch_only_where_it_was_asked_to(case, tiny_model, tmp_path, monkeypatch):
    capability, built, changes, message = GPU[case]
    monkeypatch.setenv("WORLD_SIZE", "1")
    machine = Machine(capability, None, "0.47.0", "13.0")
    monkeypatch.setattr("megatron_rl.checks.model_and_machine.this_machine", lambda: machine)
    monkeypatch.setattr("megatron_rl.ops.extensions.have_cuda", lambda: built)
    folder = shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(settings))
    for kind in ("train", "sft"):
        with pytest.raises(UserError, match=message) as refusal:
            preflight(build_config({"model": {"path": str(folder)}}), kind)
        assert "\n" not in str(refusal.value)
    preflight(build_config({"model": {"path": str(folder), "kernels": "any"}}), "train")
    preflight(build_config({"model": {"path": str(folder)}}), "sample")  # builds no model here
    monkeypatch.setattr(
        "megatron_rl.checks.model_and_machine.this_machine", lambda: Machine(None, None, "0.47.0", "13.0")
    )
    preflight(build_config({"model": {"path": str(folder)}}), "train")


def test_kernels_for_this_gpu_are_enough(tiny_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(
        "megatron_rl.checks.model_and_machine.this_machine", lambda: Machine((9, 0), None, "0.47.0", "13.0")
    )
    monkeypatch.setattr("megatron_rl.ops.extensions.have_cuda", lambda: True)
    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        preflight(build_config({"model": {"path": str(tiny_model(family))}}), "train")


@pytest.mark.parametrize(
    ("asked", "capability", "precision", "broken", "message"),
    [
        ("FA4", (9, 0), "bf16", False, None),
        ("FA4", None, "fp32", False, None),
        ("auto", (9, 0), "fp32", False, None),
        ("auto", (8, 0), "bf16", True, None),
        ("torch", (9, 0), "bf16", True, None),
        ("FA4", (8, 0), "bf16", False, r"= FA4: FA4 runs on compute capabilities 9\.x and 10\.x, this GPU has 8\.0"),
        (
            "FA4",
            (9, 0),
            "fp32",
            False,
            r"= FA4: it does not support heads of 16 \(keys\) .* in float32 .*set it to auto",
        ),
        (
            "auto",
            (9, 0),
            "bf16",
            True,
            "= auto: FA4 cannot be used: ModuleNotFoundError.*; set it to torch, which does not need it",
        ),
        (
            "FA3",
            (9, 0),
            "bf16",
            False,
            r"= FA3: FA3 is not installed \(no module flash_attn_interface\); installed: torch",
        ),
    ],
)
def test_a_flash_attention_that_cannot_be_taken_is_refused(
    asked, capability, precision, broken, message, tiny_model, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "1")
    machine = Machine(capability, None, "0.47.0", "13.0")
    monkeypatch.setattr("megatron_rl.checks.model_and_machine.this_machine", lambda: machine)
    monkeypatch.setattr("megatron_rl.ops.extensions.have_cuda", lambda: True)
    monkeypatch.setattr("megatron_rl.ops.flash._is_there", lambda name: name == "FA4")
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None if broken else ModuleType("interface"))
    model = {"path": str(tiny_model("qwen3_moe")), "flash_attention": asked}
    config = build_config({"model": model, "precision": {"train": precision}})
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        preflight(config, "train")


@pytest.mark.parametrize(
    ("changes", "machine", "message"),
    [
        ({"moe_router_fusion": True}, Machine(None, "2.20.2", None, "13.0"), "needs a GPU and Transformer Engine"),
        ({"moe_router_fusion": True}, Machine((9, 0), None, None, "13.0"), "set it to false, or install it"),
        ({"moe_dispatcher": "flex"}, Machine((9, 0), "2.20.2", None, "13.0"), "the package deep_ep; use alltoall"),
    ],
)
def test_a_part_whose_package_is_missing_is_refused(changes, machine, message, tiny_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("megatron_rl.checks.model_and_machine.this_machine", lambda: machine)
    config = build_config({"model": {"path": str(tiny_model("qwen3_moe")), "kernels": "any", **changes}})
    with pytest.raises(UserError, match=message):
        preflight(config, "train")
