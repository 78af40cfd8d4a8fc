"""Simulated FP8 training: one linear layer against the definition, what is quantized, and all layouts against one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models.test_fp8 import e4m3_values
from ranks import run_ranks
from trainer.layouts import make_samples

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

RECIPES = ("fp8_blockwise", "fp8_tensorwise")
CASES = {
    "bf16": {"precision": {"train": "bf16"}},
    "bf16 again": {"precision": {"train": "bf16"}},
    "fp32": {"precision": {"train": "fp32"}},
    "fp8_blockwise": {"precision": {"train": "fp8_blockwise"}},
    "fp8_tensorwise": {"precision": {"train": "fp8_tensorwise"}},
    "recomputed": {"precision": {"train": "fp8_blockwise"}, "model": {"recompute": "full"}},
}
LAYOUTS = {
    "tensor": {"parallel": {"tensor": 2}},
    "expert": {"parallel": {"expert": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "tensor and expert": {"parallel": {"tensor": 2, "expert": 2}},
}


@pytest.fixture(scope="module")
def model(tiny_model) -> str:
    """Whose shards under tensor parallelism 2 are whole blocks of 128."""
    sizes = {"layers": 2, "experts": 4, "hidden": 256, "heads": 8, "kv-heads": 4, "head-dim": 64, "vocab": 300}
    sizes["expert-intermediate"] = 256
    return str(tiny_model("qwen3_moe", *[str(part) for k, v in sizes.items() for part in (f"--{k}", v)]))


@pytest.fixture(scope="module")
def samples() -> list:
    return make_samples(seed=5, count=6, vocab=300)


@pytest.fixture(scope="module")
def found(model, samples, tmp_path_factory) -> dict:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    [found] = run_ranks(1, "trainer.fp8_ranks:alone", (model, samples, list(CASES.values()), folder), timeout=280)
    return found


@pytest.fixture
def alone(found) -> dict:
    """Case -> what an update of one process gave."""
    return dict(zip(CASES, found["cases"], strict=True))


@pytest.fixture
def looked_at(found) -> dict:
    """PrecisionRecipe -> what its trainer looks like."""
    return found["recipes"]


def nearest_e4m3(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """fp64: x in blocks of rows x columns, each scaled so that its largest is 448, rounded to e4m3, scaled back.

    Ties, frequent among bf16 numbers, go to the even mantissa."""
    grid, out = e4m3_values(), torch.zeros(x.shape, dtype=torch.float64)
    middles = (grid[1:] + grid[:-1]) / 2
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].double()
            scale = block.abs().max() / 448
            scaled = (block.abs() / scale).float().double()
            index = torch.searchsorted(middles, scaled)
            tie = (index < len(middles)) & (middles[index.clamp(max=len(middles) - 1)] == scaled)
            index += (tie & (index % 2 == 1)).long()
            out[i : i + rows, j : j + columns] = grid[index] * block.sign() * scale
    return out


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_is_its_definition(recipe, looked_at):
    """Rounded input times rounded weight; the gradients are those of this product, straight through the rounding."""
    found = looked_at[recipe]["linear"]
    rows, columns = found["weight"].shape
    block = (128, 128) if recipe == "fp8_blockwise" else (rows, columns)
    x = nearest_e4m3(
        found["x"], 1 if recipe == "fp8_blockwise" else len(found["x"]), min(block[1], found["x"].shape[1])
    )
    weight = nearest_e4m3(found["weight"], *block)
    exact = {
        "out": x @ weight.T,
        "grad_x": found["grad"].double() @ weight,
        "grad_weight": found["grad"].double().T @ x,
    }
    plain = {
        "out": found["x"].double() @ found["weight"].double().T,
        "grad_x": found["grad"].double() @ found["weight"].double(),
        "grad_weight": found["grad"].double().T @ found["x"].double(),
    }
    for name, expected in exact.items():
        size = expected.norm()
        error = (found[name].double() - expected).norm() / size
        assert error < 0.01, (name, error)  # bf16 operands and results, and ties that fp32 decides otherwise than fp64
        assert (plain[name] - expected).norm() / size > 2.5 * error, name


def test_what_is_quantized(looked_at):
    """Linear layers of attention and experts; not router, embedding, output layer, norms. Nothing in bf16."""
    expected = {f"decoder.layers.{i}.mlp.experts" for i in range(2)}
    for i in range(2):
        expected |= {f"decoder.layers.{i}.self_attention.{name}" for name in ("linear_proj", "linear_qkv")}
        for e in range(4):
            expected |= {f"decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc{n}" for n in (1, 2)}
    for recipe in RECIPES:
        assert set(looked_at[recipe]["quantized"]) == expected
    assert looked_at["bf16"]["quantized"] == []


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16"])
def test_both_paths_of_the_experts_agree(recipe, looked_at):
    ours, megatrons = looked_at[recipe]["experts"]
    torch.testing.assert_close(ours, megatrons, rtol=0.03, atol=2e-3)


def test_checkpoints_and_exports_are_those_of_bf16(looked_at):
    for recipe in RECIPES:
        for kind in ("state", "sharded"):
            assert looked_at[recipe][kind] == looked_at["bf16"][kind]
        exported, plain = looked_at[recipe]["exported"], looked_at["bf16"]["exported"]
        assert exported.keys() == plain.keys()
        assert all(dtype == torch.bfloat16 for dtype, _ in exported.values())
        assert all(torch.equal(exported[name][1], tensor) for name, (_, tensor) in plain.items())
    assert looked_at["saved"]


def log_probs(result: dict) -> np.ndarray:
    return np.array([result["log_probs"][key] for key in sorted(result["log_probs"])])


def distance(a: dict, b: dict) -> float:
    return float(np.abs(log_probs(a) - log_probs(b)).mean())


def gradient_distance(a: dict, b: dict) -> float:
    """Of all gradients as one vector, relative."""
    squares = sum(float(((a["grads"][k] - b["grads"][k]) ** 2).sum()) for k in b["grads"])
    return (squares / sum(float((g**2).sum()) for g in b["grads"].values())) ** 0.5


def test_fp8_is_seen_and_bf16_is_not_touched(alone):
    assert np.array_equal(log_probs(alone["bf16"]), log_probs(alone["bf16 again"]))
    bf16 = distance(alone["bf16"], alone["fp32"])
    for recipe in RECIPES:
        assert distance(alone[recipe], alone["bf16"]) > 2 * bf16
        assert gradient_distance(alone["bf16"], alone["fp32"]) < gradient_distance(alone[recipe], alone["bf16"]) < 1


def test_recomputation_changes_nothing(alone):
    assert np.array_equal(log_probs(alone["recomputed"]), log_probs(alone["fp8_blockwise"]))
    assert gradient_distance(alone["recomputed"], alone["fp8_blockwise"]) < 1e-3


def test_layouts_agree_with_one_process(alone, model, samples):
    """Expert and pipeline parallelism change no sum. Tensor parallelism changes their order, as in bf16, and here and there
    a value then rounds to the neighbor in e4m3; its shards are whole blocks here (elsewhere a cut block has two scales)."""
    cases = [{**layout, "precision": {"train": "fp8_blockwise"}} for layout in LAYOUTS.values()]
    results, _ = run_ranks(2, "trainer.fp8_ranks:run", (model, samples, cases), timeout=280)
    one, effect = alone["fp8_blockwise"], distance(alone["fp8_blockwise"], alone["bf16"])
    for name, result in zip(LAYOUTS, results, strict=True):
        if "tensor" in name:
            assert distance(result, one) < 0.6 * effect, name
        else:
            assert np.array_equal(log_probs(result), log_probs(one)), name
            assert gradient_distance(result, one) < 0.02, name


def test_experts_and_whole_shards_have_scales_of_their_own():
    [(x, together, each, whole, shards)] = run_ranks(1, "trainer.fp8_ranks:scales", (), timeout=200)
    assert torch.equal(together, each)
    # e4m3 keeps four binary digits; the smallest numbers are multiples of 2^-9 times the scale, an expert's largest / 448.
    smallest = torch.cat([rows.abs().max().expand(len(rows), 1) for rows in (x[:4], x[4:])]) / 448 * 2**-9
    assert ((together - x).abs() <= 1.001 * torch.maximum(x.abs() / 16, smallest / 2)).all()
    assert torch.equal(whole, shards)


def test_delayed_scales_are_those_of_the_updates(found):
    """However often a model scores; the first pass makes scales and is not the one that counts."""
    delayed = found["delayed"]
    assert torch.equal(delayed["first passes"][0], delayed["first passes"][2])
    scale, amax = delayed["before 1"].T
    assert (scale != 1).all() and (amax == 0).all()
    assert torch.equal(delayed["before 1"], delayed["before 3"])
    assert not torch.equal(delayed["before 1"], delayed["after 1"])
    assert torch.equal(delayed["after 1"], delayed["after 3"])
    assert torch.equal(delayed["weights 1"], delayed["weights 3"])


def test_delayed_scales_are_in_a_checkpoint(found):
    """And Transformer Engine's pickles of them, which it refuses to load, are left alone."""
    delayed = found["delayed"]
    assert torch.equal(delayed["loaded"], delayed["after 1"])
    assert torch.equal(delayed["resumed"], delayed["went on"])
    assert (delayed["anew"] == 0).all() and (delayed["other layout"] == 0).all()
