"""Which flash attention is called on CUDA: what is found, taken and refused, and how FlashAttention 4 is called."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.ops import flash, flash_attention_4, sink_attention_torch
from megatron_rl.ops.flash import Heads
from megatron_rl.ops.sink_attention import PackedSequences, sink_attention_reference

REAL = importlib.util.find_spec("flash_attn") is not None
HOPPER, BLACKWELL, AMPERE, LATER = (9, 0), (10, 0), (8, 0), (12, 0)
QWEN3, GPT_OSS, MLA = Heads(128, 128, grouped=True), Heads(64, 64, grouped=True), Heads(192, 128, grouped=False)


@pytest.fixture
def flash_attention_4_source(tmp_path, monkeypatch):
    """A module where FlashAttention 4 is looked for; returns its file."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text("def _flash_attn_fwd(): ...\ndef _flash_attn_bwd(): ...\n")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("flash_attn")}
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    flash._is_there.cache_clear()
    yield package / "interface.py"
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]
    sys.modules.update(kept)
    flash._is_there.cache_clear()


def test_torchs_own_is_always_there():
    assert flash.installed()[0] == "torch"
    assert flash.activate("torch", None) == flash.activate("torch", HOPPER) == flash.activate("auto", AMPERE) == "torch"


def test_what_is_not_installed_is_refused():
    with pytest.raises(ValueError, match=r"FA3 is not installed \(no module flash_attn_interface\); installed: torch"):
        flash.activate("FA3", HOPPER)


def test_what_is_installed_is_found_and_taken(flash_attention_4_source):
    assert flash.installed() == ["torch", "FA4"]
    assert [flash.activate("auto", gpu) for gpu in (HOPPER, BLACKWELL, AMPERE, LATER, None)] == [
        *("FA4", "FA4", "torch", "torch", "torch")
    ]
    assert flash.activate("FA4", HOPPER) == flash.activate("FA4", None) == "FA4"
    with pytest.raises(ValueError, match=r"FA4 runs on compute capabilities 9\.x and 10\.x, this GPU has 8\.0"):
        flash.activate("FA4", AMPERE)


@pytest.mark.parametrize(
    ("heads", "capability", "takes"),
    [
        (QWEN3, HOPPER, True),
        (GPT_OSS, BLACKWELL, True),
        (MLA, HOPPER, True),
        (MLA, BLACKWELL, True),
        (Heads(192, 128, grouped=True), HOPPER, False),  # its backward wants one width where key heads are shared
        (Heads(256, 256, grouped=True), HOPPER, True),
        (Heads(256, 256, grouped=True), BLACKWELL, False),
        (Heads(192, 192, grouped=False), BLACKWELL, False),
        (Heads(264, 264, grouped=False), HOPPER, False),
        (Heads(60, 60, grouped=False), HOPPER, False),
        (Heads(64, 60, grouped=False), HOPPER, False),
        (Heads(64, 128, grouped=False), HOPPER, False),
        (QWEN3, AMPERE, False),
        (QWEN3, (11, 0), False),
        (QWEN3, LATER, False),
    ],
)
def test_flash_attention_4_computes_what_it_takes_and_torchs_the_rest(
    heads, capability, takes, flash_attention_4_source
):
    bf16 = torch.bfloat16
    assert flash.takes("FA4", bf16, heads, capability) is takes
    otherwise = "torch" if flash.takes("torch", bf16, heads, capability) else None
    for asked in ("auto", "FA4"):
        assert flash.choose(asked, bf16, heads, capability) == ("FA4" if takes else otherwise)
        assert flash.choose(asked, torch.float32, heads, capability) is None
    assert flash.choose("torch", bf16, heads, capability) == flash.choose("FA3", bf16, heads, capability) == otherwise


def test_torchs_is_taken_where_flash_attention_4_is_not_installed(monkeypatch):
    monkeypatch.setattr(flash, "_is_there", lambda name: False)
    assert flash.choose("auto", torch.bfloat16, QWEN3, HOPPER) == "torch"


def test_a_broken_one_is_named(flash_attention_4_source):
    flash_attention_4_source.write_text("raise RuntimeError('no such arch')\n")
    for asked in ("auto", "FA4"):
        with pytest.raises(ValueError, match="FA4 cannot be used: RuntimeError: no such arch"):
            flash.activate(asked, HOPPER)
    assert flash.activate("auto", None) == flash.activate("torch", HOPPER) == "torch"  # where it is not needed


def test_one_whose_own_packages_are_missing_is_broken_and_not_absent(flash_attention_4_source):
    flash_attention_4_source.with_name("__init__.py").write_text("import a_package_that_is_missing\n")
    with pytest.raises(ValueError, match="FA4 cannot be used: ModuleNotFoundError: .*a_package_that_is_missing"):
        flash.activate("auto", HOPPER)


@pytest.mark.parametrize(("asked", "kernels"), [("auto", flash_attention_4), ("torch", sink_attention_torch)])
def test_the_kernels_of_the_choice_are_called(asked, kernels, flash_attention_4_source, monkeypatch):
    module = sys.modules["megatron_rl.ops.sink_attention"]
    monkeypatch.setattr(module, "compiled", SimpleNamespace(cuda=False))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: HOPPER)
    sequences = PackedSequences.of(torch.tensor([0, 5, 9]), torch.device("cpu"))
    q, v = (SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda", shape=(9, h, 64)) for h in (8, 2))
    forward, backward, borders = module._kernels(q, v, sequences, sequences, asked)
    assert (forward, backward) == (kernels.flash_forward, kernels.flash_backward)
    assert borders == (sequences.on_device, sequences.on_device, 5, 5)


class StandIn:
    """FlashAttention 4's two functions by what they say of themselves, in fp64; `calls`: the options of each."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def _scores(self, q, k, options):
        """exp of scores and sink, [H, Tq, Tk + 1], zero where hidden: causal from each sequence's last query, windowed."""
        assert options["causal"] and options["max_seqlen_q"] >= options["cu_seqlens_q"].diff().max()
        borders = [options[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k")]
        of = [torch.bucketize(torch.arange(len(x)), c[1:], right=True) for x, c in zip((q, k), borders, strict=True)]
        ends = [c[1:][s] - torch.arange(len(s)) for s, c in zip(of, borders, strict=True)]  # to its sequence's end
        ahead = ends[0][:, None] - ends[1][None]  # how far the key lies ahead of the query
        seen = (of[0][:, None] == of[1][None]) & (ahead <= 0)
        if options["window_size_left"] is not None:
            assert options["window_size_right"] == 0
            seen &= ahead >= -options["window_size_left"]
        keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * options["softmax_scale"]
        sinks = options["learnable_sink"]
        assert sinks is None or (sinks.dtype == torch.float32 and not sinks.requires_grad)  # which DLPack refuses
        sinks = q.new_full((q.shape[1],), -torch.inf) if sinks is None else sinks
        return torch.cat([scores.exp() * seen, sinks.double().exp()[:, None, None].expand(-1, len(q), 1)], -1)

    def _flash_attn_fwd(self, q, k, v, *, return_lse, **options):
        self.calls.append(options)
        terms = self._scores(q, k, options)
        values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = torch.einsum("hij,jhd->ihd", terms[..., :-1] / terms.sum(-1, keepdim=True), values)
        return out.to(q.dtype), terms.sum(-1).log().float(), None, None, None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, deterministic, **options):
        self.calls.append(options | {"deterministic": deterministic})
        groups, grad = q.shape[1] // k.shape[1], dout.double()
        shares = self._scores(q, k, options) * torch.exp(-lse.double())[..., None]
        keys, values = (x.double().repeat_interleave(groups, 1) for x in (k, v))
        delta = (grad * out.double()).sum(-1).t()
        inner = (torch.einsum("ihd,jhd->hij", grad, values) - delta[..., None]) * shares[..., :-1]
        inner = inner * options["softmax_scale"]
        grad_v = torch.einsum("hij,ihd->jhd", shares[..., :-1], grad)
        grad_k = torch.einsum("hij,ihd->jhd", inner, q.double())
        grad_k, grad_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (grad_k, grad_v))
        grads = [x.to(q.dtype) for x in (torch.einsum("hij,jhd->ihd", inner, keys), grad_k, grad_v)]
        return (*grads, -(shares[..., -1] * delta).sum(1).float())[: 3 if options["learnable_sink"] is None else 4]


@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize(("window", "key_lengths"), [(0, None), (4, None), (0, (20, 0, 3, 7)), (3, (20, 0, 3, 7))])
def test_the_arithmetic_around_flash_attention_4_with_a_stand_in_for_it(with_sinks, window, key_lengths, monkeypatch):
    """Arguments by name, what is saved in between, the sinks' gradient. The kernels themselves need a GPU."""
    stand_in, lengths = StandIn(), (17, 0, 1, 5)
    monkeypatch.setattr(flash_attention_4, "_interface", lambda: stand_in)
    module = sys.modules["megatron_rl.ops.sink_attention"]

    def kernels(q, v, sequences, key_sequences, asked):
        both = (sequences, key_sequences)
        borders = (*(s.on_device for s in both), *(s.max_length for s in both))
        return flash_attention_4.flash_forward, flash_attention_4.flash_backward, borders

    monkeypatch.setattr(module, "_kernels", kernels)
    cu, cu_k = (torch.tensor([0, *x]).cumsum(0) for x in (lengths, key_lengths or lengths))
    tokens = [int(cu[-1]), int(cu_k[-1]), int(cu_k[-1])]
    exact = [torch.randn(t, h, 16, dtype=torch.float64) for t, h in zip(tokens, (4, 2, 2), strict=True)]
    exact += [2 * torch.randn(4, dtype=torch.float64)] if with_sinks else []
    leaves = [x.clone().requires_grad_() for x in exact]
    found_leaves = [x.float().requires_grad_() for x in exact]
    borders = {"cu_seqlens": cu, "cu_seqlens_k": cu_k if key_lengths else None, "window": window or None, "scale": 0.3}
    none = [] if with_sinks else [None]
    out = module.sink_attention(*found_leaves, *none, **borders)
    direction = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, found_leaves, direction, retain_graph=True)]
    expected = sink_attention_reference(*leaves, *none, **borders)
    right = [expected, *torch.autograd.grad(expected, leaves, direction.double())]
    for ours, theirs in zip(found, right, strict=True):
        # Inputs rounded to fp32, and the log-sum kept in it: 2^-24 times scores of about 5 and sums of 20 terms.
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-5)
    forward, backward = stand_in.calls
    sinks = [call.pop("learnable_sink") for call in (forward, backward)]
    assert torch.equal(*sinks) if with_sinks else sinks == [None, None]
    assert backward == forward | {"deterministic": False}
    assert forward["cu_seqlens_q"].dtype == torch.int32
    assert forward["max_seqlen_q"] == forward["max_seqlen_k"] == flash_attention_4.LONG
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(out, found_leaves, direction)
    finally:
        torch.use_deterministic_algorithms(False)
    assert stand_in.calls[-1]["deterministic"]


def test_bounds_of_long_sequences_are_their_lengths():
    options = flash_attention_4._options(torch.empty(0), torch.empty(0), 600, 700, 0, 1.0, None)
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (600, 700)


@pytest.mark.skipif(not REAL, reason="needs flash-attn-4")
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_its_kernels_compile_without_a_gpu(architecture, tmp_path):
    """Our call on fake tensors, through the package's own code, to the machine code of another machine's GPU."""
    child = Path(__file__).with_name("compile_flash_attention_4.py")
    environment = os.environ | {"PYTHONPATH": str(child.parents[2])}
    done = subprocess.run(
        [sys.executable, str(child), architecture], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for case in json.loads(done.stdout.splitlines()[-1]):
        assert case["chosen"] == "FA4" and case["shapes"] == case["expected"], case
