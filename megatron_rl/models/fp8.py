"""Weights in block FP8, SGLang's format: `X.weight` in e4m3 and `X.weight_scale_inv`, the fp32 scales of its blocks.

The matrices of attention, MLPs and experts are quantized. Router, embedding, head and norms are not, as in SGLang. The
arithmetic is nvidia-modelopt's `FP8QTensor`. This module quantizes weights for weight sync with an engine, and for
`megatron-rl convert --quantize fp8`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.families import Linear, family_named, linear_of, stack_of

BLOCK = 128
E4M3_MAX = 448.0
TINY = 2.0**-24
SCALE = "_scale_inv"
"""Suffix that turns the name of a quantized weight into the name of its scales."""
SGLANG = "0.5.23"
_WEIGHT = re.compile(r"model\.layers\.\d+\..+\.weight")


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [N, K]; return e4m3 [N, K] and scale_inv, which is amax / 448 of each block.

    scale_inv: fp32 [ceil(N / BLOCK), ceil(K / BLOCK)].

    weight ~ e4m3 * scale_inv, with an error of at most half a step of e4m3. The last blocks may be smaller. A block without
    an element above 2**-24 becomes zeros with scale 1.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor  # takes seconds to import
    from modelopt.torch.quantization.utils import reduce_block_amax, reduce_block_padding

    sizes = {-1: BLOCK, -2: BLOCK}
    weight = weight.detach().float()  # else modelopt would round the scales to the weight's dtype
    amax = reduce_block_amax(reduce_block_padding(weight, sizes), sizes)
    # The same as in modelopt's fake quantization, so that trainer and engine round in the same way (`experts.py`). FP8QTensor's
    # own scale is 0 for a block of zeros, and 0 / 0 is NaN.
    scale_inv = torch.where(amax > TINY, 1 / (E4M3_MAX / amax), 1.0)
    quantized, _ = FP8QTensor.quantize(weight, scales=scale_inv, block_sizes=sizes)
    return quantized._quantized_data.contiguous(), scale_inv


def dequantize_blocks(quantized: Tensor, scale_inv: Tensor) -> Tensor:
    """Invert quantize_blocks; return fp32 [N, K]."""
    rows, columns = quantized.shape
    scales = scale_inv.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return quantized.float() * scales


def quantized(named_tensors: Iterable[tuple[str, Tensor]], *, simulate: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face tensors; each matrix becomes two tensors, its e4m3 weight and its scales.

    simulate: yield one bf16 tensor instead, rounded to FP8 and back, for an engine without FP8 matrix multiplications.
    """
    for name, tensor in named_tensors:
        if not is_quantized(name):
            yield name, tensor
            continue
        weight, scale_inv = quantize_blocks(tensor)
        if simulate:
            yield name, dequantize_blocks(weight, scale_inv).to(torch.bfloat16)
        else:
            yield name, weight
            yield name + SCALE, scale_inv


class Dequantized(Mapping[str, Tensor]):
    """A folder's tensors by name. Tensors in block FP8 are converted to fp32 matrices.

    Errors: UserError for another FP8 format.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        blocks = [-(-size // BLOCK) for size in tensor.shape]
        scale_inv = self._tensors.get(name + SCALE)
        if scale_inv is None or list(scale_inv.shape) != blocks:
            found = "none" if scale_inv is None else f"of shape {list(scale_inv.shape)}"
            raise UserError(
                f"fp8: {name}: scales {found}; expected scales for blocks of {BLOCK} x {BLOCK}: {name + SCALE} {blocks}"
            )
        return dequantize_blocks(tensor, scale_inv.float())

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # Mapping's own method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def is_quantized(name: str) -> bool:
    """Return True if a Hugging Face tensor of this name becomes FP8."""
    return _matrix(name) is not None


def _matrix(name: str) -> Linear | None:
    return linear_of(name) if _WEIGHT.fullmatch(name) else None


def _holds_all_experts(name: str) -> bool:
    found = stack_of(name)
    return found is not None and found[1] in ("", "_blocks")  # _blocks: MXFP4


def check_served(
    name: str, shape: Iterable[int], tensor_parallel: int = 1, expert_tensor: int = 1, head_dim: int = 1
) -> None:
    """Refuse a tensor that SGLang cannot load in block FP8. Errors: UserError that names the tensor.

    The rules are SGLang's: `Fp8LinearMethod.validate_block_quant_shapes`, `Fp8MoEMethod`. tensor_parallel: number of ranks
    that split a matrix outside of experts. expert_tensor: number of ranks that split a matrix of an expert.
    """
    if _holds_all_experts(name):
        raise UserError(
            f"fp8: {name} holds all experts in one tensor, which SGLang does not load in block FP8; use bf16"
        )
    linear = _matrix(name)
    if linear is None:
        return
    rows, columns = shape
    ranks = 1 if linear.cut == "none" else expert_tensor if ".experts." in name else tensor_parallel
    cut, whole = ("columns", columns) if linear.cut == "columns" else ("rows", rows)
    if not linear.whole_blocks and ranks == 1:
        return
    # A rank has at least one key-value head, shared with other ranks if there are more ranks than heads.
    size = max(whole // ranks, head_dim if linear.of == "keys" else 1)
    if size % BLOCK:
        on = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
        raise UserError(f"fp8: {name} has {size} {cut}{on}: SGLang needs multiples of {BLOCK} (whole blocks); use bf16")


def check_architecture(name: str) -> None:
    """Refuse an architecture that SGLang does not serve in block FP8 at any size. Errors: UserError."""
    family = family_named([name])
    if family and family.fp8_scales_lost:
        raise UserError(
            f"fp8: {name}: SGLang {SGLANG} loses the scales of its blocks (it renames them weight_scale); use bf16"
        )


def check_folder(folder: Path, tensor_parallel: int = 1, expert_parallel: int = 1, *, simulate: bool = False) -> None:
    """Refuse a model folder that SGLang would refuse. Only config.json and the files' headers are read. Errors: UserError.

    expert_parallel: number of groups into which the tensor_parallel ranks divide the experts. simulate: True for an engine that
    gets rounded bf16 weights; then blocks may have any size.
    """
    head_dim = 1
    if not simulate:
        config = json.loads((folder / "config.json").read_text())
        check_architecture(config["architectures"][0])
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if not simulate or _holds_all_experts(name):
                    shape = opened.get_slice(name).get_shape()
                    check_served(name, shape, tensor_parallel, tensor_parallel // expert_parallel, head_dim)


def quantization_config(plain: Iterable[str] = ()) -> dict:
    """Return the `quantization_config` for config.json. plain: names of the matrices that are not quantized."""
    modules = [name.removesuffix(".weight") for name in plain]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": modules,
    }


class Export:
    """Quantizes a stream of tensors, from `Model.save_hf` or from a model folder, and completes config.json."""

    def __init__(self, *, writes: bool = True) -> None:
        """Start an export. writes: True if this process writes the tensors; other processes only check names and shapes."""
        self._writes = writes
        self._plain: list[str] = []

    def wrap(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Quantize a stream of tensors. Errors: UserError for a tensor that SGLang would refuse, on every process."""
        checked = self._look(named_tensors)
        return quantized(checked) if self._writes else checked

    def _look(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            check_served(name, tensor.shape)
            if tensor.dim() == 2 and name.endswith(".weight") and not is_quantized(name):
                self._plain.append(name)
            yield name, tensor

    def complete(self, folder: Path) -> None:
        """Add the format and dtype bf16 to the folder's config.json. SGLang's multiplications with FP8 weights return bf16."""
        config = json.loads((folder / "config.json").read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
        plain = [name for name in self._plain if not name.endswith("embed_tokens.weight")]
        config["quantization_config"] = quantization_config(plain)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# -- delayed scaling -----------------------------------------------------------------------------------------------------
# Delayed scaling (fp8_delayed): Transformer Engine's state from earlier passes, protected from passes that only score.
# A tensor's scale is 448 (57344 for e5m2) divided by its largest magnitude (amax) in the previous micro-batch. Every forward
# raises the amaxes, also a forward that only scores; the next training pass turns the amaxes into scales. Without protection,
# the number of scoring passes would change the training, and a model that only scores would keep its initial scales of 1.


Remembered = dict[str, dict[str, Any]]
"""State of delayed scaling by module name: scale and amax_history of forward and backward, number of matrix products."""
_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"


def calibrated(chunks: Iterable[torch.nn.Module]) -> bool:
    """Return True if the chunks have FP8 scales, from a forward pass or from a checkpoint."""
    return any(True for _ in _states(chunks, _FORWARD))


def calibrate() -> None:
    """Compute all models' scales from the last forward pass's amaxes. Modules without amaxes keep their scales. Collective."""
    # The same import as in Megatron.
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # pyright: ignore[reportMissingImports]

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


@contextmanager
def amaxes_kept(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore the amaxes after the block. Forward passes in the block have no gradients and leave the scales unchanged."""
    before = {name: state.amax_history.clone() for name, _, state in _states(chunks, _FORWARD)}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, _, state in _states(chunks, _FORWARD):
                state.amax_history.copy_(before.get(name, torch.zeros(())))


def remembered(chunks: Iterable[torch.nn.Module]) -> Remembered:
    """Return the state of delayed scaling in host memory, for a checkpoint.

    Transformer Engine's own extra state cannot be used: it is a pickle, which Transformer Engine refuses to load.
    """
    found: Remembered = {}
    for key in (_FORWARD, _BACKWARD):
        for name, module, state in _states(chunks, key):
            one = found.setdefault(name, {"products": module.fp8_meta["num_gemms"]})
            one[key] = {"scale": state.scale.cpu(), "amax_history": state.amax_history.cpu()}
    return found


@torch.no_grad()
def restore(
    chunks: Iterable[torch.nn.Module], found: Mapping[str, Mapping[str, Any]], config: TransformerConfig
) -> None:
    """Restore the state that `remembered` returned, in the modules that have an entry. config: the chunks' config."""
    recipe = get_fp8_recipe(config)
    for name, module in _modules(chunks):
        if name not in found:
            continue
        module.fp8_meta.update(num_gemms=found[name]["products"], recipe=recipe)
        module.init_fp8_meta_tensors(recipe)
        for key in (_FORWARD, _BACKWARD):
            for what, tensor in found[name][key].items():
                getattr(module.fp8_meta[key], what).copy_(tensor)


def _modules(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if hasattr(module, "fp8_meta"):
                yield f"{number}.{name}", module


def _states(chunks: Iterable[torch.nn.Module], key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, module, state) of the modules that have amaxes. key: "scaling_fwd" or "scaling_bwd"."""
    for name, module in _modules(chunks):
        state = module.fp8_meta.get(key)
        if hasattr(state, "amax_history"):
            yield name, module, state
