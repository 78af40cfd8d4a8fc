"""activate() in fresh processes: what it changes, what it must not, and its bytecode cache."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks import run_ranks

from tests.preloaded import PYTHON_WITH_PACKAGES

REPOSITORY = Path(__file__).resolve().parents[2]


def run(source: str, *, timeout: float = 240) -> str:
    """stdout of a fresh Python; its stderr must be empty."""
    call = [PYTHON_WITH_PACKAGES, "-c", textwrap.dedent(source)]
    done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


WITH_TE = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch.py": ""}
"""Enough for the question whether it can be imported."""


def put(folder: Path, files: dict[str, str]) -> str:
    """Write modules; the lines that put them on the path and let torch say that it has a GPU."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return f"import sys; sys.path.insert(0, {str(folder)!r})\nimport torch\ntorch.cuda.is_available = lambda: True\n"


def test_nothing_changes_with_a_gpu_and_transformer_engine(tmp_path):
    state = """
import logging, sys, warnings
import transformer_engine.pytorch
def state():
    loggers = logging.root.manager.loggerDict
    filters = {n: list(l.filters) for n, l in loggers.items() if hasattr(l, "filters")}
    return list(sys.meta_path), list(warnings.filters), vars(torch.cuda).copy(), filters
before = state()
from megatron_rl.platform import activate
assert activate() == frozenset()
assert state() == before
assert "megatron_rl.platform.megatron" not in sys.modules
print("same")
"""
    assert run(put(tmp_path, WITH_TE) + state) == "same"


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({}, {"Transformer Engine", "fused Adam"}),
        ({"apex/__init__.py": "", "apex/views.py": ""}, {"Transformer Engine", "fused Adam"}),  # PyPI's, a web toolkit
        ({"apex/__init__.py": "", "apex/optimizers.py": "", "amp_C.py": ""}, {"Transformer Engine"}),
        (WITH_TE, set()),
        (WITH_TE | {"apex/__init__.py": "", "apex/optimizers.py": ""}, set()),
    ],
)
def test_with_a_gpu_the_missing_packages_decide(tmp_path, files, missing):
    ask = "from megatron_rl.platform import activate\nprint(sorted(activate()), 'sglang_on_cpu.matmul' in sys.modules)"
    assert run(put(tmp_path, files) + ask) == f"{sorted(missing)} False"


@pytest.fixture(scope="module")
def with_a_gpu() -> list[str]:
    """Lines of a process on a GPU machine without Transformer Engine, where neither is here: torch says that there is a GPU, so
    that nothing of the platform stands in for one."""
    return run(
        """
        import importlib, logging, pkgutil, warnings
        logging.disable()
        warnings.simplefilter("ignore")
        import torch
        torch.cuda.is_available = lambda: True
        import megatron_rl
        found = [m.name for m in pkgutil.walk_packages(megatron_rl.__path__, "megatron_rl.")]
        names = [n for n in found if not n.endswith("__main__")]
        for name in names:
            importlib.import_module(name)
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron_rl.platform import activate
        print(HAVE_TE, sorted(activate()))
        print(len(names))

        from types import SimpleNamespace as Object
        import megatron.bridge.peft.lora_layers, sys
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        parameter = torch.nn.Parameter(torch.ones(3))
        adam = torch.optim.Adam([parameter])
        adam.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        config = Object(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
        owner = Object(optimizer=adam, model_param_group_index_map={parameter: (0, 0)}, config=config)
        loaded = {"param": torch.full((3,), 2.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.full((3,), 4.0)}
        with torch.no_grad():
            DistributedOptimizer._set_main_param_and_optimizer_states(owner, parameter, loaded)
        print(parameter.tolist(), {name: x.tolist() for name, x in adam.state[parameter].items()})
        print(sorted(n for n, m in sys.modules.items() if "Rewriting" in type(getattr(m, "__loader__", 0)).__name__))
        """
    ).splitlines()


def test_every_module_imports_with_a_gpu_and_without_transformer_engine(with_a_gpu):
    assert with_a_gpu[0] == "False ['Transformer Engine', 'fused Adam']"
    modules = list((REPOSITORY / "megatron_rl").rglob("*.py"))
    assert int(with_a_gpu[1]) >= len(modules) - 2  # without megatron_rl itself and platform's __main__


def test_with_a_gpu_and_no_packages_four_modules_are_rewritten_and_resuming_works(with_a_gpu):
    """torch's Adam has `step` among its state, which Megatron's loader leaves out: a KeyError on any device."""
    *_, state, rewritten = with_a_gpu
    assert state == "[2.0, 2.0, 2.0] {'step': 7.0, 'exp_avg': [1.0, 1.0, 1.0], 'exp_avg_sq': [4.0, 4.0, 4.0]}"
    peft = "'megatron.bridge.peft.lora_layers', 'megatron.bridge.peft.utils'"
    optimizer = "'megatron.core.optimizer.clip_grads', 'megatron.core.optimizer.distrib_optimizer'"
    assert rewritten == f"[{peft}, {optimizer}]"


def test_a_package_that_cannot_work_is_one_line(tmp_path):
    files = {
        "transformer_engine/__init__.py": "",
        "transformer_engine/pytorch.py": "raise OSError('libcudart.so.11:\\nno')",
    }
    ask = """
from megatron_rl.errors import UserError
from megatron_rl.platform import activate
try:
    activate()
except UserError as error:
    print(error)
"""
    out = run(put(tmp_path / "apex", {"apex/__init__.py": "", "apex/optimizers.py": ""}) + ask)
    assert "NVIDIA Apex is installed without its CUDA extensions" in out and "\n" not in out
    out = run(put(tmp_path / "te", files) + ask)
    assert "cannot be imported (OSError: libcudart.so.11: no): tools/setup.sh --gpu --force" in out and "\n" not in out


def test_without_a_gpu_packages_for_one_are_left_alone(tmp_path):
    """An environment with Transformer Engine and Apex serves machines without a GPU too: a cluster's login node."""
    broken = "raise RuntimeError('must not be imported')"
    names = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "fused_weight_gradient_mlp_cuda")
    put(tmp_path, {f"{name}/__init__.py": broken for name in names})
    out = run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from megatron_rl.platform import activate
        activate()
        from megatron.bridge.utils.fusions import can_enable_gradient_accumulation_fusion
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.optimizer import Adam
        from megatron.core.utils import get_te_version
        print(can_enable_gradient_accumulation_fusion(), HAVE_TE, Adam.__module__, get_te_version())
        """
    )
    assert out == "False False torch.optim.adamw 0.0.0"


def test_too_late_is_an_error():
    out = run(
        """
        import sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        from megatron_rl.platform import activate
        try:
            activate()
        except RuntimeError as error:
            print(error)
        """
    )
    assert out.startswith("megatron.core was imported before megatron_rl.platform.activate()")


def test_core_and_bridge_import_quietly_and_work():
    """Also: twice is once, Transformer Engine stays absent, torch stays itself, tracebacks show Megatron's lines."""
    out = run(
        """
        import linecache, sys, traceback
        import torch
        real = torch.cuda.current_device, torch.cuda.Stream, torch.Tensor.cuda
        from megatron_rl.platform import activate
        assert activate() and activate()
        assert sum(type(f).__module__.startswith("megatron_rl.") for f in sys.meta_path) == 1
        from megatron.core.extensions import transformer_engine
        from megatron.core.optimizer import optimizer
        from megatron.core.transformer.moe import moe_utils
        from megatron.bridge import AutoBridge
        assert AutoBridge and not transformer_engine.HAVE_TE and "transformer_engine" not in sys.modules
        assert (torch.cuda.current_device, torch.cuda.Stream, torch.Tensor.cuda) == real
        assert moe_utils.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True).__class__.__name__ == "ndarray"

        from megatron.core import utils
        try:
            utils.divide(3, 2)
        except AssertionError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            print(frame.line, "|", linecache.getline(frame.filename, frame.lineno).strip())
        """
    )
    shown, real = out.split(" | ")
    assert shown == real
    assert shown.startswith("assert numerator % denominator == 0")


def test_the_cache_serves_follows_the_source_and_survives_damage(tmp_path, monkeypatch):
    from megatron_rl.platform.megatron import loader

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "module.py"
    source.write_text("import torch\nwhere = torch.cuda.current_device()\n")
    compiled = []
    missing = loader.rules.EVERYTHING

    class Loader(loader.RewritingLoader):
        def source_to_code(self, data, path, **options):
            compiled.append(data)
            return super().source_to_code(data, path, **options)

    def load() -> str:
        space = {loader.rules.SHIM: loader.cuda}
        exec(Loader("megatron.module", str(source), missing).get_code("megatron.module"), space)
        return str(space["where"])

    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert [load(), load()] == ["cpu", "cpu"]
    assert len(compiled) == 1
    (cached,) = [p for p in loader.cache_paths(str(source), missing) if p.exists()]
    for damage in (b"", cached.read_bytes()[:100], cached.read_bytes()[:16] + b"\xff" * 50):
        cached.write_bytes(damage)
        compiled.clear()
        assert load() == "cpu"
        assert len(compiled) == 1
    source.write_text("where = 'elsewhere'\n")
    assert load() == "elsewhere"


def test_the_cache_tells_apart_what_is_missing():
    from megatron_rl.platform.megatron import loader

    kinds = [frozenset(), frozenset({"fused Adam"}), frozenset({"Transformer Engine"}), loader.rules.EVERYTHING]
    assert len({loader.cache_paths("/a/module.py", missing)[0] for missing in kinds}) == len(kinds)


def test_where_the_packages_cannot_be_written_the_cache_is_the_users(tmp_path, monkeypatch):
    from megatron_rl.platform.megatron import loader

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "__pycache__").write_text("in the way")
    beside, user = loader.cache_paths(str(tmp_path / "module.py"), loader.rules.EVERYTHING)
    loader._store(b"code", [beside, user])
    assert not beside.exists()
    assert user.read_bytes() == b"code"
    assert [p.name for p in user.parent.iterdir()] == [user.name]


def test_random_states_fork_and_return():
    out = run(
        """
        import logging
        from megatron_rl.platform import activate
        activate()
        import torch
        from megatron.core.tensor_parallel import random
        random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
        first = torch.get_rng_state()
        with random.get_cuda_rng_tracker().fork():
            a = torch.rand(3)
        assert torch.equal(first, torch.get_rng_state())
        b = torch.rand(3)
        with random.get_cuda_rng_tracker().fork():
            c = torch.rand(3)
        random.model_parallel_cuda_manual_seed(7, tp_rank=1, ep_rank=0, etp_rank=0, force_reset_rng=True)
        with random.get_cuda_rng_tracker().fork():
            d = torch.rand(3)
        assert torch.equal(b, torch.rand(3))
        print(len({tuple(x.tolist()) for x in (a, b, c, d)}))
        """
    )
    assert out == "4"


def _uneven_sizes(rank_count: int) -> list[list[float]]:
    """Run by each of 3 ranks: sizes 3, 0, 5, and equal sizes."""
    import torch
    import torch.distributed as dist

    from megatron_rl.platform.megatron.gloo import all_gather_uneven

    dist.init_process_group("gloo")
    gathered = []
    for sizes in ([3, 0, 5], [2] * rank_count):
        outputs = [torch.empty(n, 2) for n in sizes]
        rank = dist.get_rank()
        all_gather_uneven(outputs, torch.full((sizes[rank], 2), float(rank)))
        gathered.append(torch.cat(outputs)[:, 1].tolist())
    dist.destroy_process_group()
    return gathered


def test_uneven_all_gather():
    for uneven, even in run_ranks(3, "test_activate:_uneven_sizes", (3,), timeout=180):
        assert uneven == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0]
        assert even == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
