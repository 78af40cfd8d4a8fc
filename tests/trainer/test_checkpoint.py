"""Checkpoints: what they restore, on which layouts, from which formats, and what a save costs."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megatron_rl.errors import UserError
from megatron_rl.trainer.checkpoint import read_common
from megatron_rl.trainer.sharded_state import boxes


def draws_around_a_load(model: str, folder: str) -> tuple[list, list]:
    """What each generator gives after a save, and again after the load. Runs in a process of its own."""
    from megatron_rl.algorithms.sampling_support import SamplingSupport
    from megatron_rl.config.load import build_config
    from megatron_rl.distributed import parallel
    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.trainer import build_trainer

    from megatron.core import tensor_parallel  # isort: skip (after megatron_rl, which makes it importable without a GPU)

    def draw() -> list:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            forked = torch.rand(3).tolist()
        return [forked, torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]]  # noqa: NPY002

    config = build_config({"model": {"path": model}, "precision": {"train": "fp32"}})
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=1, support=SamplingSupport())
    draw()  # away from the seed
    path = checkpoint.save(Path(folder), 1, trainer, ranks, extra={}, keep=1)
    first = draw()
    checkpoint.load(path, trainer, ranks)
    return first, draw()


def test_random_states_are_restored(tiny_model, tmp_path):
    model = str(tiny_model("qwen3_moe", "--layers", "2"))
    [(first, again)] = run_ranks(1, f"{__name__}:draws_around_a_load", (model, str(tmp_path)))
    assert first == again
    assert len({str(part) for part in first}) == len(first)


@pytest.mark.parametrize("lacks", ["step", "world_size", "scheduler", "hooks", "extra"])
def test_an_older_checkpoint_is_refused_by_the_key_that_it_lacks(lacks, tmp_path):
    run = {"step": 1, "world_size": 1, "scheduler": {}, "hooks": {}, "extra": {}}
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (tmp_path / "metadata.json").write_text(json.dumps(backends))
    torch.save({"run": run}, tmp_path / "common.pt")
    assert read_common(tmp_path) == run
    del run[lacks]
    torch.save({"run": {**run, "predictor_updates": 0}}, tmp_path / "common.pt")
    with pytest.raises(UserError, match=rf"{tmp_path}: has no run\.{lacks}, .*checkpoint\.load"):
        read_common(tmp_path)


VOCABULARY = 301
MODEL = ("qwen3_moe", "--layers", "2", "--vocab", str(VOCABULARY))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    planner = _EmptyStateDictLoadPlanner()
    state: dict = {}
    with warnings.catch_warnings(action="ignore"):  # without torch.distributed it says that it reads alone
        _load_state_dict(state, storage_reader=FileSystemReader(str(folder)), planner=planner, no_dist=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def assert_same_tensors(first: Path, second: Path) -> None:
    expected, found = tensors_of(first), tensors_of(second)
    assert found.keys() == expected.keys() and len(found) > 20
    for name, value in expected.items():
        # A vocabulary has as many rows more as tensor parallelism needs.
        rows = slice(VOCABULARY if "word_embeddings" in name or "output_layer" in name else None)
        assert torch.equal(found[name][rows], value[rows]), name


def test_boxes_cover_each_element_once_and_in_order():
    for shape in [(), (1,), (4,), (2, 3), (3, 1, 2), (2, 3, 4), (2, 2, 2, 2)]:
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        for start in range(whole.size + 1):
            for end in range(start, whole.size + 1) if shape else [1]:
                found = []
                for first, offsets, sizes in boxes(shape, start, end):
                    box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                    assert first == box.reshape(-1)[0]
                    found += box.reshape(-1).tolist()
                assert found == list(range(start, end)) or not shape


@pytest.mark.parametrize(("layout", "processes"), [("data", 2), ("mixed", 2), ("pipeline", 2), ("data", 3)])
def test_a_checkpoint_is_what_megatron_would_save(layout, processes, tiny_model, tmp_path):
    """The same tensors, whole: those that either format holds are loaded by the other, checkpoints of before included."""
    experts = ("--experts", "6") if processes == 3 else ()
    layout = "one" if processes == 3 else layout
    model = str(tiny_model(*MODEL, *experts))
    run_ranks(processes, "checkpoint_ranks:as_megatron_saves_it", (model, layout, str(tmp_path)))
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours" / "step_000001")


def test_any_layout_loads_any_other(tiny_model, tmp_path):
    """Once round: written by Megatron's format, read and written under each layout, the same tensors at the end."""
    model = str(tiny_model(*MODEL))
    run_ranks(2, "checkpoint_ranks:as_megatron_saves_it", (model, "data", str(tmp_path)))
    first = path = tmp_path / "ours" / "step_000001"
    for layout, processes in (("tensor", 2), ("pipeline", 2), ("one", 1), ("one", 3), ("mixed", 2)):
        again = tmp_path / f"{layout}-{processes}"
        run_ranks(processes, "checkpoint_ranks:load_as", (model, layout, str(path), str(again)))
        path = again / "step_000001"
        assert_same_tensors(first, path)


@pytest.mark.parametrize(("layout", "processes"), [("one", 1), ("data", 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_save_makes_no_copy_of_the_state(layout, processes, precision, tiny_model, tmp_path):
    sizes = ("--hidden", "256", "--expert-intermediate", "192", "--vocab", "1024")
    arguments = (str(tiny_model("qwen3_moe", "--layers", "2", *sizes)), layout, precision, str(tmp_path))
    for made, largest, state in run_ranks(processes, "checkpoint_ranks:bytes_made_by_a_save", arguments):
        assert made <= largest < state / 10


def test_a_save_in_the_background(tiny_model, tmp_path):
    outcomes = run_ranks(2, "checkpoint_ranks:save_in_background", (str(tiny_model(*MODEL)), str(tmp_path)))
    for outcome in outcomes:
        assert not outcome["named before it is finished"]
        assert outcome["complete"] == outcome["after the failure"] == ["step_000001"]
        assert outcome["restored"], "what was saved is the state at the time of the save"
        assert outcome["failed"].endswith("older checkpoints are intact") and "\n" not in outcome["failed"]
        assert "checkpoint.timeout_s" in outcome["late"] and outcome["gave up"]


def test_checkpoints_of_frozen_weights(tiny_model, tmp_path):
    for outcome in run_ranks(2, "checkpoint_ranks:frozen_state", (str(tiny_model(*MODEL)), str(tmp_path))):
        refused, of_another = outcome.pop("refused"), outcome.pop("of another optimizer")
        assert (
            "has the optimizer state of adam (exp_avg, exp_avg_sq), and the config's optimizer is sgd (mom"
            in of_another
        )
        assert all(outcome.values()) and len(outcome) == 5, outcome
        assert (
            "model.freeze = ['decoder.layers.*', 'embedding.*', 'output_layer.*'], and the config says ['*.router.*']"
            in refused
        )
        assert "checkpoint.load" in refused and "\n" not in refused
