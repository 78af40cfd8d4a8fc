"""Flags of a server with a GPU, computed without one, and what SGLang's own resolution makes of them."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_rl.config import ServerConfig
from megatron_rl.errors import UserError
from megatron_rl.models.precision import Machine
from megatron_rl.servers.flags import AS_PUSHED, TAKES_FP32, server_flags
from megatron_rl.servers.server import RolloutServer
from tests.forked_servers import output_of_script

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3")
CARDS = {"Ampere": (8, 0), "Hopper": (9, 0), "B200": (10, 0), "RTX Blackwell": (12, 0)}


def machine(card: str) -> Machine:
    return Machine(CARDS[card], None, None, "12.9")


def facts(card: str) -> dict:
    """SGLang's own names for what a machine is."""
    major = CARDS[card][0]
    found = dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), major == 9)
    found |= dict.fromkeys(("is_sm100", "is_sm100_or_sm110"), major == 10)
    found |= {"is_sm110": False, "is_sm120": major == 12, "is_blackwell": major >= 10}
    found |= {"is_cuda": True, "has_amx": False, "has_flashinfer": True}
    return found | {"device_sm": 10 * major, "device_capability": (major, 0)}


def resolve(cases: list[tuple[str, list[str]]]) -> list[dict]:
    """SGLang's answers for (card, command line) each."""
    given = json.dumps([(facts(card), arguments) for card, arguments in cases])
    script = Path(__file__).with_name("resolve_choices.py")
    return json.loads(output_of_script(script, given))


def arguments(model: Path, card: str, **settings) -> list[str]:
    """The trainer's command line, from SGLang's first flag on."""
    config = ServerConfig(python=sys.executable, memory_fraction=0.5)
    command = RolloutServer(model, config, context_length=64, **settings).command(machine(card))
    return command[command.index("--model-path") :]


def test_what_sglang_makes_of_our_flags(tiny_model):
    """Every family on every card: routes in bf16, and fp32. Beside it what SGLang takes by itself, which is why we say."""
    cases = {}
    for family in FAMILIES:
        model = tiny_model(family)
        for card in CARDS:
            plain = ["--model-path", str(model), "--skip-tokenizer-init", "--mem-fraction-static", "0.5"]
            cases[family, card, "alone"] = card, [*plain, "--dtype", "bfloat16"]
            routes = family != "qwen3"
            cases[family, card, "routes"] = card, arguments(model, card, dtype="bf16", routes=routes, fp32_lm_head=True)
            cases[family, card, "fp32"] = card, arguments(model, card, dtype="fp32", routes=routes)
    found = dict(zip(cases, resolve(list(cases.values())), strict=True))
    for (family, card, kind), answer in found.items():
        assert "error" not in answer, (family, card, kind, answer)
        if kind == "alone":
            continue
        assert family == "qwen3" or answer["moe"] == "triton", (family, card, kind, answer)
        assert kind == "routes" or answer["attention"] == "triton", (family, card, answer)
        assert answer["head"] == (kind == "routes")
    alone = {key[:2]: answer for key, answer in found.items() if key[2] == "alone"}
    # A release that chooses otherwise makes this file and servers/flags.py worth a look.
    assert alone["gpt_oss", "Hopper"] == {"attention": "fa3", "moe": "triton_kernel", "head": False}
    assert alone["qwen3_moe", "B200"] == {"attention": "trtllm_mha", "moe": "flashinfer_trtllm", "head": False}
    assert {answer["attention"] for answer in alone.values()} - set(TAKES_FP32) == {
        *("fa3", "trtllm_mha", "trtllm_mla", "flashinfer")
    }
    assert {answer["moe"] for answer in alone.values()} - set(AS_PUSHED) == {"triton_kernel", "flashinfer_trtllm"}


@pytest.mark.parametrize("card", [*CARDS, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_choices(family, card, tiny_model):
    model = json.loads((tiny_model(family) / "config.json").read_text())
    here = machine(card) if card else Machine(None, None, None, None)
    dense = family == "qwen3"
    for dtype in ("bf16", "fp32", "fp8"):
        flags = {c.flag: c.value for c in server_flags(model, dtype, here, routes=not dense)}
        expected = {"--attention-backend": "triton"} if dtype == "fp32" else {}
        expected |= {} if dense and dtype != "fp8" else {"--moe-runner-backend": "triton"}
        expected |= {"--fp8-gemm-backend": "triton"} if dtype == "fp8" else {}
        assert flags == (expected if card else {})


def test_a_quantized_folder_is_served_as_sglang_likes_unless_routes_are_asked(tiny_model):
    model = json.loads((tiny_model("gpt_oss") / "config.json").read_text())
    model["quantization_config"] = {"quant_method": "mxfp4"}
    assert server_flags(model, "bf16", machine("Hopper"), routes=False) == []
    [sampler] = server_flags(model, "bf16", machine("Hopper"), routes=False, seeded_sets=True)
    assert (sampler.flag, sampler.value) == ("--sampling-backend", "pytorch")
    [choice] = server_flags(model, "bf16", machine("Hopper"), routes=True)
    assert (choice.flag, choice.value) == ("--moe-runner-backend", "triton")


def test_fp32_is_no_tf32(tiny_model, monkeypatch):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    server = RolloutServer(tiny_model("qwen3_moe"), ServerConfig(python=sys.executable), dtype="fp32")
    assert server.environment(machine("Hopper"))["TRITON_F32_DEFAULT"] == "ieee"
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert server.environment(machine("Hopper"))["TRITON_F32_DEFAULT"] == "tf32x3"
    server = RolloutServer(tiny_model("qwen3_moe"), ServerConfig(python=sys.executable), dtype="bf16")
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    assert "TRITON_F32_DEFAULT" not in server.environment(machine("Hopper"))


def test_both_sides_have_the_same_nccl_setting(tmp_path, monkeypatch):
    server = RolloutServer(tmp_path, ServerConfig(python=sys.executable))
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    assert server.environment(machine("Hopper"))["NCCL_CUMEM_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert server.environment(machine("Hopper"))["NCCL_CUMEM_ENABLE"] == "1"


@pytest.mark.parametrize(
    ("extra", "settings", "message"),
    [
        (
            ["--moe-runner-backend", "triton_kernel"],
            {"routes": True},
            "has --moe-runner-backend triton_kernel, but .* triton",
        ),
        (["--trust-remote-code"], {}, "has --trust-remote-code, which runs code from the model's folder"),
        (["--trust"], {}, "has --trust, which runs code"),
        (
            ["--moe-runner-backend=flashinfer_trtllm"],
            {},
            "flashinfer_trtllm, but this run needs triton: others capture no",
        ),
        (
            ["--attention-backend", "fa3"],
            {"dtype": "fp32"},
            "has --attention-backend fa3, but this run needs triton: others",
        ),
        (["--decode-attention-backend", "fa3"], {"dtype": "fp32"}, "has --decode-attention-backend fa3.*leave it out"),
        (["--dtype", "float16"], {}, "has --dtype, which is precision.rollout; set that key instead"),
        (["--enable-fp32-lm-head"], {}, "has --enable-fp32-lm-head, which is precision.fp32_lm_head"),
        (["--tp", "4"], {}, "has --tp, which is rollout.server.tensor"),
    ],
)
def test_extra_arguments_that_contradict_are_refused(extra, settings, message, tiny_model):
    config = ServerConfig(python=sys.executable, extra_args=["--chunked-prefill-size", "64", *extra])
    with pytest.raises(UserError, match=message) as error:
        RolloutServer(tiny_model("gpt_oss"), config, **settings).command(machine("Hopper"))
    assert "\n" not in str(error.value)


def test_extra_arguments_that_do_not(tiny_model):
    extra = ["--attention-backend", "fa3", "--moe-runner-backend", "triton", "--chunked-prefill-size", "64"]
    server = RolloutServer(tiny_model("gpt_oss"), ServerConfig(python=sys.executable, extra_args=extra), dtype="bf16")
    pairs = dict(pairwise(server.command(machine("Hopper"))))
    assert pairs["--attention-backend"] == "fa3" and pairs["--moe-runner-backend"] == "triton"
    # Two of one kind, one for each phase, of which both compute in fp32.
    extra = ["--decode-attention-backend", "torch_native", "--prefill-attention-backend", "triton"]
    config = ServerConfig(python=sys.executable, extra_args=extra)
    RolloutServer(tiny_model("qwen3"), config, dtype="fp32").command(machine("Hopper"))
