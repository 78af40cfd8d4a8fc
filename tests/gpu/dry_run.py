"""SGLang's model runner on a GPU that does not exist: whether it gets through there, and which kernels it reaches.

    PYTHONPATH=REPOSITORY PYTHON_WITH_SGLANG tests/gpu/dry_run.py < CASES.json

CASES.json: {name: {"arguments": [flags of a server], "environment": {...}, "compile": false}}. Each case is a fork of one
import and prints a JSON line [name, outcome]. Of a model its config.json is enough: no weights are read, and widths cost
nothing.

The process takes this machine for one with an H100 (pretended_h100.py). A server's model runner is built with the flags and
our plugin's hooks, and prefills and decodes three requests like the trainer's: with log-probs, seeds, and where the flags have
them routes, gates, kept sets and the logit processor. Tensors are fake: shapes, types and devices are checked, nothing is
computed. Kernels are noted instead of run: sgl_kernel's operators, FlashInfer's, CUDA kernels that SGLang compiles when it
needs them ("jit"), and Triton's, which "compile" has compiled for that GPU. An outcome is

    {"error": None or text, "kernels": {kind: [names]}, "modules": [[arguments, options] of load_jit],
     "compiled": {name: text}, "captured": [layers], "routes": [shape, type] or None, "logits": [shape, device, type],
     "plugin": [what it transfers between host and GPU, or waits for], "weights": [types in their checksums],
     "same_after_a_push": whether these are laid out as before when one begins and ends}

It needs no driver, and nothing of the trainer but tests/platform/fake_gpu.py.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import types
from array import array
from pathlib import Path
from typing import Any

import torch
from pretended_h100 import H100, everywhere, pretend, stand_in_for_the_driver, without_a_device

from tests.platform import fake_gpu

LENGTHS = (37, 12, 64)
"""Lengths of the prompts."""
PLUGIN = Path(__file__).parents[2] / "sglang_plugin"


class Seen:
    """Kernels, transfers and layers that this process reached."""

    def __init__(self) -> None:
        self.kernels: dict[str, set[str]] = {}
        self.modules: list[tuple[list, dict]] = []
        self.compiles, self.compiled = False, dict[str, str]()
        self.captured: set[int] = set()
        self.transfers: set[str] = set()

    def note(self, kind: str, name: str) -> None:
        self.kernels.setdefault(kind, set()).add(name)


SEEN = Seen()
"""Record of a case, which is a process."""


class Anything:
    """A compiled module, whose functions write to tensors that they are given."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def note_kernels() -> None:
    """After SGLang is imported: kernels that are no operators of torch are noted and not run."""
    import sglang.kernels.jit.utils.compile.loader as loader
    from sglang.srt.state_capturer.base import BaseTopkCapturer

    def load_jit(*args: str, **options: Any) -> Any:
        SEEN.modules.append((list(args), options))
        SEEN.note("jit", args[0])
        return Anything()

    capture = BaseTopkCapturer.capture

    def captured(self: Any, layer_id: int, topk_indices: torch.Tensor) -> None:
        SEEN.captured.add(layer_id)
        capture(self, layer_id, topk_indices)

    BaseTopkCapturer.capture = captured
    everywhere(loader.load_jit, load_jit, "load_jit")
    if (norm := sys.modules.get("flashinfer.norm")) is None:
        return
    from flashinfer.jit.core import JitSpec

    def build_and_load(spec: Any) -> Any:
        SEEN.note("flashinfer", spec.name)
        return Anything()

    JitSpec.build_and_load = build_and_load
    for name in ("rmsnorm", "fused_add_rmsnorm"):

        def noted(tensor: torch.Tensor, *_: Any, name: str = name, **__: Any) -> torch.Tensor:
            SEEN.note("flashinfer", name)
            return torch.empty_like(tensor)

        setattr(norm, name, noted)


def note_triton() -> None:
    """Its kernels are noted and not run; where a case asks for it, the first call of each is compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction, MockTensor

    limits = {"max_shared_mem": H100.shared_memory_per_block_optin, "max_num_regs": H100.regs_per_multiprocessor}
    limits |= {"multiprocessor_count": H100.multi_processor_count, "warpSize": H100.warp_size}
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: limits),
        launcher_cls=lambda *_, **__: None,
        get_current_target=lambda: GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
    )
    triton.runtime.driver.set_active(driver)
    original = JITFunction.run

    def mock(value: Any) -> Any:
        return MockTensor(value.dtype, list(value.shape)) if isinstance(value, torch.Tensor) else value

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        name = self.fn.__name__
        SEEN.note("triton", name)
        if SEEN.compiles and name not in SEEN.compiled:
            mocks = {key: mock(value) for key, value in options.items()}
            try:
                original(self, *map(mock, args), grid=grid, warmup=True, **mocks)
                SEEN.compiled[name] = "ok"
            except Exception as error:
                SEEN.compiled[name] = f"{type(error).__name__}: {str(error)[:300]}"

    JITFunction.run = run


def bodies_of_operators() -> dict[str, Any]:
    """Bodies of SGLang's own operators of torch, by name: they are Python and run as such, without autotuner or compiler."""
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


def drive(arguments: list[str], bodies: dict[str, Any]) -> dict[str, Any]:
    """A server's model runner: built, three requests prefilled, one token of each decoded."""
    import sglang.benchmark.one_batch as bench
    from sglang.srt.server_args import PortArgs, prepare_server_args
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    class Dry(fake_gpu.FakeGPU):
        def _note(self, kind: Any, func: Any) -> Any:
            frame = sys._getframe()
            while frame is not None and not frame.f_code.co_filename.startswith(str(PLUGIN)):
                frame = frame.f_back
            if frame is not None:
                SEEN.transfers.add(f"{kind} {Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            return fake_gpu.Transfer(kind, str(func), "")

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            if func.namespace == "sgl_kernel":
                return SEEN.note("sgl_kernel", name.split(".")[1])
            if func.namespace == "sglang" and name.split(".")[1] in bodies:
                with self:
                    return bodies[name.split(".")[1]](*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    flags = ["--device", "cuda", "--load-format", "dummy", "--max-total-tokens", "8192", "--disable-overlap-schedule"]
    flags += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    server = prepare_server_args([*flags, *arguments])
    world = bench.spawn_world_rank(server, tp_rank=0, pp_rank=0)
    bench.publish(server, role="scheduler", ranks=bench.SpawnRanks(world_rank=world, gpu_id=0))
    bench._init_process_global_configs()
    bench.get_tokenizer = lambda *_, **__: None
    with Dry(lambda transfer, tensor: torch.zeros(tensor.shape, dtype=tensor.dtype)):
        wrapper, _ = bench.load_model(server, PortArgs.init_new(server), 0, 0)
        runner = wrapper.torch_runner
        SEEN.transfers.clear()
        requests = [request(bench, server, number, length) for number, length in enumerate(LENGTHS)]
        tokens, _, batch = bench.extend(requests, runner)
        _, logits = bench.decode(tokens, batch, runner)
        routes = None
        if (capturer := get_global_experts_capturer()) is not None:
            routes = capturer.get_topk(requests[0].kv.req_pool_idx, LENGTHS[0] + 1, runner.req_to_token_pool)
        transfers = sorted(SEEN.transfers)
        before = layout(runner)
        runner.weight_updater.begin_weight_update()
        runner.weight_updater.end_weight_update(run_post_load=True)
        after = layout(runner)
    return {
        "logits": [list(logits.shape), str(logits.device), str(logits.dtype)],
        "routes": None if routes is None else [list(routes.shape), str(routes.dtype)],
        "plugin": transfers,
        "weights": sorted({kind for kind, _ in before.values()}),
        "same_after_a_push": after == before,
    }


def layout(runner: Any) -> dict[str, tuple[str, str]]:
    """Kind and type of each weight's checksum, and its shape, by the weight's name."""
    checksums = runner.check_weights("checksum", role="target")["checksums"]
    fields = {name: text.split(":") for name, text in checksums.items()}
    return {name: (f"{kind}:{dtype}", shape) for name, (kind, _, dtype, shape) in fields.items()}


def request(bench: Any, server: Any, number: int, length: int) -> Any:
    """As the trainer sends them."""
    asks, names_kept = server.enable_custom_logit_processor, server.sampling_backend == "pytorch"  # which knows seeds
    sampling = bench.SamplingParams(
        temperature=1.0,
        top_k=32 if names_kept else -1,
        max_new_tokens=8,
        sampling_seed=number,
        custom_params={"temperature": 1.0, "log_rho": -8.0} if asks else None,
    )
    sampling.normalize(None)
    made = bench.Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array("q", range(5, 5 + length)),
        sampling_params=sampling,
        return_logprob=True,
        custom_logit_processor="megatron_rl_plugin.PruneTail" if asks else None,
    )
    made.return_sampling_mask = names_kept
    made.full_untruncated_fill_ids, made.logprob_start_len, made.extend_end = made.origin_input_ids, -1, length
    return made


def outcome(case: dict[str, Any], bodies: dict[str, Any]) -> dict[str, Any]:
    """Run a case in this process and return its outcome."""
    os.environ.update(case.get("environment", {}))
    SEEN.compiles = case.get("compile", False)
    found, error = {}, None
    try:
        found = drive(case["arguments"], bodies)
    except BaseException:
        error = traceback.format_exc()
    return found | {
        "error": error,
        "kernels": {kind: sorted(names) for kind, names in SEEN.kernels.items()},
        "modules": SEEN.modules,
        "compiled": SEEN.compiled,
        "captured": sorted(SEEN.captured),
    }


def in_a_fork(case: dict[str, Any], bodies: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with os.fdopen(writing, "w") as out:
            json.dump(outcome(case, bodies), out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"ended with status {status}"}


def main() -> None:
    gc.disable()  # imports make no garbage
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang's own prints
    os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"  # its library asks the driver when it is loaded
    sys.path.insert(0, str(PLUGIN))
    stand_in_for_the_driver()
    pretend()
    import sglang.benchmark.one_batch
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.plugins import load_plugins

    note_kernels()
    note_triton()
    without_a_device()
    load_plugins()
    bodies = bodies_of_operators()
    gc.enable()
    gc.freeze()  # SGLang collects garbage, which would touch all that the forks share
    for name, case in json.load(sys.stdin).items():
        print(json.dumps([name, in_a_fork(case, bodies)]), file=answers, flush=True)


if __name__ == "__main__":
    main()
