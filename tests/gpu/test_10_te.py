"""Stage te: Transformer Engine's layers beside local ones, FP8 for real beside bf16 and beside its simulation, and the mismatch
of trainers and engines of every precision.

Seconds on a GPU, estimated: layers 30, FP8 log-probs 25, scales 6, resumed 15, slices of Qwen3 85, pairs with engines 140 (five
servers at once, then 19 replays, eight at a time), slices of gpt-oss 55, real widths 20, fifty updates 25, Adam 8, asleep 5:
415 in all. Without a GPU, in small: FP8 is simulated, and what needs Transformer Engine says so.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import WITHOUT_FLASH_ATTENTION_3, figures, run
from test_3_models import differences

from benchmarks import slices
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.models import fp8
from megatron_rl.models.experts import FakeQuantizer
from megatron_rl.models.families import expert_count
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.precision import TRAIN, this_machine, trainer_recipes
from megatron_rl.models.shape import engine_routes
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.model_pass import ModelPass
from megatron_rl.trainer.objective import LogProbs
from megatron_rl.trainer.trainer import Trainer, build_trainer
from tests.routing.replays import random_routes
from tests.trainer import layouts
from tools.make_tiny_model import FAMILIES, Sizes, make_tiny_model

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()
RECIPES = ("fp8_blockwise", "fp8_tensorwise", "fp8_delayed")
LAYERS = {"local": ("bf16", True), "te": ("bf16", False)} | {name: (name, False) for name in RECIPES}
"""(precision.train, whether the layers are local ones) by name."""
SIZES = Sizes(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, expert_intermediate=256)
"""Widths that FP8 products and blocks of 128 take."""
SAMPLES, VOCABULARY, SEED = 40, 64, 7


@pytest.fixture(autouse=True)
def leave_nothing():
    """Each trainer starts torch.distributed anew, and what it held is free for the next."""
    yield
    parallel.shutdown()
    if HAVE_TE:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
    traceback.clear_frames(getattr(sys, "last_traceback", None))  # those of a failure hold its trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def require(layers: str) -> tuple[str, bool]:
    """(precision, plain), where this machine has them or simulates them; else the test is skipped with the reason."""
    precision, plain = LAYERS[layers]
    if layers == "te" and not HAVE_TE:
        pytest.skip("needs Transformer Engine and a GPU")
    answer = trainer_recipes(this_machine())[precision]
    if answer.state == "cannot":
        pytest.skip(f"{precision} {answer.reason}")
    return precision, plain


@pytest.fixture(scope="module")
def models(tmp_path_factory, references_or_none) -> Callable[[str], Path]:
    """Folders by name: a tiny model of a family; `trained`, that of the stage engine; `slice-MODEL`, at real widths."""
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        if name.startswith("slice-"):
            config = slices.MODELS[name.removeprefix("slice-")](not torch.cuda.is_available())
            return slices.make_folder(config, folder / name)
        trained = references_or_none / "engine" / "qwen3_moe"
        if name == "trained" and (trained / "config.json").is_file():
            return trained
        sizes, tokenizer = (SIZES, "text")
        if name == "trained":  # not trained, as the references have none: enough to try the tests
            name, sizes, tokenizer = "qwen3_moe", Sizes(**vars(SIZES) | {"vocab": VOCABULARY}), "numbers"
        options = {"sizes": sizes, "tokenizer": tokenizer, "dtype": torch.bfloat16, "seed": SEED}
        return make_tiny_model(name, folder / f"{name}-{tokenizer}", **options)

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def references_or_none(request) -> Path:
    return Path(request.config.getoption("--references")).resolve()


def make_samples(folder: Path, *, routed: bool) -> list[Sequence]:
    """Random sequences. routed: with routes for every token, so that rounding sends none elsewhere."""
    samples = layouts.make_samples(SEED, SAMPLES, VOCABULARY)
    hf_config = read_hf_config(folder)
    if routed and expert_count(hf_config):
        shape, rng = engine_routes(hf_config).shape, np.random.default_rng(SEED)
        for sample in samples:
            sample.routes = random_routes(rng, shape, sample.inputs, missing=0.0)
    return samples


def tiny_config(folder: Path, precision: str, *, routed: bool = False, **sections: dict):
    routed = routed and bool(expert_count(read_hf_config(folder)))
    overrides = {"precision": {"train": precision}, "routing": {"source": "r3" if routed else "none"}}
    return layouts.make_config(str(folder), overrides | sections)


# -- what runs, and whether it is the same ------------------------------------------------------------------------------


def test_what_runs_here(record_property):
    if HAVE_TE:
        import transformer_engine.pytorch  # noqa: F401 (where it cannot be, this is its own error)
    answers = trainer_recipes(this_machine())
    record_property("recipes", {name: f"{answer.state} {answer.reason}".strip() for name, answer in answers.items()})
    if this_machine().gpu == (9, 0):
        assert answers["mxfp8"].state == "cannot" and "10.0" in answers["mxfp8"].reason
        if HAVE_TE:
            assert all(answers[name].state == "runs" for name in RECIPES)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_the_local_ones(family, models, record_property):
    """bf16, weights that are bf16 numbers, routes given: both forms are about as far from fp32.

    They round at the same places (norm, product, activation, product, sum), up to twice as often where one fuses two of them;
    errors of roundings add up as a root. So the bound is twice the local layers' distance, and 1 % of a tensor's gradient for
    what these have none of. A norm, bias or scale that is lost changes a tensor's gradient by about all of it.
    """
    folder = models(family)
    samples = make_samples(folder, routed=True)
    forms = {"fp32": ("fp32", True), "local": LAYERS["local"]} | ({"te": LAYERS["te"]} if HAVE_TE else {})
    found = {}
    for form, (precision, plain) in forms.items():
        # One update starts from what it finds: no token is near the border of a clip.
        config = tiny_config(folder, precision, routed=True, batch={"updates_per_step": 1})
        found[form] = layouts.run_layout(config, samples, updates=1, plain=plain)
        parallel.shutdown()
    off = {form: distance(found[form], found["fp32"]) for form in forms if form != "fp32"}
    record_property("distance", {form: {k: v for k, v in one.items() if k != "each"} for form, one in off.items()})
    assert off["local"]["log_probs"] < 0.05 and off["local"]["gradients"] < 0.1
    if not HAVE_TE:
        pytest.skip("needs Transformer Engine and a GPU")
    assert off["te"]["log_probs"] < 2 * off["local"]["log_probs"] + 1e-3
    assert off["te"]["gradients"] < 2 * off["local"]["gradients"] + 0.01
    for name, value in off["te"]["each"].items():
        assert value < 2 * off["local"]["each"][name] + 0.05, name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_fp32_is_no_tf32(family, references_or_none, record_property):
    """Beside Transformer Engine, whose products of fp32 are: as close to a CPU as in test_3_models.py, which has none of it."""
    stored = references_or_none / "models" / family / "reference.pt"
    if not stored.is_file():
        pytest.skip(f"no {stored}: python tests/gpu/references.py makes it")
    reference = torch.load(stored, weights_only=False)  # our own file, of plain arrays
    samples = [Sequence(**fields) for fields in reference["samples"]]
    found = layouts.run_layout(layouts.make_config(str(stored.parent / "model"), {}), samples)
    off = differences(found, reference)
    record_property("differences", {name: float(value) for name, value in off.items()})
    assert off["log_probs"] < 3e-5 and off["gradients"] < 1e-4


def distance(found: dict, exact: dict) -> dict[str, Any]:
    """Root mean square of the log-probs' errors, and the error of all gradients, and of each, by its norm."""
    logs = [found["log_probs"][key] - value for key, value in exact["log_probs"].items()]
    norm = {name: float(np.linalg.norm(g)) for name, g in exact["grads"].items()}
    error = {name: float(np.linalg.norm(found["grads"][name] - g)) for name, g in exact["grads"].items()}
    whole = math.hypot(*norm.values())
    # A tensor with next to no gradient has next to no digits.
    each = {name: error[name] / norm[name] for name in error if norm[name] > 1e-3 * whole}
    worst = max(each, key=lambda name: each[name])
    return {
        "log_probs": float(np.sqrt(np.mean(np.square(logs)))),
        "gradients": math.hypot(*error.values()) / whole,
        "worst": {worst: each[worst]},
        "each": each,
    }


# -- FP8 ---------------------------------------------------------------------------------------------------------------


def scorer(folder: Path, precision: str, *, plain: bool = False, routed: bool = False, tokens: int = 96) -> Trainer:
    config = tiny_config(folder, precision, routed=routed, batch={"tokens_per_micro_batch": tokens})
    ranks = parallel.initialize(config.parallel, config.seed)
    hooks = update_hooks(config)
    return build_trainer(config, ranks, total_updates=None, support=SamplingSupport(), hooks=hooks, plain=plain)


def scored(trainer: Trainer, samples: list[Sequence]) -> np.ndarray:
    """Log-probs of all labels, in order."""
    batches = trainer.pack(samples)
    found = {}
    for batch, values in zip(batches, trainer.compute_log_probs(batches), strict=True):
        rows, host = batch.mask.nonzero()[:, 0].tolist(), values.float().cpu()
        keys = [(batch.samples[int(batch.segments.ids[t])], int(batch.position_ids[0, t])) for t in rows]
        found |= dict(zip(keys, host[rows].tolist(), strict=True))
    return np.asarray([found[key] for key in sorted(found)])


def as_on_a_cpu(monkeypatch) -> None:
    """The simulation's arithmetic is the CPU's on a GPU too: modelopt would compile kernels of its own there."""
    from modelopt.torch.quantization import extensions

    monkeypatch.setattr(extensions.get_cuda_ext_fp8, "extension", None, raising=False)


def power_of_two_scales(quantizer: FakeQuantizer) -> FakeQuantizer:
    """Scales as those of Transformer Engine's blocks: the power of two below 448 / amax."""
    rounded = quantizer._e4m3

    def with_coarse_scale(blocks: torch.Tensor, amax: torch.Tensor, *rest: Any) -> torch.Tensor:
        coarse = 448 / torch.exp2(torch.floor(torch.log2(448 / amax.float())))
        return rounded(blocks, torch.where(amax > 0, coarse, amax.float()), *rest)

    quantizer._e4m3 = with_coarse_scale  # type: ignore[method-assign]
    return quantizer


def difference(values: np.ndarray, base: np.ndarray) -> dict[str, float]:
    d = values - base
    return {
        "rms": float(np.sqrt(np.mean(d**2))),
        "median": float(np.median(np.abs(d))),
        "largest": float(np.abs(d).max()),
        "mean": float(d.mean()),
    }


def fp8_beside(folder: Path, samples: list[Sequence], *, routed: bool, tokens: int, tell: Callable) -> None:
    """Log-probs of every recipe as it runs here and as it is simulated, less those of bf16 in the same layers."""

    def score(precision: str, *, plain: bool, quantizer: FakeQuantizer | None = None) -> np.ndarray:
        trainer = scorer(folder, precision, plain=plain, routed=routed, tokens=tokens)
        for chunk in trainer.chunks if quantizer else []:
            quantizer.attach(chunk)
        values = scored(trainer, samples)
        del trainer
        parallel.shutdown()
        gc.collect()
        return values

    local = score("bf16", plain=True)
    te = score("bf16", plain=False) if HAVE_TE else local
    real = {name: score(name, plain=False) for name in RECIPES if HAVE_TE}
    blocks = FakeQuantizer(128)
    simulated = {
        **{name: score(name, plain=True) for name in RECIPES if TRAIN[name].block is not None},
        "fp8_blockwise with powers of two": score("bf16", plain=True, quantizer=power_of_two_scales(blocks)),
    }
    size = {name: np.sqrt(np.mean((values - local) ** 2)) for name, values in simulated.items()}
    tell("tokens", len(local))
    tell("two forms of bf16", difference(te, local))
    tell("simulated", {name: difference(values, local) for name, values in simulated.items()})
    tell("real", {name: difference(values, te) for name, values in real.items()})
    correlations = {
        f"{a}, simulated as {b}": float(np.corrcoef(real[a] - te, simulated[b] - local)[0, 1])
        for a in real
        for b in simulated
        if a.startswith(b.split()[0]) or a == "fp8_delayed"
    }
    tell("correlation", correlations)
    floor = float(np.sqrt(np.mean((te - local) ** 2)))
    for name, values in {**simulated, **real}.items():
        assert np.isfinite(values).all(), name
        # e4m3 keeps 4 bits where bf16 has 8, of inputs and weights alike: further off than two forms of bf16 are, and not lost.
        assert not np.array_equal(values, local), name
        assert difference(values, te if name in real else local)["median"] < 1.0, name
    for name in real.keys() & simulated.keys():
        # The simulation leaves out nothing of the forward but the order of sums: the same error in kind, within a factor of 3.
        own = np.sqrt(np.mean((real[name] - te) ** 2))
        assert size[name] / 3 - floor < own < 3 * size[name] + floor, name


@pytest.mark.parametrize("routed", [True, False], ids=["routes given", "own routes"])
@pytest.mark.parametrize("name", ["trained", "gpt_oss", "deepseek_v3"])
def test_fp8_log_probs(name, routed, models, monkeypatch, record_property):
    as_on_a_cpu(monkeypatch)
    folder = models(name)
    samples = make_samples(folder, routed=routed)
    fp8_beside(folder, samples, routed=routed, tokens=96, tell=record_property)


def remembered(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Scales and amaxes of the forward and the backward, by module."""
    found = fp8.remembered(trainer.chunks)
    return {
        f"{module} {key} {what}": tensor
        for module, one in found.items()
        for key, state in one.items()
        if isinstance(state, dict)
        for what, tensor in state.items()
    }


def largest_difference(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> float:
    return max(
        float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a is not None and b is not None
    )


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    assert before.keys() == after.keys()
    return sum(not torch.equal(before[name], after[name]) for name in before)


def test_scoring_leaves_the_scales(models, record_property):
    """fp8_delayed: Transformer Engine's amaxes rise in passes that only score; the trainer puts them back."""
    precision, _ = require("fp8_delayed")
    folder = models("trained")
    samples = make_samples(folder, routed=False)
    config = tiny_config(folder, precision)
    trainer = layouts.make_trainer(config)
    batches = trainer.pack(samples)
    first = trainer.compute_log_probs(batches)
    before = remembered(trainer)
    scales = torch.cat([value for name, value in before.items() if name.endswith("scaling_fwd scale")])
    record_property("scales of the forward that are not 1", float((scales != 1).float().mean()))
    assert (scales != 1).float().mean() > 0.5  # the first pass has made them; outputs have none
    apart = largest_difference(first, trainer.compute_log_probs(batches))
    record_property("first and second pass", apart)
    assert apart < 1e-3  # that one is the first does not show; with scales of 1 it would be off by percents
    assert changed(before, remembered(trainer)) == 0
    layouts.update(trainer, batches)
    before = remembered(trainer)
    trainer.compute_log_probs(batches)
    assert changed(before, remembered(trainer)) == 0
    with fp8.amaxes_kept(trainer.chunks), torch.no_grad():  # inside, what Transformer Engine does by itself
        nobody: list[None] = [None] * len(batches)
        trainer.passes._forward_backward(
            ModelPass(trainer.model, trainer.chunks, batches, nobody, LogProbs(), trainer.support)
        )
        moved = changed(before, remembered(trainer))
    record_property("amaxes that a pass of Transformer Engine's moves", moved)
    assert moved > 0
    assert changed(before, remembered(trainer)) == 0


@pytest.mark.parametrize("layers", ["te", *RECIPES])
def test_a_resumed_trainer_goes_on(layers, models, tmp_path, record_property):
    """The next update is that of a trainer that never stopped, by rounding; scales and amaxes are the same to the bit.

    Local layers in bf16 load what it has saved, too.
    """
    precision, _ = require(layers)
    folder = models("trained")
    config = tiny_config(folder, precision)
    samples = make_samples(folder, routed=False)

    def update(trainer: Trainer) -> None:
        batches = trainer.pack(samples)
        layouts.score(trainer, batches)
        layouts.update(trainer, batches)

    def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
        return {name: tensor.float().cpu().clone() for name, tensor in trainer.export_weights()}

    trainer = layouts.make_trainer(config)
    update(trainer)
    path = checkpoint.save(tmp_path, 1, trainer, trainer.ranks, extra={}, keep=1)
    saved, scales = weights(trainer), remembered(trainer)
    assert bool(scales) == (layers == "fp8_delayed")
    update(trainer)
    went_on = weights(trainer)
    parallel_state.destroy_model_parallel()
    trainer = layouts.make_trainer(config)
    checkpoint.load(path, trainer, trainer.ranks)
    assert changed(scales, remembered(trainer)) == 0
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(trainer).items())
    update(trainer)
    again = weights(trainer)
    moved = sum(float((tensor - saved[name]).abs().sum()) for name, tensor in went_on.items())
    apart = sum(float((again[name] - tensor).abs().sum()) for name, tensor in went_on.items())
    record_property("apart, by what moved", apart / moved)
    # A GPU adds in another order each time, and an e4m3 that falls to the other side is 6 % of itself; Adam without its moments
    # would step twice as far where gradients turn, which is half of all.
    assert apart < 0.2 * moved
    parallel_state.destroy_model_parallel()
    local = layouts.make_trainer(tiny_config(folder, "bf16"), plain=True)
    checkpoint.load(path, local, local.ranks)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(local).items())


# -- speed -------------------------------------------------------------------------------------------------------------


def one_slice(name: str, layers: str, models: Callable[[str], Path], tell: Callable) -> None:
    precision, plain = require(layers)
    gpu = torch.cuda.is_available()
    hf_config, folder = slices.MODELS[name](not gpu), models(f"slice-{name}")
    config = slices.slice_config(folder, precision, tokens=slices.TOKENS if gpu else slices.TINY_TOKENS)
    start = time.perf_counter()
    found = slices.measure(config, hf_config, updates=4 if gpu else 2, plain=plain)
    tell("slice", found | {"layers_are": layers, "all_s": round(time.perf_counter() - start, 1)})
    assert all(math.isfinite(value) for value in found["grad_norm"]) and found["skipped"] == 0
    assert found["experts"] == (["TEGroupedMLP"] if HAVE_TE and not plain else ["GroupedExperts"])


@pytest.mark.parametrize("layers", LAYERS)
def test_a_slice_of_qwen3(layers, models, record_property):
    one_slice("qwen3", layers, models, record_property)


# -- mismatch with engines ---------------------------------------------------------------------------------------------

STEPS = 3
RECORDINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"precision.rollout": "fp8"},
    "fp8 cache": {"rollout.server.extra_args": ["--kv-cache-dtype", "fp8_e4m3"]},
    "bf16 pruned": {"pruning.enabled": True},
    "fp8 pruned": {"precision.rollout": "fp8", "pruning.enabled": True},
}
"""Overrides of the run that records an engine's rollouts, by name."""
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "R3": {"routing.source": "r3"},
    "TIS": {"correction.mode": "truncate", "correction.high": 2.0},
    "R3 and TIS": {"routing.source": "r3", "correction.mode": "truncate", "correction.high": 2.0},
}
"""Overrides of a run that trains from a record, by name."""
PAIRS = [
    *[("bf16", train, "") for train in ("bf16", *RECIPES)],
    *[("fp8", train, "") for train in ("fp8_blockwise", "bf16", "fp8_tensorwise")],
    *[("fp8 cache", train, "") for train in ("bf16", "fp8_blockwise")],
    *[(engine, train, "R3") for engine in ("fp8", "bf16") for train in ("fp8_blockwise", "bf16")],
    *[("fp8", "fp8_blockwise", variant) for variant in ("TIS", "R3 and TIS")],
    *[("bf16 pruned", train, "") for train in ("bf16", "fp8_blockwise")],
    *[("fp8 pruned", train, "") for train in ("bf16", "fp8_blockwise")],
]
"""(engine, trainer, variant): each trainer scores the same tokens with the same weights as every other of its engine."""
LOGGED = (
    "mismatch/*",
    "corrected/*",
    "pruning/*",
    "routing/agreement",
    "routing/engine_agreement",
    "update/grad_norm",
    "update/skipped",
    "entropy",
)


@dataclass
class Runs:
    """Runs of the program, each once, when they are first asked for."""

    folder: Path
    model: Path
    gpu: bool
    recorders: ThreadPoolExecutor
    trainers: ThreadPoolExecutor
    records: dict[str, Future] = field(default_factory=dict)
    pairs: dict[tuple[str, str, str], Future] = field(default_factory=dict)

    def common(self, steps: int) -> dict[str, Any]:
        sizes = {} if self.gpu else {"batch.prompts_per_step": 8, "batch.samples_per_prompt": 4}
        return sizes | {
            "steps": steps,
            "model.path": str(self.model),
            "eval.prompts": 0,
            "optimizer.lr": 1e-9,  # all steps, and all trainers, have the weights of the first
            "optimizer.warmup_steps": 0,
            "rollout.routes": True,
            "rollout.agreement_floor": None,
        }

    def start(self) -> None:
        """All of them, so that processes that wait do so side by side."""
        pairs = PAIRS if self.gpu else [pair for pair in PAIRS if pair[2] == "R3 and TIS"]
        for engine in dict.fromkeys(pair[0] for pair in pairs):
            self.records[engine] = self.recorders.submit(self._record, engine)
        for pair in pairs:
            self.pairs[pair] = self.trainers.submit(self._replay, *pair)

    def _record(self, engine: str) -> list[dict]:
        values = self.common(self.steps) | {"precision.train": "bf16", "precision.rollout": "bf16"} | RECORDINGS[engine]
        values |= {"rollout.record": True, "rollout.server.max_total_tokens": 65_536}
        if self.gpu:  # FlashAttention 3 and flashinfer are not on every machine
            flags = [*WITHOUT_FLASH_ATTENTION_3, *values.get("rollout.server.extra_args", [])]
            values |= {"rollout.colocate": True, "rollout.server.extra_args": flags}
        return run("train", self.folder / name_of(engine), "configs/quickstart.yaml", values, timeout=240)

    def _replay(self, engine: str, train: str, variant: str) -> list[dict]:
        self.records[engine].result(260)
        pruned = {key: value for key, value in RECORDINGS[engine].items() if key.startswith("pruning.")}
        values = self.common(self.steps) | pruned | VARIANTS[variant]
        record = str(self.folder / name_of(engine) / "rollouts")
        values |= {"precision.train": train, "precision.rollout": "bf16", "rollout.load": record}
        folder = self.folder / name_of(engine, train, variant)
        return run("train", folder, "configs/quickstart.yaml", values, timeout=150)

    @property
    def steps(self) -> int:
        return STEPS if self.gpu else 1


def name_of(*parts: str) -> str:
    return "-".join(part.replace(" ", "_") for part in parts if part)


@pytest.fixture(scope="module")
def engines(models, tmp_path_factory) -> Iterator[Runs]:
    from megatron_rl.errors import UserError
    from megatron_rl.servers.own_environment import find_python

    try:
        find_python()
    except UserError as error:
        pytest.skip(f"no engine: {error}")
    gpu = torch.cuda.is_available()
    with ThreadPoolExecutor(5 if gpu else 1) as recorders, ThreadPoolExecutor(8 if gpu else 1) as trainers:
        runs = Runs(tmp_path_factory.mktemp("engines"), models("trained"), gpu, recorders, trainers)
        runs.start()
        yield runs
        for pool in (trainers, recorders):
            pool.shutdown(wait=False, cancel_futures=True)


def logged(lines: list[dict]) -> dict[str, list]:
    return figures([line for line in lines if line["step"] > 0], LOGGED)


@pytest.mark.parametrize("engine", RECORDINGS)
def test_an_engine_is_recorded(engine, engines, record_property):
    if engine not in engines.records:
        pytest.skip("needs a GPU")
    lines = engines.records[engine].result(300)
    record_property("trainer in bf16", logged(lines))
    assert [line["step"] for line in lines if line["step"] > 0] == list(range(1, engines.steps + 1))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: name_of(*pair))
def test_mismatch(pair, engines, record_property):
    """Mismatch of each step, by classes of the token's probability."""
    if pair not in engines.pairs:
        pytest.skip("needs a GPU")
    lines = [line for line in engines.pairs[pair].result(300) if line["step"] > 0]
    record_property("steps", logged(lines))
    assert len(lines) == engines.steps
    for line in lines:
        assert math.isfinite(line["mismatch/kl"]) and line["update/skipped"] == 0
        assert line["mismatch/abs_median"] < 0.3  # the same model on both sides
        assert pair[1] == "fp32" or line["mismatch/abs_mean"] > 0


# -- more of each ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["local", "te", "fp8_blockwise"])
def test_a_slice_of_gpt_oss(layers, models, record_property):
    one_slice("gpt_oss", layers, models, record_property)


def test_fp8_log_probs_at_real_widths(models, monkeypatch, record_property):
    """A micro-batch of 18,432 random tokens, random weights, routes of its own."""
    as_on_a_cpu(monkeypatch)
    gpu = torch.cuda.is_available()
    folder, tokens = models("slice-qwen3"), slices.TOKENS if gpu else slices.TINY_TOKENS
    samples = slices.make_samples(tokens, read_hf_config(folder).vocab_size)
    fp8_beside(folder, samples, routed=False, tokens=tokens, tell=record_property)


@pytest.mark.parametrize("layers", LAYERS)
def test_fifty_updates(layers, models, record_property):
    """On one batch: every norm is finite, no step is left out, and the loss falls as it does in bf16."""
    precision, plain = require(layers)
    folder = models("trained")
    updates = 50 if torch.cuda.is_available() else 4
    trainer = layouts.make_trainer(tiny_config(folder, precision, optimizer={"lr": 1e-4}), plain=plain)
    batches = trainer.pack(make_samples(folder, routed=False))
    layouts.score(trainer, batches)
    logs = [layouts.update(trainer, batches) for _ in range(updates)]
    norms, losses = ([log[key] for log in logs] for key in ("update/grad_norm", "loss/policy"))
    record_property("grad_norm", [round(norm, 5) for norm in norms[::7]])
    record_property("loss", [round(loss, 5) for loss in losses[::7]])
    assert all(math.isfinite(value) for value in [*norms, *losses])
    assert not any(log["update/skipped"] for log in logs) and losses[-1] < losses[0]


def test_adam(record_property):
    """Megatron's Adam where Transformer Engine is, beside torch's: milliseconds, gigabytes beyond, and the definition."""
    if not HAVE_TE:
        pytest.skip("needs Transformer Engine and a GPU")
    from transformer_engine.pytorch.optimizers import FusedAdam

    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    kinds = {
        "Transformer Engine": lambda p: FusedAdam(p, adam_w_mode=True, **settings),
        "torch, fused": lambda p: torch.optim.AdamW(p, fused=True, **settings),
        "torch": lambda p: torch.optim.AdamW(p, **settings),
    }
    for name, make in kinds.items():
        small = [torch.nn.Parameter(torch.linspace(-1, 1, 1000, device="cuda"))]
        exact, m, v = small[0].detach().double(), 0.0, 0.0
        optimizer = make(small)
        for step in range(1, 4):
            gradient = torch.sin(torch.arange(1000.0, device="cuda") * step)
            small[0].grad = gradient.clone()
            optimizer.step()
            m, v = 0.9 * m + 0.1 * gradient.double(), 0.99 * v + 0.01 * gradient.double() ** 2
            change = (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
            exact = exact * (1 - 1e-3 * 0.1) - 1e-3 * change
        # Three steps of 1e-3, each exact to some roundings of fp32 in numbers up to 1.
        assert float((small[0].double() - exact).abs().max()) < 16 * 2**-24, name
        parameters = [torch.nn.Parameter(torch.randn(25_000_000, device="cuda")) for _ in range(20)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = make(parameters)
        optimizer.step()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(5):
            optimizer.step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 5
        beyond = torch.cuda.max_memory_allocated() - held
        record_property(name, {"ms": round(1e3 * seconds, 2), "gb_beyond": round(beyond / 1e9, 2)})
        del optimizer, parameters
        torch.cuda.empty_cache()


@pytest.mark.parametrize("layers", ["te", *RECIPES])
def test_a_trainer_that_sleeps_leaves_no_copies(layers, models, cuda, record_property):
    """Transformer Engine's FP8 copies of the weights go too, and are made anew: what is scored then is the same."""
    precision, _ = require(layers)
    folder = models("trained")
    trainer = layouts.make_trainer(tiny_config(folder, precision))
    batches = trainer.pack(make_samples(folder, routed=False))
    layouts.score(trainer, batches)
    layouts.update(trainer, batches)
    before = trainer.compute_log_probs(batches)
    awake = torch.cuda.memory_allocated()
    trainer.sleep()
    asleep = torch.cuda.memory_allocated()
    copies = sum(bool(getattr(m, "_fp8_workspaces", None)) for chunk in trainer.chunks for m in chunk.modules())
    trainer.wake()
    record_property("megabytes", {"awake": round(awake / 1e6, 2), "asleep": round(asleep / 1e6, 2)})
    assert copies == 0
    assert largest_difference(before, trainer.compute_log_probs(batches)) < 1e-3
