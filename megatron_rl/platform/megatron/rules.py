"""Rules that change the source of `megatron.*` in memory if a GPU or a package that Megatron requires is missing.

Megatron addresses the GPU directly (`torch.cuda.current_device()`, `device="cuda"`). Functions of torch are shared by all
libraries, so they are not replaced. Instead the syntax tree of each Megatron module is rewritten during its import. A few
general rules apply if the GPU is missing. Each entry of `SWAPS` replaces one expression if the part that the entry names is
missing. Positions are kept, so that tracebacks show Megatron's own lines.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

SHIM = "_megatron_rl_platform_"
"""Name of `megatron_rl.platform.megatron.cuda` inside of a rewritten module."""
SHIM_MODULE = "megatron_rl.platform.megatron.cuda"
TE_MODULE = "megatron_rl.platform.megatron.transformer_engine"
GRADIENTS_MODULE = "megatron_rl.platform.megatron.gradients"
GPU_PACKAGES = (
    *("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "fused_weight_gradient_mlp_cuda"),
    "flash_attn",  # FlashAttention 4, whose import takes seconds
)
"""Packages that Megatron must not import without a GPU. They may be installed there, for example on login nodes."""

Missing = Literal["GPU", "Transformer Engine", "fused Adam"]
"""Parts that Megatron requires and that a machine may lack."""
WHERE: dict[Missing, str] = {
    "GPU": "without a GPU",
    "Transformer Engine": "also with a GPU, if Transformer Engine is not installed",
    "fused Adam": "also with a GPU, if neither Transformer Engine nor NVIDIA Apex is installed",
}
"""{missing part: condition under which its swaps apply}."""
EVERYTHING: frozenset[Missing] = frozenset(WHERE)
"""All parts that can be missing."""

Rule = Literal[
    "torch.cuda",
    "import",
    "GPU package",
    "device name",
    "device()",
    ".cuda()",
    "tensor type",
    "pin_memory",
    "record_stream",
    "compile",
    "swap",
]

WHY: dict[str, str] = {
    "torch.cuda": "torch.cuda.NAME becomes its counterpart in cuda.py",
    "import": "from torch.cuda import NAME becomes an import of its counterpart in cuda.py",
    "GPU package": "packages that need a GPU are not imported, as if they were not installed",
    "device name": "the device name 'cuda' as an argument, a default or a value becomes 'cpu'; comparisons do not change",
    "device()": "torch.device('cuda', index) becomes the CPU device",
    ".cuda()": "x.cuda(...) becomes x.cpu()",
    "tensor type": "'torch.cuda.FloatTensor' and similar names become 'torch.FloatTensor' and so on",
    "pin_memory": "memory is not pinned",
    "record_stream": "x.record_stream(...) is removed, because there are no streams",
    "compile": "torch.compile keeps the function eager, because compiling small fusions costs minutes and saves nothing",
    "swap": "one expression is replaced, see SWAPS",
}
"""{rule: its effect and the reason}."""


@dataclass(frozen=True)
class Swap:
    """Replacement of one expression of one module, used if `missing` is missing.

    `old` is compared with `ast.unparse` of each expression and import. `count` is the number of places that must match.
    """

    module: str
    old: str
    new: str
    why: str
    missing: Missing = "GPU"
    count: int = 1


SWAPS = (
    Swap(
        "megatron.core.transformer.moe.moe_utils",
        "torch.is_tensor(tensor) and tensor.is_cuda",
        "torch.is_tensor(tensor)",
        "all_to_all_single needs split sizes as numpy arrays, but Megatron converts only CUDA tensors",
    ),
    Swap(
        "megatron.core.tensor_parallel.mappings",
        "torch.distributed.all_gather",
        f"{SHIM}.all_gather_uneven",
        "gloo gathers only tensors of equal size; with expert tensor parallelism each rank has another number of tokens",
    ),
    Swap(
        "megatron.core.optimizer.distrib_optimizer",
        "isinstance(tensors[key], torch.Tensor)",
        "isinstance(tensors.get(key), torch.Tensor)",
        "torch's Adam keeps `step` as a tensor that is loaded with the parameter groups; the original raises KeyError",
        missing="fused Adam",
    ),
    Swap(
        "megatron.core.optimizer.clip_grads",
        "from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale",
        f"from {GRADIENTS_MODULE} import apply as local_multi_tensor_applier, l2_norm as local_multi_tensor_l2_norm,"
        " scale as local_multi_tensor_scale",
        "Megatron's own gradient norm waits for the GPU once per tensor, and clipping copies each tensor",
        missing="fused Adam",
    ),
    Swap(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "param.is_cuda",
        f"{SHIM}.on_device(param)",
        "the optimizer of two devices checks on which one a tensor is; without a GPU its copies for the host are marked",
        count=3,
    ),
    Swap(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "param.detach().clone().cpu().pin_memory()",
        f"{SHIM}.for_host(param.detach().clone())",
        "marks the copy for the host",
    ),
    Swap(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "param.detach().clone().float()",
        f"{SHIM}.for_host(param.detach().clone().float(), like=param)",
        "the fp32 copy of a marked copy is marked too",
    ),
    Swap(
        "megatron.core.tensor_parallel.random",
        "torch.all(cpu_rng_state == torch.get_rng_state()).item()",
        "True",
        "the original warns if the CPU's random state changed with the GPU's; here both are the same",
    ),
    Swap(
        "megatron.bridge.peft.lora_layers",
        "import transformer_engine.pytorch as te",
        f"import {TE_MODULE} as te",
        "the import has no guard but is used only for LoRA on Transformer Engine layers; HAVE_TE stays False everywhere",
        missing="Transformer Engine",
    ),
    Swap(
        "megatron.bridge.peft.utils",
        "all((HAVE_TE_COL_LINEAR, HAVE_TE_LN_COL_LINEAR, HAVE_TE_ROW_LINEAR, HAVE_TE_LINEAR,"
        " HAVE_TE_COL_GRP_LINEAR, HAVE_TE_ROW_GRP_LINEAR))",
        "isinstance(TEColumnParallelLinear, type)",
        "without Transformer Engine the names of its layers are mocks, and isinstance with a mock is an error",
        missing="Transformer Engine",
    ),
    Swap(
        "megatron.training.checkpointing",
        "from modelopt.torch.opt.plugins import save_modelopt_state, save_sharded_modelopt_state",
        "raise ImportError('left out at start-up')",
        "optional import for megatron.training's own checkpoints, which megatron_rl does not write; it takes seconds",
    ),
    Swap(
        "megatron.training.training",
        "from modelopt.torch.distill.plugins.megatron import get_tensor_shapes_adjust_fn_for_distillation",
        "raise ImportError('left out at start-up')",
        "optional import for megatron.training's own loop, which megatron_rl does not use; it takes seconds",
    ),
)

_TENSOR_TYPES = {f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte")}


@dataclass(frozen=True)
class Site:
    """One replaced place."""

    module: str
    line: int
    rule: Rule
    what: str


def concerns(module: str, missing: Collection[Missing]) -> bool:
    """Return True if anything in this module may be replaced."""
    return "GPU" in missing or any(swap.module == module and swap.missing in missing for swap in SWAPS)


class Rewriter(ast.NodeTransformer):
    """Applies the swaps for the missing parts to the tree of one module; `sites` lists the replaced places."""

    def __init__(self, module: str, missing: Collection[Missing]):
        self.module = module
        self.sites: list[Site] = []
        self.swaps = {swap.old: swap for swap in SWAPS if swap.module == module and swap.missing in missing}

    def _replace(self, node: ast.expr | ast.stmt, new: ast.AST, rule: Rule, what: str) -> Any:
        self.sites.append(Site(self.module, node.lineno, rule, what))
        return ast.fix_missing_locations(ast.copy_location(new, node))

    def visit(self, node: ast.AST) -> Any:
        """Return the node, or its replacement by a swap."""
        if self.swaps and isinstance(node, ast.expr | ast.Import | ast.ImportFrom):
            swap = self.swaps.get(ast.unparse(node))
            if swap is not None:
                statement = isinstance(node, ast.stmt)
                new = ast.parse(swap.new).body[0] if statement else ast.parse(swap.new, mode="eval").body
                return self._replace(node, new, "swap", swap.old)
        return super().visit(node)


class CpuRewriter(Rewriter):
    """Applies the swaps and the general rules for a missing GPU."""

    def _shim(self, name: str) -> ast.Attribute:
        return ast.Attribute(ast.Name(SHIM, ast.Load()), name, ast.Load())

    def visit_Import(self, node: ast.Import) -> Any:
        return self._without_gpu_package(node, [alias.name for alias in node.names])

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and isinstance(node.ctx, ast.Load):
            if node.attr == "cuda":
                return self._replace(node, ast.Name(SHIM, ast.Load()), "torch.cuda", "torch.cuda")
            if node.attr == "compile":
                return self._replace(node, self._shim("leave_eager"), "compile", "torch.compile")
        if node.attr in ("cuda", "compile"):
            return self.generic_visit(node)
        value = node.value
        self.generic_visit(node)
        if value is not node.value and isinstance(node.value, ast.Name) and node.value.id == SHIM:
            site = self.sites[-1]
            self.sites[-1] = Site(site.module, site.line, site.rule, f"torch.cuda.{node.attr}")
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.level == 0 and node.module and (node.module == "torch.cuda" or node.module.startswith("torch.cuda.")):
            what = ", ".join(f"{node.module}.{alias.name}" for alias in node.names)
            return self._replace(node, ast.ImportFrom(SHIM_MODULE, node.names, 0), "import", what)
        return self._without_gpu_package(node, [node.module or ""] if node.level == 0 else [])

    def _without_gpu_package(self, node: ast.stmt, modules: list[str]) -> Any:
        packages = [package for package in (name.split(".")[0] for name in modules) if package in GPU_PACKAGES]
        if not packages:
            return node
        error = ast.Call(ast.Name("ModuleNotFoundError", ast.Load()), [ast.Constant(f"{packages[0]} needs a GPU")], [])
        return self._replace(node, ast.Raise(error, None), "GPU package", packages[0])

    def visit_Call(self, node: ast.Call) -> Any:
        function, first = node.func, node.args[0] if node.args else None
        if isinstance(function, ast.Attribute):
            if ast.unparse(function) == "torch.device" and _is_cuda(first) and len(node.args) == 2:
                return self._replace(
                    node, ast.Call(self._shim("current_device"), [], []), "device()", ast.unparse(node)
                )
            if function.attr == "cuda":
                new = ast.Call(ast.Attribute(self.visit(function.value), "cpu", ast.Load()), [], [])
                return self._replace(node, new, ".cuda()", ".cuda()")
            if function.attr == "pin_memory" and not node.args and not node.keywords:
                return self._replace(node, self.visit(function.value), "pin_memory", ".pin_memory()")
            if function.attr == "record_stream":
                return self._replace(node, ast.Constant(None), "record_stream", ".record_stream()")
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr", "setattr", "isinstance"):
            return self.generic_visit(node)
        imports = ast.unparse(function) in ("safe_import", "safe_import_from", "importlib.import_module")
        if imports and isinstance(first, ast.Constant) and (package := str(first.value).split(".")[0]) in GPU_PACKAGES:
            node.args[0] = self._replace(first, ast.Constant(f"{SHIM}absent.{first.value}"), "GPU package", package)
        node.args = [self._device_name(argument) for argument in node.args]
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and not isinstance(keyword.value, ast.Attribute | ast.Name):
                keyword.value = self._replace(keyword.value, ast.Constant(False), "pin_memory", "pin_memory=")
            else:
                keyword.value = self._device_name(keyword.value)
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> Any:
        node.defaults = [self._device_name(default) for default in node.defaults]
        node.kw_defaults = [self._device_name(default) for default in node.kw_defaults]
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        node.body, node.orelse = self._device_name(node.body), self._device_name(node.orelse)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        node.value = self._device_name(node.value)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str) and node.value in _TENSOR_TYPES:
            return self._replace(node, ast.Constant(node.value.replace(".cuda", "")), "tensor type", node.value)
        return node

    def _device_name(self, node: ast.expr | None) -> Any:
        if isinstance(node, ast.Constant) and node.value == "cuda":
            return self._replace(node, ast.Constant("cpu"), "device name", "'cuda'")
        return node


def _is_cuda(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cuda"


def rewrite(
    source: bytes | str, module: str, path: str = "<source>", missing: Collection[Missing] = EVERYTHING
) -> tuple[ast.Module, list[Site]]:
    """Return the rewritten tree of a module's source, and the replaced places."""
    rewriter = (CpuRewriter if "GPU" in missing else Rewriter)(module, missing)
    tree = rewriter.visit(ast.parse(source, path))
    return tree, rewriter.sites
