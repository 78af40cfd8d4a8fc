"""Adapters in training: every layout against one process, checkpoints of them alone, and what they cannot go with."""

from __future__ import annotations

import pytest
import torch
from covering import TWO_RANKS, layers_of, parallel_of
from layouts import make_samples
from ranks import run_ranks, without_ties
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.checks.lora import adapted_layers
from megatron_rl.checks.preflight import check_keys, preflight
from megatron_rl.checks.refusals import refuse
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.models.parallel_check import read_hf_config

pytestmark = pytest.mark.timeout(900)  # a fixture runs all layouts

# As in test_parity.py: Adam's first steps differ by what the gradients do, and by a rounding.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1}
LORA = {"rank": 4, "alpha": 6.0, "targets": ["*.linear_*", "*.router.*"]}
LAYOUTS = [name for name in TWO_RANKS if name not in ("cp2_all_gather", "dp2_sharded")]
FOUR = ["tp2_ep2", "pp2_ep2"]


@pytest.fixture(scope="module")
def starts(tiny_model, tmp_path_factory):
    """By layers of the model: it, and adapters whose B is not zero."""
    models = {layers: str(tiny_model("qwen3_moe", "--layers", str(layers))) for layers in (2, 4)}
    folders = {layers: str(tmp_path_factory.mktemp("adapters") / "start") for layers in models}
    run_ranks(1, "lora_ranks:write_starts", ([(models[layers], LORA, folders[layers]) for layers in models],))
    common = {"optimizer": OPTIMIZER, "algorithm": {"kl": {"coefficient": 0.1}}}
    return {
        layers: {"lora": LORA | {"path": folders[layers]}, "model": {"path": model}, **common}
        for layers, model in models.items()
    }


@pytest.fixture(scope="module")
def start(starts):
    return starts[2]


@pytest.fixture(scope="module")
def model(start):
    return start["model"]["path"]


@pytest.fixture(scope="module")
def drawn(starts, start):
    """Samples, and (layout, layers) -> what its first rank found."""

    def attempt(seed: int):
        samples = make_samples(seed, 8, 200)
        alone = run_ranks(1, "lora_ranks:train_as", (samples, [*starts.values()]), refuse_ties=True)[0]
        return samples, {("one", layers): result for layers, result in zip(starts, alone, strict=True)}

    samples, results = without_ties(attempt)
    recompute = start | {"model": start["model"] | {"recompute": "full"}}
    results["recompute", 2] = run_ranks(1, "lora_ranks:train_as", (samples, [recompute]))[0][0]
    return samples, results | on_ranks(starts, samples, 2, LAYOUTS)


def on_ranks(starts: dict[int, dict], samples: list, world: int, names: list[str]) -> dict[tuple[str, int], dict]:
    layouts = [starts[layers_of(n)] | {"parallel": parallel_of(n, whole_experts=True)} for n in names]
    ranks = run_ranks(world, "lora_ranks:train_as", (samples, layouts), timeout=540.0)
    return {(n, layers_of(n)): result for n, result in zip(names, ranks[0], strict=True)}


@pytest.fixture(scope="module")
def found(drawn):
    return drawn[1]


@pytest.fixture(scope="module")
def found_on_four(starts, drawn):
    samples, results = drawn
    return results | on_ranks(starts, samples, 4, FOUR)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("layout", [*LAYOUTS, "recompute"])
def test_layouts_train_as_one_process(layout, found):
    check_layout(found, layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", FOUR)
def test_layouts_of_four_train_as_one_process(layout, found_on_four):
    check_layout(found_on_four, layout)


def check_layout(found: dict[tuple[str, int], dict], layout: str) -> None:
    """Log-probs, loss, the gradient of every A and B, and both after two updates."""
    one, other = found["one", layers_of(layout)], found[layout, layers_of(layout)]
    assert one["log_probs"].keys() == other["log_probs"].keys()
    assert max(abs(value - other["log_probs"][key]) for key, value in one["log_probs"].items()) < 1e-5
    for name in ("loss/policy", "kl/reference", "update/grad_norm"):
        assert other["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5, abs=1e-6), name
    largest = max(float(gradient.abs().max()) for gradient in one["grads"].values())
    assert all(float(gradient.abs().max()) > 0 for gradient in one["grads"].values())
    assert largest_difference(one["grads"], other["grads"]) < 1e-5 * max(1.0, largest)
    assert largest_difference(one["adapters"], other["adapters"]) < 1e-5
    assert largest_difference(one["weights"], other["weights"]) < 1e-5


def test_the_reference_is_the_model_without_them(found):
    """The KL to it is that of B's which are not zero, though there is no second copy."""
    assert found["one", 2]["metrics"]["kl/reference"] > 1e-3


def test_what_was_saved_goes_on_to_the_bit(model, start, tmp_path):
    """Two updates, a save, a load and two more are four; the checkpoint has adapters alone, in PEFT's format too."""
    samples = make_samples(1, 6, 200)
    overrides = start | {"parallel": {"expert": 2}}
    results = run_ranks(2, "lora_ranks:go_on", (model, samples, overrides, str(tmp_path)), timeout=400.0)
    expected, found, files = results[0]
    assert largest_difference(expected, found) == 0
    path = next(tmp_path.glob("step_*"))
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "hf/config.json"} <= set(files)
    tensors = [
        name
        for name, kind in FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if hasattr(kind, "size")
    ]
    assert tensors
    assert all(
        ".adapter.linear_" in name for name in tensors
    )  # of the model's own weights, and their moments, there are none
    for world, parallel in ((1, {}), (2, {"tensor": 2, "expert_tensor": 1})):
        loaded, written = run_ranks(world, "lora_ranks:load_as", (model, start | {"parallel": parallel}, str(path)))[0]
        assert largest_difference(loaded, written) == 0
    with pytest.raises(AssertionError, match=r"has adapters of lora\.rank = 4, and the config says 8"):
        changed = start | {"lora": start["lora"] | {"rank": 8}}
        run_ranks(1, "lora_ranks:load_as", (model, changed, str(path)))
    with pytest.raises(AssertionError, match=r"has adapters, and the config says lora\.rank = 0"):
        run_ranks(1, "lora_ranks:load_as", (model, {}, str(path)))


UNMERGED = {"lora": {"rank": 4, "targets": ["*.self_attention.linear_*"]}, "sync": {"adapters": "unmerged"}}
BAD = {
    "lora.alpha = 8 does nothing without lora.rank; set lora.rank: 16": {"lora": {"alpha": 8.0}},
    r"lora\.targets: '\*\.linear_q' matches no parameter .* did you mean": {
        "lora": {"rank": 4, "targets": ["*.linear_q"]}
    },
    r"lora\.targets has decoder\.layers\.0.* but not .*decoder\.layers\.[123]": {
        "lora": {"rank": 4, "targets": ["decoder.layers.0.*"]}
    },
    r"parallel\.expert_tensor = 2 with an adapter of .*experts": {
        "lora": {"rank": 4},
        "parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2},
    },
    r"lora\.rank = 3 is not divisible by parallel\.tensor = 2.*use 4": {
        "lora": {"rank": 3},
        "parallel": {"tensor": 2, "expert_tensor": 1},
    },
    r"lora\.kind = dora does not support .*experts": {"lora": {"rank": 4, "kind": "dora"}},
    r"lora\.kind = dora with parallel\.tensor = 2": {
        "lora": {"rank": 4, "kind": "dora"},
        "parallel": {"tensor": 2, "expert_tensor": 1},
    },
    r"model\.freeze = .* with lora\.rank = 4": {"lora": {"rank": 4}, "model": {"freeze": ["embedding.*"]}},
    r"model\.keep_zeros with lora\.rank = 4": {"lora": {"rank": 4}, "model": {"keep_zeros": True}},
    r"vp2o\.enabled with lora\.rank = 4": {"lora": {"rank": 4}, "vp2o": {"enabled": True}},
    r"precision\.train = fp8.* with lora\.rank = 4": {"lora": {"rank": 4}, "precision": {"train": "fp8_blockwise"}},
    r"parallel\.tensor = 2 with an adapter of .*_down_proj.*leave \*_down_proj out": {
        "lora": {"rank": 4},
        "parallel": {"tensor": 2, "expert_tensor": 1},
        "model": {"path": "deepseek_v3"},
    },
    r"sync\.adapters = unmerged does nothing without lora\.rank; set lora\.rank: 16": {
        "sync": {"adapters": "unmerged"}
    },
    r"unmerged: lora\.targets has .*: SGLang": {"lora": {"rank": 4}, "sync": {"adapters": "unmerged"}},
    r"unmerged: routing\.source = pr3": {**UNMERGED, "routing": {"source": "pr3"}, "batch": {"updates_per_step": 2}},
    r"unmerged: rollout\.record with SGLang's routes": {**UNMERGED, "rollout": {"record": True, "routes": True}},
    r"unmerged: rollout\.colocate": {
        **UNMERGED,
        "rollout": {"colocate": True},
        "sync": {"adapters": "unmerged", "transport": "tensor"},
    },
    r"unmerged: precision\.rollout = fp8": {**UNMERGED, "precision": {"rollout": "fp8"}},
    r"lora\.path = /gone: does not exist": {"lora": {"rank": 4, "path": "/gone"}},
    r"lora\.dropout = 0\.1 with algorithm\.on_policy": {
        "lora": {"rank": 4, "dropout": 0.1},
        "algorithm": {"on_policy": True},
    },
}


@pytest.mark.parametrize("message", BAD)
def test_what_adapters_cannot_go_with_is_refused_by_one_line(message, model, tiny_model):
    """By the key, with the remedy."""
    overrides = dict(BAD[message])
    of_family = overrides.get("model", {}).get("path")
    model = str(tiny_model(of_family)) if of_family else model
    overrides["model"] = {**overrides.get("model", {}), "path": model}
    with pytest.raises(UserError, match=message) as refused:
        check_keys(build_config(overrides), "train", 1)
        refuse(build_config(overrides), adapted_layers, hf_config=read_hf_config(model), kind="train")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["sample", "score"])
def test_what_looks_at_the_model_alone_does_not_take_adapters(kind, model):
    """An evaluation of the base would be taken for one of the adapters."""
    config = build_config({"model": {"path": model}, "lora": {"rank": 4, "path": "adapter"}})
    with pytest.raises(UserError, match=r"lora\.path = adapter: .*\(megatron-rl convert adapter OUT\)"):
        preflight(config, kind)


def test_experts_in_one_tensor_have_no_form_in_peft(tiny_model):
    """gpt-oss: the line says which layers to take."""
    folder = str(tiny_model("gpt_oss"))
    config = build_config({"model": {"path": folder}, "lora": {"rank": 4}})
    with pytest.raises(
        UserError, match=r"PEFT's format has no adapters for .*gate_up_proj.*use only \*\.self_attention"
    ):
        refuse(config, adapted_layers, hf_config=read_hf_config(folder), kind="sft")
