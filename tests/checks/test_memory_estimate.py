"""`megatron-rl plan`: the arithmetic of memory, against figures computed by hand, and what it refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from models.test_sizes import MODELS

from megatron_rl.checks import memory_plan
from megatron_rl.checks.fit import check_fits, remedies
from megatron_rl.checks.memory_plan import ASLEEP, GB, Estimate, changed, estimate
from megatron_rl.cli import main
from megatron_rl.config import Config, OptimizerConfig, ServerConfig
from megatron_rl.config.load import load_config
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.config.plan import pipeline_bubble
from megatron_rl.config.route_cost import cache_cost
from megatron_rl.errors import UserError
from megatron_rl.models.shape import Shape

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "gpt-oss-20b": "gpt-oss-20b-gsm8k",
    "OLMoE-1B-7B": "olmoe-1b-7b",
    "Moonlight-16B-A3B": "moonlight-16b-a3b",
}


def recipe(model: str, **keys: object) -> Config:
    config = load_config(REPOSITORY / "configs" / f"{RECIPES[model]}.yaml")
    for key, value in keys.items():
        config = changed(config, key.replace("__", "."), value)
    return config


def plan(model: str, gpus: int, **keys: object) -> Estimate:
    return estimate(recipe(model, **keys), MODELS[model], gpus)


def state(found: Estimate) -> float:
    """Weights, gradients and optimizer, GB."""
    return sum(found.usage.kinds[kind] for kind in ("weights", "gradients", "optimizer")) / GB


@pytest.mark.parametrize(
    ("model", "gpus", "expert", "gigabytes"),
    [
        ("Qwen3-30B-A3B", 8, 8, 76.8),
        ("Qwen3-30B-A3B", 4, 4, 144.0),
        ("Qwen3-30B-A3B", 16, 8, 53.9),
        ("Qwen3-30B-A3B", 32, 8, 42.4),
        ("gpt-oss-20b", 8, 8, 56.5),
        ("gpt-oss-20b", 4, 4, 102.0),
        ("OLMoE-1B-7B", 1, 1, 124.5),
    ],
)
def test_weights_gradients_and_adam(model, gpus, expert, gigabytes):
    """2 + 4 + 12 bytes: weights and gradients of experts by expert parallelism, Adam by all copies."""
    found = plan(model, gpus, parallel__expert=expert, batch__prompts_per_step=32)
    assert state(found) == pytest.approx(gigabytes, abs=0.06 if gigabytes < 100 else 0.6)


def test_qwen3_on_one_node():
    """The issue's cross-check: 10.3 + 20.7 + 45.8 GB, and no 80 GB card has the rest."""
    found = plan("Qwen3-30B-A3B", 8)
    kinds = {kind: size / GB for kind, size in found.usage.kinds.items()}
    assert [round(kinds[kind], 1) for kind in ("weights", "gradients", "optimizer")] == [10.3, 20.7, 45.8]
    checkpoint = 18_432 * 2048 * 2 / GB  # one a layer, 3.6 in all, and the last norm's
    assert kinds["activations"] == pytest.approx(49 * checkpoint)
    assert kinds["logits"] == pytest.approx(2048 * 151_936 * 2 / GB)
    assert 4 < kinds["layer"] + kinds["dispatch"] < 9
    assert not found.fits(80 * GB) and found.usage.largest == "optimizer"
    assert plan("Qwen3-30B-A3B", 16).fits(80 * GB)
    with_reference = plan("Qwen3-30B-A3B", 8, algorithm__kl__coefficient=0.01)
    assert with_reference.usage.total - found.usage.total == pytest.approx(10.3 * GB, rel=0.01)


def test_a_save_and_a_push():
    found = plan("Qwen3-30B-A3B", 8)
    assert found.save["disk_bytes"] / GB == pytest.approx(427, abs=1)
    assert found.save["host_bytes_per_node"] == 8 * found.save["host_bytes"]
    assert found.save["host_bytes_per_node"] == pytest.approx(found.save["disk_bytes"], rel=1e-6)  # the node writes all
    offloaded = plan("Qwen3-30B-A3B", 8, optimizer__cpu_offload=1.0).save
    assert offloaded["host_bytes"] * 7 == pytest.approx(found.save["host_bytes"], rel=1e-6)
    assert found.push["bytes"] / GB == pytest.approx(61, abs=0.1)
    smallest = found.push["bytes"] / (256 * 2**20)
    assert smallest - 2 < found.push["buckets"] < 1.1 * smallest  # the two tables are buckets of their own
    half = plan("Qwen3-30B-A3B", 8, precision__rollout="fp8").push["bytes"]
    assert found.push["bytes"] / 2 < half < 0.53 * found.push["bytes"]


def test_features_are_those_of_the_papers_formula():
    """Beside the paper's router inputs and logits we keep the predictor's bias, 4 E bytes more; of the first update's
    responses, from which no predictor learns, no router inputs."""
    updates = 4
    found = plan("Qwen3-30B-A3B", 8, routing__source="pr2", batch__updates_per_step=updates)
    responses, cached = 64 * 8 // 8, 2048
    paper = cache_cost(48, 2048, 128, 8, 16_384, cached)
    assert found.usage.kinds["features"] == responses * (
        paper.feature_bytes + 4 * 128 * 48 * cached - 2 * 2048 * 48 * cached // updates
    )
    assert found.usage.kinds["predictors"] == 16 * 48 * 2048 * 128
    one_byte = cache_cost(48, 2048, 128, 8, responses * 18_431, 1, index_bytes=1).index_bytes
    assert found.usage.kinds["routes"] == 2 * one_byte  # recorded, and what it would have chosen without
    assert plan("Qwen3-30B-A3B", 8, batch__updates_per_step=1).usage.kinds.get("features") is None


LOWERED = [
    ("parallel.expert", 16, {"weights", "gradients"}),
    ("parallel.pipeline", 2, {"weights", "gradients"}),
    ("parallel.tensor", 2, {"activations", "logits"}),
    ("parallel.context", 2, {"activations"}),
    ("model.head_chunk_tokens", 1024, {"logits"}),
    ("routing.cached_tokens", 512, {"features"}),
    ("rollout.max_new_tokens", 512, {"features"}),
    ("batch.updates_per_step", 1, {"features", "routes"}),
]


@pytest.mark.parametrize(("key", "value", "lowered"), LOWERED, ids=[key for key, *_ in LOWERED])
def test_a_key_lowers_what_it_is_meant_to(key, value, lowered):
    before, after = (
        estimate(config, MODELS["Qwen3-30B-A3B"], 32).usage.kinds
        for config in (recipe("Qwen3-30B-A3B"), changed(recipe("Qwen3-30B-A3B"), key, value))
    )
    for kind in lowered:
        assert after.get(kind, 0) < 0.85 * before[kind], kind


def test_recomputation_orders_activations():
    """At 18,432 tokens: full < selective < none."""
    found = [plan("Moonlight-16B-A3B", 8, model__recompute=r).usage for r in ("full", "selective", "none")]
    assert found[0].kinds["activations"] < found[1].kinds["activations"] < found[2].kinds["activations"]
    assert found[0].total < found[1].total < found[2].total


def test_precision_and_an_optimizer_that_is_not_sharded():
    bf16, fp32, fp8, whole = (
        plan("OLMoE-1B-7B", 8, **keys).usage.kinds
        for keys in (
            {},
            {"precision__train": "fp32"},
            {"precision__train": "fp8_delayed"},
            {"parallel__distributed_optimizer": False},
        )
    )
    assert fp32["weights"] == 2 * bf16["weights"] and fp32["gradients"] == bf16["gradients"]
    assert fp32["optimizer"] * 3 == bf16["optimizer"] * 2
    assert fp8["weights"] == bf16["weights"] > fp8["fp8_weights"] > 0.8 * bf16["weights"]
    assert whole["optimizer"] == 6 * whole["weights"] > bf16["optimizer"]


@pytest.mark.parametrize(
    ("opt", "kind"),
    [
        (OptimizerConfig(), torch.optim.AdamW),
        (OptimizerConfig(name="sgd"), partial(torch.optim.SGD, momentum=0.9)),
        (OptimizerConfig(name="sgd", momentum=0.0), torch.optim.SGD),
    ],
)
def test_an_optimizer_keeps_what_its_entry_says(opt, kind):
    """As Megatron's optimizers stand in a table, and as torch's own keep it after a step."""
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(OptimizerConfig)["name"]))
    weight = torch.nn.Parameter(torch.randn(2, 3))
    weight.grad = torch.randn(2, 3)
    optimizer = kind([weight], lr=0.1)
    optimizer.step()
    kept = {name: found for name, found in optimizer.state[weight].items() if found is not None}
    entry = OPTIMIZERS[opt.name]
    assert kept.pop("step", None) is not None or not entry.counts_steps
    assert tuple(sorted(kept)) == tuple(sorted(entry.states(opt)))
    assert all(tensor.shape == weight.shape for tensor in kept.values())


def test_sgd_keeps_less():
    """4 bytes of momentum, and fp32 weights beside those in bf16; neither is sharded, and no saver is proposed."""
    whole = {"parallel__distributed_optimizer": False}
    adam, sgd, plain = (
        plan("OLMoE-1B-7B", 8, **whole, **keys)
        for keys in ({}, {"optimizer__name": "sgd"}, {"optimizer__name": "sgd", "optimizer__momentum": 0.0})
    )
    assert [12 * found.usage.kinds["optimizer"] for found in (sgd, plain)] == [
        bytes_ * adam.usage.kinds["optimizer"] for bytes_ in (8, 4)
    ]
    assert 14 * sgd.save["disk_bytes"] == 10 * adam.save["disk_bytes"]
    config = recipe("OLMoE-1B-7B", **whole, optimizer__name="sgd")
    proposed = {remedy.key for remedy in remedies(config, MODELS["OLMoE-1B-7B"], sgd, "optimizer")}
    assert not proposed & {"parallel.distributed_optimizer", "optimizer.cpu_offload"}


def test_savers_of_the_optimizer_and_gradients():
    """12 bytes a parameter become 0, 10 or 6; gradients 4 or 2, which a plain Adam makes fp32 again for its step."""
    plain, offloaded, aware, narrow, gradients, both = (
        plan("Qwen3-30B-A3B", 8, **keys).usage
        for keys in (
            {},
            {"optimizer__cpu_offload": 1.0},
            {"optimizer__precision_aware": True},
            {"optimizer__precision_aware": True, "optimizer__moments": "bf16"},
            {"precision__gradients": "bf16"},
            {"precision__gradients": "bf16", "optimizer__precision_aware": True},
        )
    )
    sizes = [usage.kinds.get("optimizer", 0) * 12 / plain.kinds["optimizer"] for usage in (offloaded, aware, narrow)]
    assert sizes == pytest.approx([0, 10, 6])
    assert gradients.kinds["gradients"] * 2 == plain.kinds["gradients"]
    assert gradients.kinds["optimizer_step"] * 3 == plain.kinds["optimizer"] and "optimizer_step" not in both.kinds


def test_a_critic_is_a_second_model_with_an_adam_of_its_own(tiny_model):
    """Of the policy's size but for the head, or of its own folder's; frozen weights have neither gradients nor an Adam."""
    one = {"parallel__expert": 1}
    plain = plan("OLMoE-1B-7B", 1, **one)
    of_ppo = {**one, "algorithm__advantage": "gae"}
    found = plan("OLMoE-1B-7B", 1, **of_ppo)
    head = (MODELS["OLMoE-1B-7B"].vocab_size - 1) * MODELS["OLMoE-1B-7B"].hidden_size
    state = sum(plain.usage.resident[kind] for kind in ("weights", "gradients", "optimizer"))
    assert plain.usage.resident["critic"] == 0 and found.usage.resident["critic"] == state - 18 * head
    assert found.usage.least == plain.usage.least + found.usage.resident["critic"]
    frozen = plan("OLMoE-1B-7B", 1, **of_ppo, critic__freeze=["embedding.*", "decoder.*"]).usage.resident["critic"]
    assert frozen == 2 * found.counts.total - 2 * head + 16 * MODELS["OLMoE-1B-7B"].hidden_size
    small = plan("OLMoE-1B-7B", 1, **of_ppo, critic__path=str(tiny_model("qwen3"))).usage.resident["critic"]
    assert 0 < small < 0.01 * state


def test_an_fp32_head_takes_more():
    bf16, fp32 = (plan("gpt-oss-20b", 8, precision__fp32_lm_head=on).usage.kinds for on in (False, True))
    assert fp32["logits"] == 2 * bf16["logits"]


def test_pipeline_stages_have_micro_batches_in_flight():
    """The first of four stages keeps four micro-batches, of a quarter of the layers each."""
    quarter, alone = (plan("Qwen3-30B-A3B", 32, parallel__pipeline=size) for size in (4, 1))
    ratio = quarter.usage.kinds["activations"] / alone.usage.kinds["activations"]
    assert quarter.usage.stage == 0 and 0.95 < ratio < 1


@pytest.mark.parametrize(
    ("stages", "virtual", "micro_batches"), [(4, 1, 8), (2, 1, 3), (4, 3, 8), (8, 2, 11), (1, 1, 7)]
)
def test_the_pipelines_bubble(stages, virtual, micro_batches):
    """A schedule in units of a virtual stage's forward and backward: the last stage begins p - 1 of them late."""
    rounds = -(-micro_batches // stages) * stages if virtual > 1 else micro_batches
    busy = rounds * virtual
    assert pipeline_bubble(stages, micro_batches, virtual) == pytest.approx(
        (stages - 1) / (busy + stages - 1), abs=1e-15
    )
    found = plan("Qwen3-30B-A3B", 8 * stages, parallel__pipeline=stages, parallel__virtual_pipeline=virtual)
    assert found.bubble == pipeline_bubble(stages, found.micro_batches, virtual)
    # 256 responses of at most 8,191 tokens on 8 ranks, in one update.
    recipes = recipe("Qwen3-30B-A3B")
    responses = recipes.batch.prompts_per_step * recipes.batch.samples_per_prompt // 8 // recipes.batch.updates_per_step
    longest = recipes.rollout.context_length - 1
    assert found.micro_batches == -(-responses * longest // max(recipes.batch.tokens_per_micro_batch, longest))


def test_four_stages_of_eight_micro_batches_wait_for_27_percent():
    assert pipeline_bubble(4, 8) == 3 / 11 and pipeline_bubble(4, 8, 2) == 3 / 19
    assert pipeline_bubble(4, 6, 2) == 3 / 19  # in rounds of four
    for kind, sequences in (("sft", 1), ("reward", 2), ("dpo", 2), ("train", 8)):
        sizes = {"batch__samples_per_prompt": 8, "batch__prompts_per_step": 32}
        config = recipe("OLMoE-1B-7B", parallel__pipeline=2, parallel__expert=1, **sizes)
        config = changed(changed(config, "rollout.context_length", 1025), "batch.tokens_per_micro_batch", 4096)
        found = estimate(config, MODELS["OLMoE-1B-7B"], 2, run=kind)
        updates = config.batch.updates_per_step if kind == "train" else 1
        assert found.micro_batches == 32 * sequences * 1024 // 4096 // updates
        assert found.bubble == 1 / (found.micro_batches + 1)


def test_vp2o_keeps_anchors():
    config = recipe("OLMoE-1B-7B")
    with_vp2o = changed(config, "vp2o", replace(config.vp2o, enabled=True, trust_region=0.1))
    kinds = estimate(with_vp2o, MODELS["OLMoE-1B-7B"], 8).usage.kinds
    of_layer = (3 * 4 + 2) * 64 * 2048 + 16 * 64**2 + 256 * (2 * 2048 + 4 * 64)
    assert kinds["anchors"] == 16 * of_layer and kinds["transform"] > 3 * 4 * 8 * 1024 * 2048


def test_an_engine_on_the_same_gpus():
    """Asleep it keeps ASLEEP; awake it has its share, or its weights beside the trainer's while they are pushed."""
    config = changed(recipe("Qwen3-30B-A3B"), "rollout.server", ServerConfig(tensor=2, memory_fraction=0.8))
    apart, shared = (
        estimate(changed(config, "rollout.colocate", c), MODELS["Qwen3-30B-A3B"], 16) for c in (False, True)
    )
    assert shared.usage.total - apart.usage.total == ASLEEP
    shape = Shape.from_config(MODELS["Qwen3-30B-A3B"])
    weights, config = shared.usage.kinds["weights"], changed(config, "rollout.colocate", True)

    def server_use(config: Config, shape: Shape, weights: int, memory: int) -> dict:
        sections = config.rollout, config.sync, config.precision.rollout
        return memory_plan.server_use(*sections, shape, weights, memory)

    found = server_use(config, shape, weights, 80 * GB)
    assert found["weights"] * 2 == shared.push["bytes"] and found["share"] == 64 * GB and found["fits"]
    assert not server_use(changed(config, "rollout.server.memory_fraction", 0.97), shape, weights, 80 * GB)["fits"]
    assert not server_use(config, shape, weights, 38 * GB)["fits"]  # 30.5 of its weights in a share of 30.4
    assert not server_use(config, shape, weights, 45 * GB)["fits"]  # 30.5 + 10.3 + 1.2 of buckets, and the reserve


def test_remedies_do_what_they_say():
    config, hf_config = recipe("Qwen3-30B-A3B"), MODELS["Qwen3-30B-A3B"]
    now = estimate(config, hf_config, 16)
    found = remedies(config, hf_config, now, now.usage.largest)
    assert {"gpus", "parallel.expert", "parallel.pipeline"} <= {remedy.key for remedy in found}
    for remedy in found:
        gpus, other = (
            (remedy.value, config) if remedy.key == "gpus" else (16, changed(config, remedy.key, remedy.value))
        )
        assert now.usage.total - estimate(other, hf_config, gpus).usage.total == remedy.saves > 0


def test_preflight_refuses_what_cannot_fit(caplog, monkeypatch):
    """By the bytes of the device, without one; what may fit is a warning."""
    monkeypatch.delenv("RANK", raising=False)
    config, hf_config = recipe("Qwen3-30B-A3B", parallel__expert=4), MODELS["Qwen3-30B-A3B"]
    message = (
        r"each of the 4 GPUs would need 144.0 GB \(weights 17.6, gradients 35.2, optimizer 91.6, predictors 0.2\) before "
        r".* has 85.0 GB; "
    )
    with pytest.raises(UserError, match=message.replace("144.0", r"14\d.\d")) as refusal:
        check_fits(config, hf_config, 4, 85 * GB)
    assert "\n" not in str(refusal.value)
    with caplog.at_level(logging.WARNING):
        check_fits(recipe("Qwen3-30B-A3B"), hf_config, 8, 85 * GB)
        assert "each of the 8 GPUs may need up to" in caplog.text
        caplog.clear()
        check_fits(recipe("Qwen3-30B-A3B"), hf_config, 16, 85 * GB)
        assert not caplog.text


def test_command_reads_a_config_json_alone(tmp_path, capsys):
    hf_config = MODELS["Qwen3-30B-A3B"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf_config.to_dict()))
    path = str(REPOSITORY / "configs" / "qwen3-30b-a3b.yaml")
    given = ["plan", path, "--gpus", "8", "--memory", "80", "--model.path", str(tmp_path / "model")]
    assert main([*given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"]["total"] == 30_532_122_624 and report["fits"] is False
    assert report["breaks_first"]["kind"] == "optimizer" and report["breaks_first"]["key"]
    kinds, phases = report["per_gpu"], report["phases"]
    temporary = {"activations", "layer", "dispatch", "logits", "head", "optimizer_step"}
    resident = sum(size for kind, size in kinds.items() if kind not in temporary | {"total"})
    assert kinds["total"] == resident + max(phases.values())
    assert report["save"]["host_bytes"] and report["push"]["buckets"]
    server = {
        "weights": report["push"]["bytes"],
        "share": 68 * GB,
        "cache": 68 * GB - report["push"]["bytes"],
        "fits": True,
    }
    assert report["server"] == server
    assert report["pipeline_bubble"] == 0 and report["micro_batches"] > 1
    staged = [*given, "--gpus", "32", "--parallel.pipeline", "4"]
    assert main([*staged, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pipeline_bubble"] == 3 / (report["micro_batches"] + 3)
    assert main(staged) == 0
    assert f"are idle for {report['pipeline_bubble']:.1%} of" in " ".join(capsys.readouterr().out.split())
    assert main(given) == 0
    text = capsys.readouterr().out
    assert (
        "pipeline" not in text
        and "does not fit" in text
        and "optimizer" in text
        and "28.99 B of them in experts" in text
    )
    assert main([*given, "--rollout.server.memory_fraction", "0.5"]) == 0
    assert "nothing for the key-value cache" in " ".join(capsys.readouterr().out.split())
    assert main([*given, "--memory", "192"]) == 0 and "does not fit" not in capsys.readouterr().out
    assert main(["plan", path, "--gpus", "8"]) == 2  # no model.path
    assert main([*given, "--gpus", "0"]) == 2 and "at least one" in capsys.readouterr().err


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="does not divide the 12 processes"):
        plan("Qwen3-30B-A3B", 12)


def test_the_reference_of_dpo_is_counted_where_it_stays():
    """The weights once more; the KL of RL is of no other command."""
    config = recipe("OLMoE-1B-7B", algorithm__kl__coefficient=0.1)
    early = changed(config, "dpo.precompute_reference", True)
    cases = (("train", config, 1), ("dpo", config, 1), ("dpo", early, 0), ("reward", config, 0), ("sft", config, 0))
    for run, one, size in cases:
        found = estimate(one, MODELS["OLMoE-1B-7B"], 8, run=run).usage.kinds
        assert found.get("reference", 0) == size * found["weights"], run
    now = estimate(config, MODELS["OLMoE-1B-7B"], 8, run="dpo")
    helps = {remedy.key: remedy for remedy in remedies(config, MODELS["OLMoE-1B-7B"], now, "reference", run="dpo")}
    assert helps["dpo.precompute_reference"].saves_of_kind == now.usage.kinds["reference"]
    assert "algorithm.kl.coefficient" not in helps
