"""SGLang's model runner on a GPU that does not exist: whether it gets through there, and which kernels it reaches.

    PYTHONPATH=REPOSITORY PYTHON_WITH_SGLANG tests/gpu/dry_run.py < CASES.json

CASES.json: {name: {"arguments": [flags of a server], "environment": {...}, "compile": false}}. Each case is a fork of one import
and prints a JSON line [name, outcome]. Models are folders with a config.json; no weights are read, so that widths cost nothing.

The process takes this machine for one with an H100 (megatron_rl/platform/fake_gpu.py). A server's model is built there with the
flags, hooks of our plugin included, and prefills and decodes three requests, which ask for what requests of the trainer do: log-probs,
routes, seeds, the logit processor. Tensors are fake: shapes, types and devices are checked and nothing is computed. Kernels are
noted instead of run: operators of sgl_kernel and FlashInfer's norms, CUDA kernels that SGLang compiles when it needs them
("jit"), Triton's, which "compile" has compiled for that GPU. An outcome is

    {"error": None or text, "kernels": {kind: [names]}, "modules": [[arguments, options] of load_jit], "compiled": {name: text},
     "routes": [shape, type] or None, "plugin": [what our plugin transfers]}

It needs no GPU, no driver (a library of empty functions is loaded in its place) and nothing of the trainer but that one module.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types
from array import array
from pathlib import Path
from typing import Any

import torch

CAPABILITY = (9, 0)
LENGTHS = (37, 12, 64)
"""Of the prompts."""
PLUGIN = Path(__file__).parents[2] / "megatron_rl" / "sync" / "pythonpath"


class Properties:
    """Of an H100, as torch.cuda.get_device_properties has them."""

    name, major, minor, total_memory = "NVIDIA H100 80GB HBM3", *CAPABILITY, 80 * 2**30
    multi_processor_count, L2_cache_size, warp_size, uuid, gcnArchName, is_integrated = 132, 50 * 2**20, 32, "0", "", 0
    max_threads_per_multi_processor, regs_per_multiprocessor = 2048, 65536
    shared_memory_per_block_optin, shared_memory_per_multiprocessor = 232448, 233472


def stand_in_for_the_driver() -> None:
    """Whoever wants libcuda.so.1 from here on finds one: libraries of GPU packages are linked against it."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    spec = importlib.util.find_spec("sgl_kernel")
    assert spec is not None and spec.origin is not None, "sglang-kernel is not installed"
    libraries = map(str, Path(spec.origin).parent.rglob("*.so"))
    symbols = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True).stdout
    names = {word for word in symbols.split() if word.startswith("cu") and word[2:3].isupper()} - {"cuDriverGetVersion"}
    code = 'extern "C" int cuDriverGetVersion(int* version) { *version = 13000; return 0; }\n'
    code += "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in sorted(names))
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        build = ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, "-x", "c++", "-"]
        subprocess.run(build, input=code, text=True, check=True)
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def pretend() -> None:
    """Before SGLang is imported: what it asks torch for besides what Megatron does."""
    from megatron_rl.platform import fake_gpu

    fake_gpu.pretend(CAPABILITY)
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: Properties
    cuda.get_device_name = lambda device=None: Properties.name
    cuda.mem_get_info = lambda device=None: (70 * 2**30, 80 * 2**30)
    for name, value in {"set_device": None, "empty_cache": None, "ipc_collect": None, "memory_allocated": 0, "memory_reserved": 0}.items():
        setattr(cuda, name, lambda *_, value=value: value)  # a function each: torch keeps lists of them
    import torch._subclasses.fake_tensor as fake

    fake.init_gpu_context = lambda device: None
    of_cpu, as_cpu = torch.tensor, torch.as_tensor

    def on_gpu(device: Any) -> bool:
        return device is not None and torch.device(device).type == "cuda"

    def tensor(data, *, dtype=None, device=None, pin_memory=False, requires_grad=False):
        made = of_cpu(data, dtype=dtype)
        return made.to(device) if on_gpu(device) else made

    def as_tensor(data, dtype=None, device=None):
        made = data if isinstance(data, torch.Tensor) else as_cpu(data, dtype=dtype)
        return made.to(device=device, dtype=dtype) if on_gpu(device) or dtype is not None else made

    torch.tensor, torch.as_tensor = tensor, as_tensor  # they make no fake tensors by themselves


class Seen:
    """What one case reached."""

    def __init__(self) -> None:
        self.kernels: dict[str, set[str]] = {}
        self.modules: list = []
        self.compiled: dict[str, str] = {}
        self.transfers: set[str] = set()

    def note(self, kind: str, name: str) -> None:
        self.kernels.setdefault(kind, set()).add(name)


class Anything:
    """A compiled module, whose functions write to tensors that they are given."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def everywhere(old: Any, new: Any, name: str) -> None:
    """In every module that has imported it by this name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def note_kernels(seen: Seen, compile_triton: bool) -> None:
    """After SGLang is imported: kernels that are no operators of torch are noted and not run."""
    import sglang.kernels.jit.utils.compile.loader as loader

    def load_jit(*args: str, **options: Any) -> Any:
        seen.modules.append([list(args), options])
        seen.note("jit", args[0])
        return Anything()

    everywhere(loader.load_jit, load_jit, "load_jit")
    if (norm := sys.modules.get("flashinfer.norm")) is not None:
        for name in ("rmsnorm", "fused_add_rmsnorm"):

            def noted(tensor: torch.Tensor, *_: Any, name: str = name, **__: Any) -> torch.Tensor:
                seen.note("flashinfer", name)
                return torch.empty_like(tensor)

            setattr(norm, name, noted)
        from flashinfer.jit.core import JitSpec

        def build_and_load(spec: Any) -> Any:
            seen.note("flashinfer", spec.name)
            return Anything()

        JitSpec.build_and_load = build_and_load
    note_triton(seen, compile_triton)


def note_triton(seen: Seen, compile_it: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction, MockTensor

    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: limits),
        launcher_cls=lambda *_, **__: None,
        get_current_target=lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        get_benchmarker=lambda: lambda call, quantiles=None: [1.0, 1.0, 1.0],
    )
    triton.runtime.driver.set_active(driver)
    original = JITFunction.run

    def mock(value: Any) -> Any:
        return MockTensor(value.dtype, list(value.shape)) if isinstance(value, torch.Tensor) else value

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        name = self.fn.__name__
        seen.note("triton", name)
        if compile_it and name not in seen.compiled:
            mocks = {key: mock(value) for key, value in options.items()}
            try:
                original(self, *map(mock, args), grid=grid, warmup=True, **mocks)
                seen.compiled[name] = "ok"
            except Exception as error:
                seen.compiled[name] = f"{type(error).__name__}: {str(error)[:300]}"

    JITFunction.run = run


def without_a_device() -> None:
    """Groups of processes are gloo's, weights are not filled, and memory is not pinned."""
    import sglang.srt.mem_cache.pool_host.common as pool
    import sglang.srt.model_loader.loader as weights
    import torch.distributed as dist

    weights.initialize_dummy_weights = lambda *_, **__: None
    pool._cuda_host_register = lambda *_, **__: None
    start, group = dist.init_process_group, dist.new_group

    def start_gloo(_backend: str | None = None, *args: Any, **options: Any) -> None:
        start("gloo", *args, **{k: v for k, v in options.items() if k not in ("backend", "device_id")})

    def group_gloo(*args: Any, **options: Any) -> Any:
        kept = {k: v for k, v in options.items() if k not in ("backend", "device_id", "pg_options")}
        return group(*args, **kept, backend="gloo")

    everywhere(start, start_gloo, "init_process_group")
    everywhere(group, group_gloo, "new_group")


def bodies_of_operators() -> dict[str, Any]:
    """Of SGLang's own operators of torch, by name: they are Python, and run as such. Autotuners and compilers need not be."""
    operators = torch._ops.OpOverloadPacket, torch._ops.OpOverload
    found = {}
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if not isinstance(value, types.FunctionType) or not value.__closure__ or "__wrapped__" not in vars(value):
                continue
            inside = [cell.cell_contents for cell in value.__closure__ if cell != types.CellType()]
            for operator in (o for o in inside if isinstance(o, operators) and str(o).startswith("sglang.")):
                found[str(operator).split(".")[1]] = value.__wrapped__
    return found


def drive(arguments: list[str], seen: Seen, compile_triton: bool) -> dict[str, Any]:
    """A server's model runner: built, three requests prefilled, one token of each decoded."""
    import sglang.benchmark.one_batch as bench
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    from megatron_rl.platform import fake_gpu

    note_kernels(seen, compile_triton)
    without_a_device()
    load_plugins()
    bodies = bodies_of_operators()

    class Dry(fake_gpu.FakeGPU):
        def _note(self, kind: Any, func: Any) -> Any:
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(PLUGIN))]
            seen.transfers.update(f"{kind} {Path(f.filename).stem}.{f.name}" for f in frames[-1:])
            return super()._note(kind, func)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            if func.namespace == "sgl_kernel":
                return seen.note("sgl_kernel", name.split(".")[1])
            if func.namespace == "sglang" and name.split(".")[1] in bodies:
                with self:
                    return bodies[name.split(".")[1]](*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    server = prepare_server_args(
        ["--device", "cuda", "--load-format", "dummy", "--max-total-tokens", "8192", "--disable-overlap-schedule"]
        + ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", *arguments]
    )
    world = bench.spawn_world_rank(server, tp_rank=0, pp_rank=0)
    bench.publish(server, role="scheduler", ranks=bench.SpawnRanks(world_rank=world, gpu_id=0))
    bench._init_process_global_configs()
    bench.get_tokenizer = lambda *_, **__: None
    dry = Dry(lambda transfer, tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
    with dry:
        wrapper, _ = bench.load_model(server, PortArgs.init_new(server), 0, 0)
        runner = wrapper.torch_runner
        seen.transfers.clear()
        requests = [request(bench, server, number, length) for number, length in enumerate(LENGTHS)]
        tokens, logits, batch = bench.extend(requests, runner)
        bench.decode(tokens, batch, runner)
        routes = None
        if (capturer := get_global_experts_capturer()) is not None:
            routes = capturer.get_topk(requests[0].kv.req_pool_idx, LENGTHS[0] + 1, runner.req_to_token_pool)
    return {
        "logits": [*logits.shape, str(logits.device), str(logits.dtype)],
        "routes": None if routes is None else [list(routes.shape), str(routes.dtype)],
        "plugin": sorted(seen.transfers),
    }


def request(bench: Any, server: Any, number: int, length: int) -> Any:
    """As the trainer sends them."""
    pruned = {"temperature": 1.0, "log_rho": -8.0}
    asks = server.enable_custom_logit_processor
    sampling = bench.SamplingParams(
        temperature=1.0, max_new_tokens=8, sampling_seed=number, custom_params=pruned if asks else None
    )
    sampling.normalize(None)
    ids = array("q", range(5, 5 + length))
    made = bench.Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=ids,
        sampling_params=sampling,
        return_logprob=True,
        custom_logit_processor="megatron_rl_plugin.PruneTail" if asks else None,
    )
    made.full_untruncated_fill_ids, made.logprob_start_len, made.extend_end = made.origin_input_ids, -1, length
    return made


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process. Its outcome."""
    os.environ.update(case.get("environment", {}))
    seen, found, error = Seen(), {}, None
    try:
        found = drive(case["arguments"], seen, case.get("compile", False))
    except BaseException:
        error = traceback.format_exc()
    kernels = {kind: sorted(names) for kind, names in seen.kernels.items()}
    return {"error": error, "kernels": kernels, "modules": seen.modules, "compiled": seen.compiled} | found


def in_a_fork(case: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with os.fdopen(writing, "w") as out:
            json.dump(run(case), out, default=list)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"ended with status {status}", "kernels": {}, "modules": []}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang's own prints
    cases = json.load(sys.stdin)
    os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"  # its library asks the driver when it is loaded
    sys.path.insert(0, str(PLUGIN))
    stand_in_for_the_driver()
    pretend()
    import sglang.benchmark.one_batch
    import sglang.srt.models.registry  # noqa: F401

    for name, case in cases.items():
        print(json.dumps([name, in_a_fork(case)]), file=answers, flush=True)


if __name__ == "__main__":
    main()
