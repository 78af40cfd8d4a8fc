"""Lists all places of Megatron that the platform replaces, and places of Megatron-Core that mention a GPU and do not change.

`UNREACHED` and `REVIEWED` explain the unchanged places, for the supported release of Megatron. A new release may add places
that are in neither table; tests/platform/test_coverage.py then names them.
"""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.platform.megatron import cuda, rules

UNREACHED: dict[str, str] = {
    "core/distributed/fsdp/": "Megatron-FSDP: megatron_rl uses the distributed optimizer",
    "core/distributed/torch_fully_sharded_data_parallel.py": "torch FSDP: megatron_rl uses the distributed optimizer",
    "core/export/": "export to TensorRT-LLM",
    "core/extensions/transformer_engine.py": "Transformer Engine does not run without a GPU",
    "core/fault_injector.py": "fault injection of Megatron's tests",
    "core/full_cuda_graph.py": "CUDA graphs",
    "core/fusions/": "GPU kernels",
    "core/inference/": "Megatron's own inference engine: SGLang does the rollouts",
    "core/models/audio/": "audio encoders: not supported by megatron_rl",
    "core/models/mimo/": "multi-modal models: not supported by megatron_rl",
    "core/nccl_allocator.py": "NCCL user buffers (nccl_ub)",
    "core/pipeline_parallel/bridge_communicator.py": "pipelines of multi-modal models",
    "core/pipeline_parallel/fine_grained_activation_offload.py": "activation offload from the GPU",
    "core/resharding/": "megatron_rl pushes weights through its own sync",
    "core/ssm/": "Mamba and gated delta nets: not supported by megatron_rl",
    "core/transformer/cuda_graphs.py": "CUDA graphs",
    "core/transformer/custom_layers/batch_invariant_kernels.py": "Triton kernels of batch_invariant_mode",
    "core/transformer/experimental_attention_variant/": "DeepSeek's sparse attention kernels: not supported by megatron_rl",
    "core/transformer/fsdp_dtensor_checkpoint.py": "checkpoints of FSDP",
    "core/transformer/moe/inference_routing_mask_kernel.py": "inference kernel",
    "core/transformer/moe/paged_stash.py": "host copies of expert activations (moe_paged_stash)",
}
"""File or folder below megatron/ -> reason why training without a GPU does not use it."""

REVIEWED: dict[tuple[str, str], tuple[int, str]] = {
    ("core/dist_checkpointing/strategies/filesystem_async.py", "'cuda'"): (1, "behind `device.type != 'cpu'`"),
    ("core/dist_checkpointing/strategies/fully_parallel.py", "'torch.cuda.synchronize'"): (1, "name of a timer"),
    ("core/dist_checkpointing/strategies/torch.py", ".is_cuda"): (1, "behind HAVE_TE"),
    ("core/dist_checkpointing/strategies/torch.py", "pin_memory="): (1, "reads whether a tensor is pinned"),
    ("core/optimizer/cpu_offloading/hybrid_optimizer.py", "pin_memory="): (1, "off without a GPU, by pin_cpu_grads"),
    ("core/optimizer/optimizer.py", ".is_cuda"): (4, "moves state between GPU and host; here all state is on the host"),
    ("core/pipeline_parallel/combined_1f1b.py", ".is_cuda"): (1, "frees storage of GPU tensors early"),
    ("core/pipeline_parallel/utils.py", "import cuda"): (4, "binds the process to a GPU's cores, on request"),
    ("core/transformer/transformer_config.py", ".cuda"): (1, "torch.backends.cuda: a flag that the CPU ignores"),
}
"""(file, kind of place) -> (number of places, reason why they are correct without a change)."""


def megatron_root() -> Path:
    """Find the installed megatron/ folder without importing it. Errors: UserError if Megatron-Core is not installed."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or spec.submodule_search_locations is None:
        raise UserError("megatron-core is not installed: tools/setup.sh installs it")
    return Path(next(iter(spec.submodule_search_locations)))


def rewritten(root: Path, package: str = "core") -> Iterator[tuple[str, ast.Module, list[rules.Site]]]:
    """Yield (path below root, rewritten tree, replaced places) for each module of a package."""
    for file in sorted((root / package).rglob("*.py")):
        path = file.relative_to(root)
        name = ".".join(["megatron", *path.with_suffix("").parts]).removesuffix(".__init__")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree, sites = rules.rewrite(file.read_bytes(), name, str(file))
        yield path.as_posix(), tree, sites


def table(root: Path) -> str:
    """Format all replaced places by rule and module, and the unchanged places, with the reasons."""
    counts: dict[str, Counter] = {rule: Counter() for rule in rules.WHY}
    for package in ("core", "bridge", "training"):
        if (root / package).is_dir():
            for path, _, sites in rewritten(root, package):
                for site in sites:
                    counts[site.rule][path] += 1
    lines = ["Replaced while megatron.* is imported, without a GPU:"]
    for rule, by_module in counts.items():
        if rule != "swap":
            lines += ["", f"[{rule}] {rules.WHY[rule]} ({by_module.total()} places)"]
            lines += [f"  {count:4d}  {module}" for module, count in by_module.most_common()]
    for missing, where in rules.WHERE.items():
        swaps = [swap for swap in rules.SWAPS if swap.missing == missing]
        lines += ["", f"[swap] {rules.WHY['swap']} ({sum(swap.count for swap in swaps)} places), {where}:"]
        lines += [f"  {swap.module}: `{swap.old}` -> `{swap.new}`\n      {swap.why}" for swap in swaps]
    lines += [
        "",
        "torch.cuda names without a counterpart (torch's own names remain, and raise an error when they are called):",
    ]
    lines += [f"  {name}: {why}" for name, why in cuda.NO_COUNTERPART.items()]
    lines += ["", "Unchanged in megatron-core, because training without a GPU does not use it:"]
    lines += [f"  {path}: {why}" for path, why in UNREACHED.items()]
    lines += ["", "Unchanged in megatron-core, because it is correct without a GPU:"]
    lines += [f"  {path}: {what} x {count}: {why}" for (path, what), (count, why) in REVIEWED.items()]
    return "\n".join(lines)
