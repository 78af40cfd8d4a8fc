"""Stage models: tiny models of all families against what a CPU found in fp32 (tests/gpu/references.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_rl_plugin.fingerprint import fingerprint
from safetensors.torch import load_file

from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.models import families
from megatron_rl.ops import linear_log_probs
from megatron_rl.ops.masked_log_softmax import KeptTokens
from megatron_rl.sync.checksums import WeightsDigest
from megatron_rl.trainer import checkpoint
from tests.routing import replays
from tests.trainer import layouts
from tools.make_tiny_model import FAMILIES

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)

ROUTED = [family.model_type for family in families.FAMILIES.values() if family.moe]


@pytest.fixture(autouse=True)
def leave_no_groups():
    """Each trainer starts torch.distributed anew: every gloo group has threads of its own."""
    yield
    parallel.shutdown()


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, references: Path, device) -> dict:
    folder = references / "models" / request.param
    stored = torch.load(folder / "reference.pt", weights_only=False)  # our own file, of plain arrays
    samples = [Sequence(**fields) for fields in stored.pop("samples")]
    return stored | {"family": request.param, "model": str(folder / "model"), "samples": samples}


def differences(found: dict, reference: dict) -> dict[str, float]:
    """Largest of the log-probs; of each gradient relative to the largest entry of all; mean of the weights."""
    assert found["log_probs"].keys() == reference["log_probs"].keys()
    assert found["grads"].keys() == reference["grads"].keys() and found["weights"].keys() == reference["weights"].keys()
    pairs = [(found["log_probs"][key], theirs) for key, theirs in reference["log_probs"].items()]
    largest = max(np.abs(g).max() for g in reference["grads"].values())
    return {
        "log_probs": max(abs(a - b) for a, b in pairs),
        "gradients": max(np.abs(found["grads"][n] - g).max() for n, g in reference["grads"].items()) / largest,
        "weights": max(np.abs(found["weights"][n] - w).mean() for n, w in reference["weights"].items()),
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_log_probs_and_gradients(reference, recompute, record_property):
    """fp32, as tests/trainer/test_parity.py compares layouts: sums in another order, so some 1e-6 of values of about 10."""
    config = layouts.make_config(reference["model"], {"model": {"recompute": recompute}})
    found = differences(layouts.run_layout(config, reference["samples"]), reference)
    record_property("differences", {name: float(value) for name, value in found.items()})
    assert found["log_probs"] < 3e-5
    assert found["gradients"] < 1e-4
    assert found["weights"] < 5e-5


def test_bf16_is_near(reference, record_property):
    """The flash attention and the bf16 kernels: as far from fp32 as a CPU's bf16 is, which is some percent of a nat."""
    config = layouts.make_config(reference["model"], {"precision": {"train": "bf16"}})
    found = layouts.run_layout(config, reference["samples"], updates=1, whole=False)
    off = np.asarray([abs(found["log_probs"][key] - value) for key, value in reference["log_probs"].items()])
    record_property("median", float(np.median(off)))
    record_property("largest", float(off.max()))
    # Routes that flip move single tokens by much; logits of about 5 are 1/64 apart on either side of the rounding.
    assert np.median(off) < 0.05


@pytest.mark.parametrize("source", ["r2", "r3"])
@pytest.mark.parametrize("family", ROUTED)
def test_replay_is_exact(family, source, references, device):
    """Random routes for each token and layer: the update starts from exactly the log-probs that were scored."""
    model = str(references / "models" / family / "model")
    trainer = replays.make_trainer(replays.make_config(model, {}, source))
    samples = replays.make_samples(3, 12, 64, replays.shape_of(trainer.model.hf_config))
    found = replays.replay(trainer, samples, source, [])
    assert found["compared"] > 0 and found["identical"]


def test_save_and_resume(reference, tmp_path, device):
    """Parameters, moments and the next update are those of a run that never stopped."""
    config = layouts.make_config(reference["model"], {})

    def update(trainer) -> None:
        batches = trainer.pack(reference["samples"])
        layouts.score(trainer, batches)
        layouts.update(trainer, batches)

    def weights(trainer) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in trainer.export_weights()}

    trainer = layouts.make_trainer(config)
    update(trainer)
    path = checkpoint.save(tmp_path, 1, trainer, trainer.ranks, extra={}, keep=1)
    saved = weights(trainer)
    update(trainer)
    went_on = weights(trainer)
    parallel_state.destroy_model_parallel()

    trainer = layouts.make_trainer(config)
    assert checkpoint.load(path, trainer, trainer.ranks)["step"] == 1
    resumed = weights(trainer)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in saved.items())
    update(trainer)
    again = weights(trainer)
    for name, tensor in went_on.items():
        moved = (tensor - saved[name]).abs().max()
        # A GPU adds in an order that differs from run to run: an update differs by its rounding, not by its size.
        assert float((again[name] - tensor).abs().max()) <= 1e-3 * float(moved) + 1e-7, name


def test_a_trainer_that_sleeps_leaves_the_gpu(reference, cuda, record_property):
    """Gradients, optimizer and weights go to the host and come back as they were, and so does the memory."""
    trainer = layouts.make_trainer(layouts.make_config(reference["model"], {}))
    batches = trainer.pack(reference["samples"])
    layouts.score(trainer, batches)
    layouts.update(trainer, batches)  # makes the optimizer's moments
    del batches
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    kept = sum(tensor.nbytes for tensor in before.values())
    awake = torch.cuda.memory_allocated()
    trainer.sleep()
    asleep = torch.cuda.memory_allocated()
    trainer.wake()
    record_property(
        "megabytes", {"awake": awake / 1e6, "asleep": asleep / 1e6, "back": torch.cuda.memory_allocated() / 1e6}
    )
    # Weights, fp32 gradients and two moments are four times the weights; buffers without gradients may stay.
    assert awake - asleep > 3.5 * kept
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights())


def test_exported_weights_are_the_folders(reference, device):
    """Through Megatron and back, to the bit; and the digest of a push is the same on either device."""
    trainer = layouts.make_trainer(layouts.make_config(reference["model"], {}))
    stored = load_file(Path(reference["model"]) / "model.safetensors")
    digests = [WeightsDigest(torch.bfloat16), WeightsDigest(torch.bfloat16)]
    exported = {name: tensor.cpu() for name, tensor in digests[0].watch(trainer.export_weights())}
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    for _ in digests[1].watch(stored.items()):
        pass
    assert str(digests[0]) == str(digests[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 3), (64, 2880), (3, 17, 129), (70_000, 33)])
def test_fingerprints_are_those_of_a_cpu(dtype, shape, device):
    tensor = torch.randn(shape).mul(100).to(dtype)
    assert fingerprint(tensor.to(device)) == fingerprint(tensor)


def test_samples_with_kept_sets(references, device):
    """Top-p's kept tokens on the device: pruned and truncated log-probs against the CPU's own operator."""
    hidden, weight = torch.randn(20, 32), torch.randn(500, 32)
    sets = [torch.randperm(500)[: 3 + i].sort().values for i in range(20)]
    kept = KeptTokens.of(torch.cat(sets), torch.tensor([0, *(len(s) for s in sets)]).cumsum(0))
    targets = torch.stack([s[1] for s in sets])
    here = linear_log_probs(hidden, weight, targets, log_rho=None, kept=kept, chunk_tokens=6)
    moved = (hidden.to(device), weight.to(device), targets.to(device))
    there = linear_log_probs(*moved, log_rho=None, kept=kept.to(device), chunk_tokens=6)
    torch.testing.assert_close(there.log_probs.cpu(), here.log_probs, atol=2e-5, rtol=1e-5)
