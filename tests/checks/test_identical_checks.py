"""What precision.identical refuses, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers

from megatron_rl.checks.identical_precision import IDENTICAL
from megatron_rl.checks.refusals import refuse
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.models.precision import Machine

NO_GPU = Machine(None, None, None, None)
HF_CONFIG = transformers.Qwen3MoeConfig(num_experts=4, architectures=["Qwen3MoeForCausalLM"])
FINE = {"precision": {"identical": True, "train": "fp32", "rollout": "fp32"}}


def check(values: dict, machine: Machine = NO_GPU) -> None:
    merged = {section: {**FINE.get(section, {}), **values.get(section, {})} for section in {*FINE, *values}}
    refuse(build_config(merged), *IDENTICAL, hf_config=HF_CONFIG, machine=machine)


def test_what_can_be():
    check({})
    check({"precision": {"train": "bf16", "rollout": "bf16"}, "parallel": {"tensor": 2, "expert_tensor": 1}})
    check({"pruning": {"enabled": True}, "routing": {"source": "r3"}})
    check({"precision": {"identical": False, "train": "bf16"}, "model": {"moe_dispatcher": "allgather"}})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"precision": {"train": "bf16"}}, "precision.train = bf16 and precision.rollout = fp32"),
        ({"precision": {"train": "fp8_blockwise", "rollout": "fp8"}}, "set both to fp32, or to bf16"),
        ({"parallel": {"tensor": 2}}, "parallel.expert_tensor: 1"),
        ({"model": {"moe_dispatcher": "allgather"}}, "model.moe_dispatcher = allgather"),
        ({"model": {"moe_router_fusion": True}}, "model.moe_router_fusion"),
        ({"lora": {"rank": 4}}, "lora.rank"),
        ({"routing": {"source": "pr2"}, "batch": {"updates_per_step": 2}}, "routing.source = pr2"),
        ({"routing": {"source": "r3", "replay_gates": True}}, "routing.replay_gates"),
        ({"model": {"attention_sinks": "ignored"}}, "model.attention_sinks"),
        ({"rollout": {"sampling": {"top_k": 10}}}, "rollout.sampling.top_k"),
        ({"pruning": {"enabled": True, "engine_rho": 1e-3}}, "pruning.engine_rho"),
        ({"rollout": {"server": {"tensor": 2}}}, "rollout.server.tensor = 2"),
    ],
)
def test_refused_by_name(values, says):
    with pytest.raises(UserError, match=r"precision\.identical.*" + says.replace(".", r"\.")):
        check(values)


def test_a_gpu_is_refused():
    with pytest.raises(UserError, match="this machine has a GPU"):
        check({}, replace(NO_GPU, gpu=(9, 0)))
