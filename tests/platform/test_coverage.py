"""A release of Megatron-Core that speaks to the GPU in a new place must fail here, not in the middle of a run."""

from __future__ import annotations

import shutil

import pytest

from megatron_rl.platform.megatron.coverage import REVIEWED, megatron_root
from tests.platform.uncovered import uncovered, wrong_swaps


def test_every_place_of_the_installed_release_is_covered():
    places = uncovered(megatron_root())
    assert not places, "new places in Megatron-Core: add a rule, or explain them in coverage.py:\n" + "\n".join(
        f"  megatron/{p.path}:{p.line}: {p.what}" for p in places
    )


def test_every_swap_still_fits():
    assert wrong_swaps(megatron_root()) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("torch.cuda.brand_new_call()", "torch.cuda.brand_new_call has no counterpart"),
        ("from torch.cuda import brand_new", "torch.cuda.brand_new has no counterpart"),
        ("import torch.cuda as gpu", "import cuda"),
        ("from torch import cuda", "import cuda"),
        ("getattr(torch, 'cuda').synchronize()", "'cuda'"),
        ("if x.device.type == 'cuda': pass", "'cuda'"),
        ("if x.is_cuda: pass", ".is_cuda"),
        ("move = x.cuda", ".cuda"),
        ("th.cuda.synchronize()", ".cuda"),
        ("devices = ['cuda']", "'cuda'"),
        ("torch.device(f'cuda:{rank}')", "'cuda:'"),
        ("torch.device('cuda:0')", "'cuda:0'"),
        ("x.type().startswith('torch.cuda')", "'torch.cuda'"),
        ("torch.empty(3, pin_memory=pin)", "pin_memory="),
    ],
)
def test_a_new_place_is_found(tmp_path, source, what):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "new.py").write_text(f"import torch\n\n{source}\n")
    assert [(p.path, p.line, p.what) for p in uncovered(tmp_path)] == [("core/new.py", 3, what)]


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, device=torch.cuda.current_device())",
        "with torch.cuda.stream(torch.cuda.Stream()): pass",
        "from torch.cuda.nvtx import range_push",
        "torch.zeros(3, device='cuda').cuda(non_blocking=True)",
        "torch.device('cuda', torch.cuda.current_device())",
        "def f(device='cuda'): pass",
        "x.type() in ['torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor']",
        "torch.empty(3, pin_memory=True).pin_memory()",
        "x.record_stream(torch.cuda.current_stream())",
        "@torch.compile\ndef f(x): return x",
        "'''docs of torch.cuda and .cuda()'''",
    ],
)
def test_known_kinds_of_places_are_replaced(tmp_path, source):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "new.py").write_text(f"import torch\n{source}\n")
    assert uncovered(tmp_path) == []


def test_one_more_place_in_a_reviewed_file_is_found(tmp_path):
    path = "core/optimizer/optimizer.py"
    copy = tmp_path / path
    copy.parent.mkdir(parents=True)
    shutil.copy(megatron_root() / path, copy)
    assert uncovered(tmp_path) == []
    copy.write_text(copy.read_text() + "\n\ndef new(x):\n    return x.is_cuda\n")
    count = REVIEWED[path, ".is_cuda"][0]
    assert len(uncovered(tmp_path)) == count + 1
    assert all(p.what == ".is_cuda" for p in uncovered(tmp_path))


def test_a_swap_that_no_longer_fits_is_named(tmp_path):
    path = "core/transformer/moe/moe_utils.py"
    copy = tmp_path / path
    copy.parent.mkdir(parents=True)
    copy.write_text((megatron_root() / path).read_text().replace("tensor.is_cuda", "tensor.on_gpu"))
    assert any("`torch.is_tensor(tensor) and tensor.is_cuda` 0 times, not 1" in line for line in wrong_swaps(tmp_path))
