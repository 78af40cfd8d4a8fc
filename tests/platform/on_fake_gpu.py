"""What a process on a GPU machine would build and run, without one: a child of the tests, which prints JSON.

python on_fake_gpu.py names FOLDER...       models, their parameters, and the way to Hugging Face names and back
python on_fake_gpu.py forward FOLDER...     the trainer's forward, loss and metrics, and every transfer on the way; how often
                                            experts, head and the norm of the gradients ask something of the GPU
python on_fake_gpu.py delayed FOLDER        Transformer Engine's own record of delayed scaling, through scoring and a checkpoint

Several of them, with `--` between, are done one after the other, each in a fork of what has been imported once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

warnings.simplefilter("ignore")
os.environ["NVTE_TORCH_COMPILE"] = "0"  # nothing is worth compiling

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.platform import fake_gpu  # noqa: E402

fake_gpu.pretend()
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100")

from megatron_rl.ops import extensions  # noqa: E402

# Our kernels want memory to read from: plain torch stands in, as where they were built without nvcc.
extensions.masked_log_softmax.cuda = extensions.sink_attention.cuda = False

from megatron_rl.models.build import Model, load  # noqa: E402  (before Megatron: the platform fills in what is missing)

from megatron.core import parallel_state  # noqa: E402  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402  # isort: skip
from megatron.core.extensions.transformer_engine import HAVE_TE  # noqa: E402  # isort: skip
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402  # isort: skip
from megatron.core.optimizer import clip_grads  # noqa: E402  # isort: skip
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402  # isort: skip

from safetensors import safe_open  # noqa: E402

from megatron_rl.algorithms.sampling_support import SamplingSupport  # noqa: E402
from megatron_rl.config import ParallelConfig  # noqa: E402
from megatron_rl.config.load import build_config  # noqa: E402
from megatron_rl.config.plan import expert_tensor_size  # noqa: E402
from megatron_rl.data.sequence import Sequence  # noqa: E402
from megatron_rl.distributed import parallel  # noqa: E402
from megatron_rl.metrics.reduce import over_ranks  # noqa: E402
from megatron_rl.models import fp8  # noqa: E402
from megatron_rl.models.experts import GroupedExperts, Groups, _GroupedLinear  # noqa: E402
from megatron_rl.models.moe import expert_slices, moe_layers  # noqa: E402
from megatron_rl.ops.device import LateChecks  # noqa: E402
from megatron_rl.ops.matmuls import HeadGradients, scaled  # noqa: E402
from megatron_rl.report.mismatch_metrics import mismatch_metrics  # noqa: E402
from megatron_rl.routing.table import RouteShape  # noqa: E402
from megatron_rl.run.update_hooks import update_hooks  # noqa: E402
from megatron_rl.trainer.hooks import ALONE  # noqa: E402
from megatron_rl.trainer.model_pass import ModelPass  # noqa: E402
from megatron_rl.trainer.objective import Policy  # noqa: E402
from megatron_rl.trainer.trainer import Update, build_trainer  # noqa: E402

logging.disable(logging.ERROR)


def start(world: int, layout: ParallelConfig) -> None:
    if dist.is_initialized():
        parallel.shutdown()
    if world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=expert_tensor_size(layout),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)


def shapes_of_folder(folder: Path) -> dict[str, list[int]]:
    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def settings(model: Model) -> dict[str, bool]:
    fusions = ("moe_grouped_gemm", "moe_permute_fusion", "bias_activation_fusion", "bias_dropout_fusion")
    return {name: getattr(model.config, name) for name in fusions}


def layers_of(folder: Path, precision: str, *, plain: bool = False) -> list[str]:
    """Whose layers a recipe computes with, and Megatron's fp8_recipe where it computes in FP8."""
    config = load(folder, parallel=ParallelConfig(), precision=precision, plain=plain).config
    return [config.transformer_impl, *([config.fp8_recipe] if config.fp8 else [])]


def stored(model: Model) -> list[list]:
    """Name and shape of each tensor in a checkpoint."""
    state = model.make_chunks(load_weights=False)[0].sharded_state_dict()
    parts = [one.build() if isinstance(one, ShardedTensorFactory) else one for one in state.values()]
    tensors = {one.key: list(one.global_shape) for one in nested_values(parts) if isinstance(one, ShardedTensor)}
    return [[name, tensors[name]] for name in sorted(tensors)]


def names(folder: Path, layout: ParallelConfig, precision: str = "bf16") -> dict[str, Any]:
    model = load(folder, parallel=layout, precision=precision)
    whole = layout.tensor == layout.expert == 1
    chunks = model.make_chunks(load_weights=whole)  # which reads every tensor of the folder into a parameter
    parameters = dict(chunks[0].named_parameters())
    # DeepSeek's bias for the choice of experts is a buffer, and a tensor of the folder.
    parameters |= {n: b for n, b in chunks[0].named_buffers() if n.endswith("expert_bias")}
    registry = model.bridge.mapping_registry()
    theirs = {}
    for name in parameters:
        found = registry.megatron_to_hf_lookup(name)
        theirs[name] = [found.hf_param] if isinstance(found.hf_param, str) else list(found.hf_param.values())
    exported = {n: list(t.shape) for n, t in model.export_hf_weights(chunks)} if whole else {}
    experts = {}
    for number, layer in moe_layers(chunks):
        slices = expert_slices(layer.experts)
        experts[number] = {name: [list(one.parameter.shape) for one in found] for name, found in slices.items()}
    return {
        "parameters": {n: list(p.shape) for n, p in parameters.items()},
        "devices": sorted({f"{type(p).__name__} {p.device}" for p in parameters.values()}),
        "names": theirs,
        "exported": exported,
        "folder": shapes_of_folder(folder),
        "experts": experts,
        "expert_module": sorted({type(layer.experts).__name__ for _, layer in moe_layers(chunks)}),
        "checkpoint": sorted(chunks[0].sharded_state_dict()) if whole else [],
        "stored": [
            stored(load(folder, parallel=layout, precision=precision, plain=plain))
            for plain in ((False, True) if HAVE_TE and whole else ())
        ],
        "settings": settings(model),
        "unfused": settings(load(folder, parallel=layout, precision=precision, moe_permute_fusion=False)),
        "layers": {
            "bf16": layers_of(folder, "bf16"),
            "fp32": layers_of(folder, "fp32"),
            **{f"{name}, plain": layers_of(folder, name, plain=True) for name in ("bf16", "fp8_blockwise") if HAVE_TE},
            **{name: layers_of(folder, name) for name in ("fp8_blockwise", "fp8_delayed") if HAVE_TE},
        },
        "grouped_fuse_it": model.config.activation_func in (torch.nn.functional.silu, quick_gelu),
    }


def samples(vocabulary: int, routes: RouteShape | None) -> list[Sequence]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(5):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(3, 12))
        one = Sequence(
            tokens=rng.integers(4, vocabulary, prompt + response).astype(np.int32),
            prompt_length=prompt,
            kept=[rng.choice(vocabulary, 6, replace=False).astype(np.int32) for _ in range(response)],
        )
        one["loss_mask"] = rng.random(response) < 0.9
        one["rollout_log_probs"], one["advantages"] = rng.normal(-3, 1, response), float(rng.normal())
        one.routes = routes.empty(one.inputs) if routes else None
        if routes:
            one.routes[:] = np.arange(routes.topk, dtype=routes.dtype)
        found.append(one)
    return found


def answer(transfer: fake_gpu.Transfer, seen: torch.Tensor) -> torch.Tensor | None:
    """What Megatron's dispatcher and the log read. Tokens of each expert: evenly spaced."""
    if "_maybe_dtoh_and_synchronize" in transfer.place or "maybe_move_tensor_to_cpu" in transfer.place:
        number = torch.arange(seen.numel(), dtype=seen.dtype).view(seen.shape)
        return TOKENS // seen.numel() + (number < TOKENS % seen.numel()).to(seen.dtype)
    if any(name in transfer.place for name in LOOKS):
        return torch.zeros(seen.shape, dtype=seen.dtype)
    return None


LOOKS = ("totals", "on_host", "look", "mismatch_metrics.py", "clip_grads.py")
"""Where the trainer, and Megatron's norm of the gradients, read once an update."""
TOKENS = 0


def forward(gpu: fake_gpu.FakeGPU, folder: Path) -> dict[str, Any]:
    """Every stage with the transfers of it."""
    global TOKENS
    config = build_config(
        {
            "steps": 1,
            # FlashAttention 4's kernels, where it is installed, want memory too: torch's are operators that know fake tensors.
            "model": {"path": str(folder), "head_chunk_tokens": 16, "flash_attention": "torch"},
            "batch": {"tokens_per_micro_batch": 48, "updates_per_step": 2},
            "precision": {"train": "bf16"},
            "routing": {"source": "r3"},
            "pruning": {"enabled": True},
            "correction": {"mode": "truncate", "high": 2.0, "denominator": "weights"},
        }
    )
    stages: dict[str, list[str]] = {}

    def stage(name: str) -> None:
        stages[name] = [f"{t.kind} {t.operator} {t.place}" for t in gpu.transfers]
        gpu.transfers.clear()

    ranks = parallel.initialize(config.parallel, 0)
    support = SamplingSupport(1.0, min_p=config.pruning.rho)
    trainer = build_trainer(config, ranks, total_updates=None, support=support, hooks=update_hooks(config))
    chunk = trainer.chunks[0]
    stage("build")
    shape = trainer.layout.routes
    batches = trainer.pack(samples(trainer.model.hf_config.vocab_size, shape))
    stage("pack")
    TOKENS = batches[0].tokens.numel() * (shape.topk if shape else 1)
    batches = [b for b in batches if b.tokens.numel() == batches[0].tokens.numel()][:1]
    objective = Policy(config)
    trainer.compute_fields(batches, objective.needs)
    stage("log_probs")
    objective = objective.for_update(trainer.totals(batches))
    stage("totals")
    with trainer._observed(trainer.hooks, batches, "update", ALONE) as passes:
        pass
    late, results = LateChecks(), [None]
    trainer.passes.results = results
    chunk.train()
    torch.autograd.grad = gradients_of
    routers = [trainer._router_losses(batch, 1.0) for batch in batches]
    asked = ModelPass(trainer.model, [chunk], batches, passes, objective, support, routers=routers, forward_only=False)
    values, loss = trainer.passes.forward_step(asked.micro_batches(), chunk, asked=asked, late=late)
    total, tokens, _ = loss(values)
    seen = [part for metric in results[0].metrics.values() for part in metric.parts]
    seen += [*values, total, tokens, *results[0].tokens.values()]
    devices = {str(tensor.device) for tensor in seen if isinstance(tensor, FakeTensor)}
    stage("forward")
    late.look()
    stage("look")
    observed = [observer.metrics() for route_pass in passes for observer in route_pass.observers]
    metrics = over_ranks(ranks, [*(result.metrics for result in results), *observed])
    assert any(name.startswith("routing/layer_01/kl") for name in metrics)
    stage("sums")
    updates = [Update(metrics, [result.tokens for result in results])]
    said = {"pruned": config.pruning.enabled, "max_new_tokens": config.rollout.max_new_tokens}
    mismatch_metrics(config.correction, [batches], updates, {"a": 1.0}, **said)
    stage("mismatch")
    parallel.shutdown()
    return {"stages": stages, "devices": sorted(devices), "grad": total.requires_grad}


def delayed(folder: Path) -> dict[str, Any]:
    """Scales and amaxes, which are real tensors here, after each step: quantizers see magnitudes, and nothing is multiplied."""
    from megatron.core.fp8_utils import get_fp8_context
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    made = quantization.DelayedScalingRecipeState.__init__
    on_host = {"device": torch.device("cpu")}
    with (
        mock.patch.dict(os.environ, {"NVTE_UNFUSED_FP8_UPDATE": "1"}),
        mock.patch.object(FP8GlobalStateManager, "is_fp8_available", lambda: (True, "")),
        mock.patch.object(quantization, "check_recipe_support", lambda recipe: None),
        mock.patch.object(
            quantization.DelayedScalingRecipeState,
            "__init__",
            lambda state, *args, **options: made(state, *args, **options | on_host),
        ),
    ):
        model = load(folder, parallel=ParallelConfig(), precision="fp8_delayed")
        first, second = (model.make_chunks(load_weights=False) for _ in range(2))

        def forward(chunks: list[Any], magnitude: float) -> None:
            with get_fp8_context(model.config):
                for module in (m for chunk in chunks for m in chunk.modules() if hasattr(m, "_get_weight_quantizers")):
                    module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))
                    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
                    for quantizer in module.quantizers["scaling_fwd"]:
                        quantizer.amax.fill_(magnitude)

        def record(chunks: list[Any]) -> dict[str, list]:
            found = fp8.remembered(chunks)
            states = [one["scaling_fwd"] for one in found.values()]
            return {name: torch.cat([s[name].flatten() for s in states]).unique().tolist() for name in states[0]}

        found: dict[str, Any] = {}
        with torch.no_grad():
            forward(first, 2.0)
        fp8.calibrate()
        found["calibrated"] = record(first)
        with torch.no_grad(), fp8.amaxes_kept(first):
            forward(first, 5.0)
            found["while it scores"] = record(first)
        found["scored"] = record(first)
        forward(first, 4.0)
        found["trained"] = record(first)
        fp8.restore(second, fp8.remembered(first), model.config)
        with torch.no_grad(), fp8.amaxes_kept(second):
            forward(second, 9.0)
        found["restored"] = record(second)
        pickled = {key: value for key, value in first[0].state_dict().items() if key.endswith("_extra_state")}
        try:
            first[0].load_state_dict(pickled, strict=False)
        except RuntimeError as error:
            found["refused"] = str(error)
    return found


def gradients_of(loss: torch.Tensor, inputs: Any, **_: Any) -> tuple[torch.Tensor, ...]:
    """A backward pass would want the driver of the device."""
    return tuple(torch.zeros_like(x) * loss.detach() for x in inputs)


class Operators(TorchDispatchMode):
    """Names of the operators on tensors, in order, without views and what only allocates: about what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        if func.namespace == "aten" and not any(views) and "aten.empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def expert_operators(experts: int, *, together: bool, biased: bool) -> list[str]:
    """Operators of one linear layer of experts, forward and backward, each expert with its tokens."""
    cuda = {"device": "cuda", "dtype": torch.bfloat16}
    counts = [16] * experts
    x, grad = torch.zeros(sum(counts), 32, **cuda), torch.zeros(sum(counts), 64, **cuda)
    weights = [torch.zeros(64, 32, **cuda) for _ in counts]
    biases = torch.zeros(experts, 64, **cuda) if biased else None
    scales = torch.zeros(len(x), 1, device="cuda") if biased else None
    kept: dict[str, Any] = {"needs_input_grad": [True] * (5 + experts)}
    ctx = SimpleNamespace(**kept, save_for_backward=lambda *tensors: kept.update(tensors=tensors))
    with Operators() as seen:
        groups = Groups.of(x, counts) if together else Groups(counts, None)
        out: Any = _GroupedLinear.forward(ctx, x, groups, biases, scales, GroupedExperts.product, *weights)
        ctx.saved_tensors = kept["tensors"]
        found: Any = _GroupedLinear.backward(ctx, grad)
    shapes = [list(t.shape) for t in (out, found[0], *found[5:])]
    assert shapes == [list(t.shape) for t in (grad, x, *weights)]
    assert all(t.dtype == torch.bfloat16 and t.is_cuda for t in (out, found[0], *found[5:]))
    if biases is not None and scales is not None:
        assert (found[2].shape, found[3].shape, found[3].dtype) == (biases.shape, scales.shape, scales.dtype)
    return seen.names


def norm_operators(tensors: int) -> list[str]:
    with Operators() as seen:
        clip_grads.get_grad_norm_fp32([torch.zeros(8, 8, device="cuda") for _ in range(tensors)])
    return [name for name in seen.names if "zeros" not in name]


def head_operators(chunks: int) -> list[str]:
    cuda = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, weight = torch.zeros(4 * chunks, 16, **cuda), torch.zeros(64, 16, **cuda)
    gradients = HeadGradients(hidden, weight, chunks, of_weight=True)
    with Operators() as seen:
        for start in range(0, len(hidden), 4):
            chunk = slice(start, start + 4)
            gradients.add(chunk, hidden[chunk], weight, torch.zeros(4, 64, **cuda))
        assert gradients.weight is not None and gradients.weight.dtype == torch.float32
        assert scaled(gradients.weight, torch.ones(1, device="cuda"), torch.bfloat16).dtype == torch.bfloat16
    return [name for name in seen.names if "zeros" not in name and "ones" not in name]


def operators(gpu: fake_gpu.FakeGPU) -> dict[str, Any]:
    """How many, with few experts, tensors or chunks and with many; and what crossed between host and GPU."""
    ways = [(way, biased) for way in ("together", "one by one") for biased in (False, True)]
    out: dict[str, Any] = {
        f"experts {way}{' with biases' * biased}": [
            len(expert_operators(number, together=way == "together", biased=biased))
            for number in (8, 128 if way == "together" else 24)
        ]
        for way, biased in ways
    }
    out["experts' transfers"] = [t.kind for t in gpu.transfers]
    gpu.transfers.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    out["norm"] = [norm_operators(number) for number in (2, 300)]
    out["norm's transfers"] = [t.kind for t in gpu.transfers]
    return out | {"head": [head_operators(chunks) for chunks in (2, 5)]}


def look(what: str, *folders: str) -> None:
    out: dict[str, Any] = {"te": HAVE_TE}
    anything = lambda _, seen: torch.zeros(seen.shape, dtype=seen.dtype)  # noqa: E731
    with fake_gpu.FakeGPU(answer if what == "forward" else anything) as gpu:
        for folder in map(Path, folders):
            if what == "delayed":
                start(1, ParallelConfig())
                out |= delayed(folder)
                continue
            if what == "forward":
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                out[folder.name] = forward(gpu, folder)
                continue
            start(1, whole := ParallelConfig())
            one = names(folder, whole)
            start(2, half := ParallelConfig(tensor=2, expert=2 if one["experts"] else 1))
            out[folder.name] = {"one": one, "two": names(folder, half)}
        if what == "forward":
            out["operators"] = operators(gpu)
    print(json.dumps(out), flush=True)


def main() -> int:
    for _, job in groupby(sys.argv[1:], lambda word: word == "--"):
        words = [*job]
        if words == ["--"]:
            continue
        if not (child := os.fork()):
            look(*words)
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
