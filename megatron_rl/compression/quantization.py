"""Post-training quantization with nvidia-modelopt: calibrate a Hugging Face model on data, and write it in SGLang's format.

fp8_tensor: each weight matrix has one scale, and so have the inputs of each layer. A scale follows from the largest magnitude
in the calibration (ModelOpt's FP8_DEFAULT_CFG, in the layout of ModelOpt's own export).
int4: only weights are quantized, in the layout of compressed-tensors. With a group's scale, the codes cover between half and
all of the group's largest magnitude. The chosen scale minimizes the error of the outputs on the calibration data (ModelOpt's
INT4_BLOCKWISE_WEIGHT_ONLY_CFG with local_hessian).

Attention, MLPs and experts are quantized; router, embedding, head and norms are not. The model is a transformers model with
fused experts. ModelOpt has a quantizer for each expert.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from megatron_rl.errors import UserError
from megatron_rl.models import fp8
from megatron_rl.models.families import Moe, family_of, is_classifier
from megatron_rl.models.hf_folder import check_weight_files, copy_metadata, read_weights, whole_folder, write_weights
from megatron_rl.models.parallel_check import read_hf_config

# -- int4 ----------------------------------------------------------------------------------------------------------------
# Weights in INT4 in SGLang's format: compressed-tensors' `pack-quantized`, symmetric, one scale for 128 inputs of a row.
# `X.weight_packed` int32 [N, K / 8] has eight codes per number, the first code in the lowest four bits, each with 8 added.
# `X.weight_scale` is bf16 [N, K / 128]; `X.weight_shape` is int64 [2] = [N, K]. A weight is code * scale; codes are -8 to 7.
# ModelOpt's own INT4 export packs for TensorRT-LLM, which SGLang 0.5.23 does not read.


GROUP = 128
HIGHEST = 7
"""Largest 4-bit code, which represents a group's largest magnitude. The lowest code is -8."""
_PACKED = 8
"""Number of 4-bit codes in an int32."""
_TINY = 2.0**-24


def scales(amax: Tensor) -> Tensor:
    """Return the groups' scales, in bf16 as SGLang stores them. amax: largest magnitudes of the groups; zeros get scale 1."""
    return torch.where(amax > _TINY, amax.float() / HIGHEST, 1.0).bfloat16()


def encode(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the 4-bit codes, int8 [N, K], nearest to a weight [N, K]. scale: [N, K / 128]."""
    # Multiply by the inverse, like ModelOpt: bf16 weights and scales have many ties, which division may round otherwise.
    groups = weight.float().unflatten(-1, (-1, GROUP)) * (1 / scale.float()[..., None])
    return groups.round().clamp(-HIGHEST - 1, HIGHEST).to(torch.int8).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, int8 [N, K], into int32 [N, K / 8]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    words = (codes.int() + HIGHEST + 1).unflatten(-1, (-1, _PACKED)) << shifts
    return words.sum(-1, dtype=torch.int32)  # bits do not overlap; the eighth code may set the sign


def unpack(packed: Tensor) -> Tensor:
    """Unpack 4-bit codes from int32; the inverse of `pack`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed[..., None] >> shifts & 15) - HIGHEST - 1).to(torch.int8).flatten(-2)


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """Return the weight, fp32 [N, K], that packed codes and scales represent."""
    return (unpack(packed).float().unflatten(-1, (-1, GROUP)) * scale.float()[..., None]).flatten(-2)


def int4_quantized(
    named_tensors: Iterable[tuple[str, Tensor]], scales_of: Callable[[str, int], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors with int4 weights. A quantized X.weight becomes three tensors.

    scales_of: (name, number of columns) -> scales, or None to leave the tensor unquantized.
    """
    for name, tensor in named_tensors:
        scale = scales_of(name, tensor.shape[-1])
        if scale is None:
            yield name, tensor
            continue
        module = name.removesuffix(".weight")
        yield f"{module}.weight_packed", pack(encode(tensor, scale))
        yield f"{module}.weight_scale", scale
        yield f"{module}.weight_shape", torch.tensor(tensor.shape)


def quantization_config(ignore: list[str]) -> dict:
    """Return the `quantization_config` for config.json. ignore: unquantized linear layers, as names or as re:PATTERN."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False, "observer": "minmax"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


# -- ptq -----------------------------------------------------------------------------------------------------------------


Format = Literal["fp8_tensor", "int4"]
_MULTIPLES: dict[str, tuple[int, int]] = {"fp8_tensor": (16, 16), "int4": (64, 128)}
"""SGLang's kernels (torch._scaled_mm and Marlin) need multiples of these numbers of rows and columns."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")


def check_source(folder: Path, form: Format, keep_layers: list[int]) -> None:
    """Raise UserError if a folder cannot be quantized, or if SGLang could not serve the result.

    The check reads the config and the headers of the weight files. The error names the folder, the key or the tensor.
    """
    config = read_hf_config(folder)
    check_weight_files(folder)
    if quantized := getattr(config, "quantization_config", None):
        raise UserError(
            f"quantize: {folder} is quantized already ({quantized['quant_method']}); set model.path to the plain weights"
        )
    family = family_of(config)
    if is_classifier(config) or family.not_quantized:
        what = "has a head of one number" if is_classifier(config) else f"{family.architecture}: {family.not_quantized}"
        raise UserError(f"quantize: {folder}: {what}; serve it unchanged")
    layers: int = config.num_hidden_layers
    if wrong := [layer for layer in keep_layers if not 0 <= layer < layers]:
        raise UserError(f"config: quantize.keep_layers: no layer {wrong[0]}; {folder} has 0 to {layers - 1}")
    rows, columns = _MULTIPLES[form]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if not fp8.is_quantized(name) or _layer(name) in keep_layers:
                    continue
                shape = opened.get_slice(name).get_shape()
                if shape[0] % rows or shape[1] % columns:
                    raise UserError(
                        f"quantize: {name} is {shape[0]} x {shape[1]}: for {form}, SGLang needs multiples of {rows} x"
                        f" {columns}; {'use quantize.format: fp8_tensor' if form == 'int4' else 'use convert --quantize fp8'},"
                        " or serve it unchanged"
                    )


def load(folder: Path) -> PreTrainedModel:
    """Load the folder's model for forward passes, in the folder's dtype, and on GPUs if the machine has any."""
    disable_progress_bar()
    # ModelOpt only sees an expert's products if they are computed one by one.
    options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "experts_implementation": "eager"}
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options).eval()


def calibrate(model: PreTrainedModel, form: Format, keep_layers: list[int], passes: Callable[[], None]) -> None:
    """Insert quantizers into the model. Their scales come from `passes`, which runs the model over the calibration data.

    The weights stay unchanged. After calibration, the model computes as if quantized: weights, and with fp8_tensor also inputs,
    are rounded before each matrix multiplication. Errors: UserError if `passes` never used a quantized layer.
    """
    with _quiet():
        import modelopt.torch.quantization as mtq  # takes seconds to import

        recipe: dict[str, Any] = copy.deepcopy(
            mtq.FP8_DEFAULT_CFG if form == "fp8_tensor" else mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG
        )
        if form == "int4":
            search = {"start_multiplier": 0.5, "stop_multiplier": 1.0, "step_size": 0.05, "fp8_scale_sweep": False}
            recipe["algorithm"] = {"method": "local_hessian", "block_size": GROUP, **search}
        for layer in keep_layers:
            recipe["quant_cfg"].append({"quantizer_name": f"model.layers.{layer}.*", "enable": False})
        mtq.quantize(model, recipe, lambda _: passes())
    if form == "fp8_tensor":
        _share_scales(model)
    else:
        for quantizer in _quantizers(model):
            # SGLang multiplies by bf16 scales.
            quantizer.amax = HIGHEST * scales(quantizer.amax).float()


@contextlib.contextmanager
def plain(model: torch.nn.Module) -> Iterator[None]:
    """Let the calibrated model compute without quantization within the block."""
    quantizers = list(_quantizers(model))
    for quantizer in quantizers:
        quantizer.disable()
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.enable()


def export(model: PreTrainedModel, form: Format, source: Path, out: Path, keep_layers: list[int]) -> None:
    """Write the model folder with the source's tensors, quantized like the calibrated model, and with its tokenizer.

    `out` is a complete folder or does not exist. Errors: UserError if the folder cannot be written.
    """
    # ModelOpt's own export_hf_checkpoint is not used. It divides bf16 weights by their scale in bf16, and so rounds one in
    # sixteen weights to the wrong neighbor in e4m3. Its INT4 is packed for TensorRT-LLM.
    # Patterns of layers have no prefix, because SGLang's Mixtral leaves out "model.".
    layers = _Layers(model)
    router = (family_of(model.config).moe or Moe()).router
    if form == "fp8_tensor":
        plain_ones = ["lm_head", f"*.{router}", *(f"*layers.{layer}.*" for layer in keep_layers)]
        settings, tensors = _fp8_settings(plain_ones), _to_fp8(read_weights(source), layers)
    else:
        plain_ones = ["lm_head", rf"re:.*\.{router}$", *(rf"re:.*\blayers\.{layer}\..*" for layer in keep_layers)]
        settings, tensors = quantization_config(plain_ones), int4_quantized(read_weights(source), layers.int4)
    with whole_folder(out) as partial:
        copy_metadata(source, partial, torch.bfloat16, {"quantization_config": settings})
        write_weights(partial, tensors)


def _to_fp8(named_tensors: Iterable[tuple[str, Tensor]], layers: _Layers) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with FP8 weights. A quantized X.weight becomes e4m3, with X.weight_scale and X.input_scale, fp32 []."""
    for name, tensor in named_tensors:
        layer = layers.find(name)
        if layer is None:
            yield name, tensor
            continue
        of_weights, of_inputs = (_inverse_scale(quantizer.amax) for quantizer in (layer.weights, layer.inputs))
        yield name, (tensor.float() * of_weights).clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX).to(torch.float8_e4m3fn)
        module = name.removesuffix(".weight")
        yield f"{module}.weight_scale", 1 / of_weights
        yield f"{module}.input_scale", 1 / of_inputs


def _inverse_scale(amax: Tensor) -> Tensor:
    """Return 448 / amax, fp32 [].

    ModelOpt's fake quantization multiplies by this number. A division could round some ties differently.
    """
    amax = amax.detach().float().cpu().reshape([])
    return torch.where(amax > fp8.TINY, fp8.E4M3_MAX / amax, 1.0)


def _fp8_settings(plain_ones: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` that ModelOpt would write. plain_ones: patterns of layers that are not quantized."""
    of_tensor = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": of_tensor, "weights": of_tensor, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "config_groups": {"group_0": group},
        "ignore": plain_ones,
        "producer": {"name": "modelopt", "version": importlib.metadata.version("nvidia-modelopt")},
    }


def _share_scales(model: PreTrainedModel) -> None:
    """Set one weight scale for matrices that SGLang stacks. Otherwise SGLang requantizes the matrices with smaller scales."""
    together: dict[str, list[str]] = defaultdict(list)
    for name, linear in family_of(model.config).linears.items():
        if linear.stacked_in:
            together[linear.stacked_in].append(name)
    for module in model.modules():
        for names in together.values():
            stacked: list[Any] = [getattr(module, name) for name in names if hasattr(module, name)]
            quantizers = [layer.weight_quantizer for layer in stacked if hasattr(layer, "weight_quantizer")]
            if len(quantizers) > 1 and quantizers[0].is_enabled:
                largest = torch.stack([quantizer.amax for quantizer in quantizers]).max()
                for quantizer in quantizers:
                    quantizer.amax = largest


@dataclass(frozen=True)
class _Layer:
    weights: Any
    inputs: Any
    rows: slice
    """Rows of the layer's weight in the (fused) matrix that its quantizer processes."""


class _Layers:
    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._moe = family_of(model.config).moe or Moe()

    def find(self, name: str) -> _Layer | None:
        """Return the layer that a tensor belongs to; None if the tensor is not quantized."""
        if not fp8.is_quantized(name):
            return None
        module = name.removesuffix(".weight").replace(f".{self._moe.block}.", ".mlp.")  # the name in transformers
        if expert := _EXPERT.fullmatch(module):
            experts, (index, part) = self._modules[expert[1]], expert.group(2, 3)
            down = self._moe.linears[part].cut == "columns"
            fused = "down_proj" if down else "gate_up_proj"  # transformers' names; those in files may differ
            half = getattr(experts, fused).shape[1] // 2
            rows = slice(None) if down else (slice(half), slice(half, None))[self._moe.linears[part].place]
            weights = getattr(experts, f"{fused}_weight_quantizers")[int(index)]
            layer = _Layer(weights, getattr(experts, f"{fused}_input_quantizer"), rows)
        else:
            linear = self._modules[module]
            layer = _Layer(linear.weight_quantizer, linear.input_quantizer, slice(None))
        return layer if layer.weights.is_enabled else None

    def int4(self, name: str, columns: int) -> Tensor | None:
        """Return scales [N, columns / 128] of a weight [N, columns]; None if the weight is not quantized."""
        layer = self.find(name)
        if layer is None:
            return None
        return scales(layer.weights.amax).reshape(-1, columns // GROUP)[layer.rows].cpu().contiguous()


def _quantizers(model: torch.nn.Module) -> Iterator[Any]:
    from modelopt.torch.quantization.nn import TensorQuantizer

    return (module for module in model.modules() if isinstance(module, TensorQuantizer) and module.is_enabled)


def _layer(name: str) -> int:
    return int(name.split(".")[2])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress ModelOpt's progress lines and its warnings about plugins that are not needed."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
