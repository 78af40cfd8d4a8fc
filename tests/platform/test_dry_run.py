"""SGLang's model runner on a pretended H100 (tests/gpu/dry_run.py): which kernels they reach; all families in --all.

By itself it prints what tools/prewarm.py compiles: python tests/platform/test_dry_run.py > requirements/rollout.kernels.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from megatron_rl_plugin.fingerprint import PREFIX  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from megatron_rl.config import ServerConfig  # noqa: E402
from megatron_rl.models.families import moe_layers  # noqa: E402
from megatron_rl.models.precision import Machine  # noqa: E402
from megatron_rl.servers.own_environment import find_python  # noqa: E402
from megatron_rl.servers.server import RolloutServer  # noqa: E402
from tools.make_tiny_model import FAMILIES, PRESETS, Sizes  # noqa: E402

DRY_RUN = REPOSITORY / "tests" / "gpu" / "dry_run.py"
KERNELS = REPOSITORY / "requirements" / "rollout.kernels.json"
HOPPER = Machine((9, 0), None, None, "13.0")
PROMPT = 37
"""Tokens of the dry run's first request."""
TRITON = ["--attention-backend", "triton"]
"""SGLang's own choice, FlashAttention 3, is one operator of sgl_kernel, and is left out on machines without a network."""


@dataclass(frozen=True)
class Case:
    """A model and what its server is told."""

    family: str
    sizes: Sizes
    dtype: str = "bf16"
    extra: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json that Sizes lacks."""
    gates: bool = True
    kept_sets: bool = False

    @property
    def moe_layers(self) -> list[int]:
        config = FAMILIES[self.family](self.sizes)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        return list(moe_layers(config))

    def arguments(self, folder: Path) -> list[str]:
        """The server's command line of a trainer on that machine, from SGLang's first flag on."""
        config = FAMILIES[self.family](self.sizes).to_dict() | self.config
        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        server = ServerConfig(python=sys.executable, memory_fraction=0.5, extra_args=[*TRITON, *self.extra])
        routes = bool(self.moe_layers)
        asked = RolloutServer(
            folder,
            server,
            context_length=512,
            dtype=self.dtype,
            processor=True,
            routes=routes,
            gates=routes and self.gates,
            kept_sets=self.kept_sets,
            seeded_sets=self.kept_sets,
        )
        command = asked.command(HOPPER)
        return command[command.index("--model-path") :]


def widths(**sizes: int) -> Sizes:
    """Two layers of a released model; no weight is ever made of them."""
    return Sizes(layers=2, **sizes)


QWEN3 = widths(
    hidden=2048, heads=32, kv_heads=4, head_dim=128, expert_intermediate=768, experts=128, topk=8, vocab=151936
)
OLMOE = widths(hidden=2048, heads=16, head_dim=128, expert_intermediate=1024, experts=64, topk=8, vocab=50304)
MOONLIGHT = widths(
    hidden=2048, heads=16, head_dim=128, intermediate=11264, expert_intermediate=1408, experts=64, topk=6, vocab=163840
)
GPT_OSS = widths(
    hidden=2880, heads=64, kv_heads=8, head_dim=64, expert_intermediate=2880, experts=32, topk=4, vocab=201088
)
MIXTRAL = widths(hidden=4096, heads=32, kv_heads=8, head_dim=128, expert_intermediate=14336, vocab=32000)
STAGE = widths(hidden=256, heads=4, kv_heads=2, head_dim=64, expert_intermediate=128, vocab=64)
"""Widths of the models in tests/gpu/."""
CASES = {
    "quickstart": Case(*PRESETS["quickstart"], kept_sets=True),
    "quickstart, fp32": Case(*PRESETS["quickstart"], dtype="fp32", gates=False),
    "gpt-oss quickstart, fp32": Case(*PRESETS["gptoss_quickstart"], dtype="fp32"),
    "small Qwen3": Case("qwen3_moe", STAGE),
    "small Qwen3, fp32": Case("qwen3_moe", STAGE, dtype="fp32"),
    "small gpt-oss": Case("gpt_oss", replace(STAGE, hidden=128, expert_intermediate=256)),
    "Qwen3-30B-A3B": Case("qwen3_moe", QWEN3),
    "Qwen3-30B-A3B, fp8": Case("qwen3_moe", QWEN3, dtype="fp8", extra=["--kv-cache-dtype", "fp8_e4m3"]),
    "OLMoE-7B": Case("olmoe", OLMOE),
    "Moonlight-16B": Case("deepseek_v3", MOONLIGHT, config={"kv_lora_rank": 512, "n_group": 1, "topk_group": 1}),
    "gpt-oss-20b": Case("gpt_oss", GPT_OSS),
    "Mixtral-8x7B": Case("mixtral", MIXTRAL),
    "Qwen3-8B": Case(
        "qwen3", widths(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936)
    ),
    "Llama-3.2-1B": Case(
        "llama", widths(hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256)
    ),
}
FEW = (("jit", "tiny_n_gemm"), ("flashinfer", "tinygemm2"))
OPERATORS = {"rmsnorm", "fused_add_rmsnorm", "moe_align_block_size", "moe_sum_reduce"}
"""Operators of sgl_kernel. Norms in bf16 are FlashInfer's where that is installed."""
TRITON_KERNELS = {
    *(
        "_fwd_kernel",
        "_fwd_kernel_stage1",
        "_fwd_grouped_kernel_stage1",
        "_fwd_kernel_stage2",
        "get_num_kv_splits_triton",
    ),
    *("create_flashinfer_kv_indices_triton", "write_req_to_token_pool_triton", "compute_position_kernel"),
    *("fused_moe_kernel", "_router_triton_kernel", "_moe_align_small_numel_kernel", "_moe_sum_reduce_kernel"),
    *("_w8a8_block_fp8_matmul", "concat_and_cast_mha_k_kernel", "murmur_hash32_kernel"),
}


SHORT = ("quickstart", "gpt-oss quickstart, fp32", "Qwen3-30B-A3B, fp8", "Moonlight-16B")
"""Each type of weights, plain attention, sinks and latents, and each kind of router. The others are for --all."""


def dry_run(folder: Path, names: Iterable[str] = tuple(CASES), *, compiles: bool = False) -> dict[str, dict[str, Any]]:
    """The outcomes, by the names of the cases."""
    cases = {}
    for number, name in enumerate(names):
        case = CASES[name]
        cases[name] = {"arguments": case.arguments(folder / str(number)), "compile": compiles}
        cases[name]["environment"] = {"TRITON_F32_DEFAULT": "ieee"} if case.dtype == "fp32" else {}
    command = [str(find_python()), str(DRY_RUN)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(map(json.loads, done.stdout.splitlines()))


def modules(found: dict[str, dict[str, Any]]) -> list[str]:
    """CUDA kernels that SGLang compiles by itself, each as a line of JSON."""
    assert not (errors := [outcome["error"] for outcome in found.values() if outcome["error"]]), errors[0]
    return sorted({json.dumps(module) for outcome in found.values() for module in outcome["modules"]})


def check_cases(found: dict[str, dict[str, Any]], compiles: bool) -> None:
    """No tensor on the wrong device, no operator that refuses a shape, no wait for the GPU in what our plugin adds."""
    for name, outcome in found.items():
        case = CASES[name]
        assert outcome["error"] is None, (name, outcome["error"])
        assert outcome["captured"] == case.moe_layers, name
        routes = [[PROMPT, case.sizes.layers, case.sizes.topk], "torch.int32" if case.gates else "torch.uint8"]
        assert outcome["routes"] == (routes if case.moe_layers else None), name
        assert outcome["logits"] == [[3, case.sizes.vocab], "cuda:0", "torch.float32"], name
        assert outcome["plugin"] == ["upload pruning._parameters", "upload seeds.of_requests"], name
        weights = {"fp32": {"float32"}, "bf16": {"bfloat16"}, "fp8": {"bfloat16", "float32", "float8_e4m3fn"}}[
            case.dtype
        ]
        weights |= {"float32"} if case.family in ("deepseek_v3", "gpt_oss") else set()  # biases of routers and experts
        assert set(outcome["weights"]) == {f"{PREFIX}:{dtype}" for dtype in weights}, name
        assert outcome["same_after_a_push"], name
        compiled = outcome["compiled"]
        assert set(compiled) == set(outcome["kernels"]["triton"] if compiles else ()), name
        assert set(compiled.values()) <= {"ok"}, (name, compiled)


def reached(found: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    """Kind -> names of the kernels that some case reaches."""
    kinds: dict[str, set[str]] = {}
    for outcome in found.values():
        for kind, names in outcome["kernels"].items():
            kinds.setdefault(kind, set()).update(names)
    return kinds


def test_some_run_on_a_pretended_h100(tmp_path):
    found = dry_run(tmp_path, SHORT)
    assert list(found) == list(SHORT)
    check_cases(found, compiles=False)
    kernels = reached(found)
    assert kernels["sgl_kernel"] <= OPERATORS and kernels["triton"] <= TRITON_KERNELS
    assert {*modules(found)} <= {json.dumps(module) for module in json.loads(KERNELS.read_text())}


@pytest.mark.timeout(900)
def test_every_family_runs_on_a_pretended_h100(tmp_path):
    """Each kernel of Triton that is reached is compiled too."""
    found = dry_run(tmp_path, compiles=True)
    assert list(found) == list(CASES)
    check_cases(found, compiles=True)
    flashinfer = any("flashinfer" in outcome["kernels"] for outcome in found.values())
    # Attribution names the routers that multiply few tokens otherwise: few_tokens of the families.
    of_few = {
        kind: {name for name, o in found.items() if product in o["kernels"].get(kind, ())} for kind, product in FEW
    }
    assert of_few == {"jit": {"Moonlight-16B"}, "flashinfer": {"gpt-oss-20b"} if flashinfer else set()}
    # A release that reaches others makes what is said of them worth a look.
    kernels = reached(found)
    assert kernels["sgl_kernel"] == OPERATORS
    assert kernels["triton"] == TRITON_KERNELS
    stored = [json.dumps(module) for module in json.loads(KERNELS.read_text())]
    assert modules(found) == stored, f"python tests/platform/test_dry_run.py > {KERNELS.relative_to(REPOSITORY)}"


@pytest.mark.timeout(2000)
def test_all_that_is_compiled_ahead_compiles(tmp_path):
    """The dry run takes the compiler's word for granted."""
    command = [str(find_python()), str(REPOSITORY / "tools" / "prewarm.py"), "2"]
    environment = os.environ | {"SGLANG_JIT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list(tmp_path.rglob("*.so"))) == len(json.loads(KERNELS.read_text()))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print("[\n" + ",\n".join(modules(dry_run(Path(folder)))) + "\n]")
