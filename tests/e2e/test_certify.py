"""`megatron-rl certify`: a real server and the real trainer, equal to the last bit, and broken on purpose in one operator."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from breaks import BREAKS, certify_again
from megatron_rl_plugin.trace import OF_LAYER

from megatron_rl.certify import certify as command
from megatron_rl.certify.certificate import DATA, PAGE
from megatron_rl.certify.engine_side import Sides
from megatron_rl.cli import main
from megatron_rl.distributed import parallel
from tests.program import forked
from tests.ranks import run_ranks

LAYERS, PROMPTS = 2, 5
MLA = ("query latents", "query projection", "latent projection", "latent norm")
OPERATORS = [name for name in OF_LAYER if name not in MLA]
FAMILIES = {
    "gpt_oss": (),
    "olmoe": (),
    "deepseek_v3": (),
    "deepseek_v3 with query latents": ("--q-lora-rank", "24"),
    "mixtral": (),
    "qwen3": (),
    "llama": (),
}
"""Sinks and windows, norms over all heads, multi-latent attention with shared experts, dense layers."""
PLUGIN = '''
"""Layer 1's output projection sums the rows of a batch in another order than that of one row."""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Behind load_model, after which the model gets the trainer's operators; in which order plugins are found, nothing says.
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends", after_load, HookType.BEFORE
    )


def after_load(runner, *args, **kwargs):
    projection = runner.model.model.layers[1].self_attn.o_proj
    apply = projection.quant_method.apply

    class Backwards:
        def apply(self, layer, x, bias=None):
            if len(x) == 1:
                return apply(layer, x, bias)
            out = x.flip(-1) @ layer.weight.flip(-1).t()
            return out if bias is None else out + bias

    projection.quant_method = Backwards()
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model) -> Path:
    folder = tmp_path_factory.mktemp("certify")
    model = tiny_model("qwen3_moe", "--layers", str(LAYERS), "--topk", "3", "--tokenizer", "numbers")
    tree = {
        "name": "certified",
        "seed": int(np.random.default_rng().integers(2**31)),
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 128},
        "precision": {"train": "fp32", "rollout": "fp32", "identical": True},
        "rollout": {"max_new_tokens": 12, "context_length": 64, "server": {"threads": 1, "max_total_tokens": 4096}},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


def certify(config: Path, *arguments: str, status: int) -> tuple[dict, str]:
    """The certificate as JSON, and the page."""
    try:
        assert main(["certify", str(config), "--prompts", str(PROMPTS), "--tokens", "24", *arguments]) == status
    finally:
        parallel.shutdown()
    run = config.parent / "runs" / "certified"
    assert not [path for path in run.iterdir() if path.is_dir()], "the folder of traces stays"
    return json.loads((run / DATA).read_text()), (run / PAGE).read_text()


def certify_and_keep(config: Path, *arguments: str) -> tuple[dict, str, Sides]:
    """The certificate of a config as it is, and what the engine computed."""
    kept = []
    ask = command._ask

    def asking(*args):
        kept.append(ask(*args))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_ask", asking)
        return *certify(config, *arguments, status=0), kept[0]


@pytest.fixture(scope="module")
def certified(config) -> tuple[dict, str, Sides]:
    """The certificate of the config as it is, and what the engine computed."""
    return certify_and_keep(config)


def check_equal(found: dict) -> None:
    assert found["equal"] and [step["first"] for step in found["steps"]] == [None] * 8
    for step in found["steps"]:
        assert {one["operator"] for one in step["places"] if one["layer"] is not None} == set(OPERATORS)
        assert len(step["places"]) == LAYERS * len(OPERATORS) + 2
        assert step["sequences"] == PROMPTS and step["log_probs"]["rows"] > 50
        assert all(one["rows"] >= step["tokens"] > 80 for one in step["places"])
    remarks = {step["name"]: int(step["remark"].split()[0]) for step in found["steps"] if step["remark"]}
    assert remarks["engine: retracted requests"] > 0 and remarks["engine: prefix cache"] > PROMPTS


def test_trainer_and_engine_are_equal_to_the_last_bit(certified):
    found, page, sides = certified
    check_equal(found)
    assert "Trainer and engine are equal to the last bit." in page and "| router | equal | equal |" in page
    lengths = {t.response_length for t in sides.trajectories}
    assert len(lengths) > 2 and max(lengths) == 24


def test_trainer_and_engine_are_equal_in_bf16(config):
    found, _ = certify(config, "--precision.train", "bf16", "--precision.rollout", "bf16", status=0)
    check_equal(found)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2, "expert": 2, "expert_tensor": 1}, {"pipeline": 2}, {"context": 2}], ids=str
)
def test_layouts_are_equal_to_one_process(sizes, config):
    layout = [word for name, size in sizes.items() for word in (f"--parallel.{name}", str(size))]
    forked("certify", str(config), *layout, "--prompts", str(PROMPTS), "--tokens", "24", ranks=2)
    found = json.loads((config.parent / "runs" / "certified" / DATA).read_text())
    check_equal(found)
    assert f"{next(iter(sizes))} 2" in found["layout"]


def model_of(family: str, tiny_model) -> tuple[str, str]:
    """A tiny model, as words of a command."""
    sizes = ("--layers", str(LAYERS), "--topk", "3", "--tokenizer", "numbers", *FAMILIES.get(family, ()))
    return "--model.path", str(tiny_model(family.split()[0], *sizes))


@pytest.mark.parametrize("family", [*FAMILIES])
def test_families_on_one_process_and_on_two_tensor_parallel_ranks(family, config, tiny_model):
    """And broken in one operator of one layer, both drawn by lot."""
    of_model = model_of(family, tiny_model)
    found, _, sides = certify_and_keep(config, *of_model)
    of_layout = (*of_model, "--parallel.tensor", "2", "--parallel.expert_tensor", "1")
    again = (config, pickle.dumps(sides), of_layout)
    _, (status, _, on_two_ranks, _) = run_ranks(2, "breaks:certify_again", again)
    assert status == 0 and "tensor 2" in on_two_ranks["layout"]
    for one in (found, on_two_ranks):
        assert one["equal"] and [step["first"] for step in one["steps"]] == [None] * 8
        assert all(step["log_probs"]["rows"] > 50 and len(step["places"]) > LAYERS * 5 for step in one["steps"])
        assert not any(step["not_compared"] for step in one["steps"])
    for words, ranks in ((of_model, 1), (of_layout, 2)):
        check_broken(config, sides, *words, operators=np.random.default_rng().permutation([*BREAKS]), ranks=ranks)


def check_broken(config, sides: Sides, *words: str, operators: Sequence[str], ranks: int = 1) -> None:
    """The trainer sums in another order in one place, and the engine's numbers are those of the unbroken run.

    The layer is drawn by lot; of `operators` it is the first that this layer has.
    """
    layer = int(np.random.default_rng().integers(LAYERS))
    words = ("--prompts", str(PROMPTS), "--tokens", "24", *words)
    again = (config, pickle.dumps(sides), words, layer, tuple(operators))
    found = run_ranks(ranks, "breaks:certify_again", again) if ranks > 1 else [certify_again(*again)]
    status, operator, found, page = found[-1]
    assert status == 1
    assert not found["equal"]
    by_name = {step["name"]: step for step in found["steps"]}
    for name in ("trainer = prefill", "trainer = decode"):
        assert by_name[name]["first"] == {"layer": layer, "operator": operator}, by_name[name]["first"]
        assert by_name[name]["log_probs"]["rows"] > 50
    assert all(step["equal"] for name, step in by_name.items() if name.startswith("engine"))
    assert f"unequal, first '{operator}' of layer {layer}" in page


@pytest.mark.parametrize("operator", [name for name in BREAKS if name not in MLA])
def test_the_certificate_names_the_broken_operator_and_its_layer(operator, config, certified):
    check_broken(config, certified[2], operators=[operator])


def test_an_engine_that_is_not_batch_invariant_is_found(config, tiny_model, tmp_path, monkeypatch, capsys):
    """A plugin of the server sums in another order when it computes several rows; of a family drawn by lot."""
    family = str(np.random.default_rng().choice(["qwen3_moe", *FAMILIES]))
    (tmp_path / "breaks.py").write_text(PLUGIN)
    info = tmp_path / "breaks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbreaks = breaks:register\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found, _ = certify(config, *model_of(family, tiny_model), status=1)
    by_name = {step["name"]: step for step in found["steps"]}
    broken = {"layer": 1, "operator": "output projection"}
    for name in (
        "engine: decode alone = among others",
        "engine: decode = prefill",
        "trainer = prefill",
        "trainer = decode",
    ):
        assert by_name[name]["first"] == broken, (family, name, by_name[name]["first"])
    assert by_name["trainer: alone = among others"]["equal"]
    said = capsys.readouterr().out
    assert (
        "Not equal: engine: " in said and "Trainer and engine first differ at 'output projection' of layer 1." in said
    )


def test_without_identical_it_is_a_report(config, capsys):
    found, page = certify(
        config, "--precision.identical", "false", "--precision.train", "bf16", "--precision.rollout", "bf16", status=0
    )
    last = found["steps"][-1]
    assert not found["equal"] and last["first"]["operator"] in OPERATORS and last["log_probs"]["rows"] > 50
    assert "`precision.identical` is off, so this is only a report" in page
    assert f"first '{last['first']['operator']}' of layer {last['first']['layer']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--rollout.addresses", "[127.0.0.1:1]"), "rollout.addresses lists external servers"),
        (("--tokens", "1"), "at least 1 and 2"),
        (("--precision.rollout", "fp8"), "precision.rollout"),
    ],
)
def test_what_cannot_be_certified_is_refused(arguments, problem, config, capsys):
    assert main(["certify", str(config), *arguments]) == 2
    assert problem in capsys.readouterr().err
