"""Post-training quantization by nvidia-modelopt: a Hugging Face model calibrated on data, and written as SGLang loads it.

fp8_tensor: one scale for each weight matrix, and one for each layer's inputs, the largest magnitude that calibration saw
(ModelOpt's FP8_DEFAULT_CFG and its own export). int4: weights alone, in the layout of `int4.py`; a group's scale stands for
half to all of its largest magnitude, wherever the error of the outputs on the calibration data is least (ModelOpt's
INT4_BLOCKWISE_WEIGHT_ONLY_CFG with local_hessian). Attention, MLPs and experts are quantized; router, embedding, head and
norms stay. The model is transformers': experts are fused there, and ModelOpt has a quantizer for each of them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from megatron_rl.errors import UserError
from megatron_rl.models import fp8, int4
from megatron_rl.models.hf_folder import check_weight_files, copy_metadata, read_weights, write_weights
from megatron_rl.models.parallel_check import architecture, is_classifier, read_hf_config

Format = Literal["fp8_tensor", "int4"]
_MULTIPLES: dict[str, tuple[int, int]] = {"fp8_tensor": (16, 16), "int4": (64, 128)}
"""Rows and columns of which SGLang's kernels take multiples: torch._scaled_mm, Marlin."""
_RENAMED = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Parts of the names of Mixtral's weights in files, and in transformers."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")


def check_source(folder: Path, form: Format, keep_layers: list[int]) -> None:
    """Refuse a folder that cannot be quantized, or would not be served then, by its config and its files' headers.

    Errors: UserError naming the folder, the key or the tensor.
    """
    config = read_hf_config(folder)
    check_weight_files(folder)
    if quantized := getattr(config, "quantization_config", None):
        raise UserError(
            f"quantize: {folder} is quantized already ({quantized['quant_method']}); set model.path to the plain weights"
        )
    if is_classifier(config) or architecture(config) == "GptOssForCausalLM":
        what = (
            "has a head of one number" if is_classifier(config) else "GptOssForCausalLM: SGLang reads MXFP4 of it alone"
        )
        raise UserError(f"quantize: {folder}: {what}; serve it as it is")
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
                        f"quantize: {name} is {shape[0]} x {shape[1]}: SGLang takes {form} of multiples of {rows} x {columns};"
                        f" {'use quantize.format: fp8_tensor' if form == 'int4' else 'use convert --quantize fp8'}, or serve it"
                        " as it is"
                    )


def load(folder: Path) -> PreTrainedModel:
    """The folder's model for passes: in its own dtype, whole, on a GPU where there is one."""
    disable_progress_bar()
    # ModelOpt sees an expert's products only where they are made one after the other.
    options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "experts_implementation": "eager"}
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def calibrate(model: PreTrainedModel, form: Format, keep_layers: list[int], passes: Callable[[], None]) -> None:
    """Put quantizers into the model, with scales from `passes`, which runs it over the calibration data. Weights stay.

    From here on the model computes as quantized: weights, and with fp8_tensor inputs, are rounded before each product.
    Errors: UserError where no product of a quantized layer was seen.
    """
    with _quiet():
        import modelopt.torch.quantization as mtq  # seconds, for who needs it

        recipe: dict[str, Any] = copy.deepcopy(
            mtq.FP8_DEFAULT_CFG if form == "fp8_tensor" else mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG
        )
        if form == "int4":
            search = {"start_multiplier": 0.5, "stop_multiplier": 1.0, "step_size": 0.05, "fp8_scale_sweep": False}
            recipe["algorithm"] = {"method": "local_hessian", "block_size": int4.GROUP, **search}
        for layer in keep_layers:
            recipe["quant_cfg"].append({"quantizer_name": f"model.layers.{layer}.*", "enable": False})
        mtq.quantize(model, recipe, lambda _: passes())
    if form == "int4":
        for quantizer in _quantizers(model):
            # What SGLang multiplies by is bf16.
            quantizer.amax = int4.HIGHEST * int4.scales(quantizer.amax).float()


@contextlib.contextmanager
def plain(model: torch.nn.Module) -> Iterator[None]:
    """The calibrated model computes as it did before, inside."""
    quantizers = list(_quantizers(model))
    for quantizer in quantizers:
        quantizer.disable()
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.enable()


def export(model: PreTrainedModel, form: Format, source: Path, out: Path, keep_layers: list[int]) -> None:
    """Write the calibrated model beside the tokenizer of `source`; the folder appears whole or not at all. The model is spent.

    Errors: UserError where it cannot be written.
    """
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    kept = [f"model.layers.{layer}" for layer in keep_layers]
    try:
        if form == "fp8_tensor":
            settings = _export_fp8(model, partial, [f"{layer}.*" for layer in kept])
            copy_metadata(source, partial, torch.bfloat16, {"quantization_config": settings})
        else:
            others = ["lm_head", r"re:.*\.gate$", *(rf"re:{re.escape(layer)}\..*" for layer in kept)]
            copy_metadata(source, partial, torch.bfloat16, {"quantization_config": int4.quantization_config(others)})
            write_weights(partial, int4.quantized(read_weights(source), _Scales(model)))
        partial.rename(out)
    except OSError as error:
        raise UserError(f"model folder {out}: could not be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _export_fp8(model: PreTrainedModel, folder: Path, kept: list[str]) -> dict[str, Any]:
    """By ModelOpt; returns config.json's `quantization_config`. kept: patterns of what is plain beside what ModelOpt names."""
    with _quiet():
        from modelopt.torch.export import export_hf_checkpoint

        export_hf_checkpoint(model, export_dir=folder)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings["ignore"] += kept
    file = folder / "hf_quant_config.json"
    nested = json.loads(file.read_text())
    nested["quantization"]["exclude_modules"] += kept
    file.write_text(json.dumps(nested, indent=2) + "\n")
    return settings


class _Scales(dict[str, Tensor]):
    """Scales of INT4 weights by the names of files, found when they are asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: dict[str, Any] = dict(model.named_modules())

    def get(self, name: str, default: Any = None) -> Any:
        """[N, K / 128] of a weight; None for a tensor that is not quantized."""
        if not fp8.is_quantized(name):
            return default
        module = ".".join(_RENAMED.get(part, part) for part in name.removesuffix(".weight").split("."))
        expert = _EXPERT.fullmatch(module)
        if expert:
            experts, part = self._modules[expert[1]], "down_proj" if expert[3] == "down" else "gate_up_proj"
            quantizer = getattr(experts, f"{part}_weight_quantizers")[int(expert[2])]
            rows = getattr(experts, part).shape[1]
        else:
            quantizer, rows = self._modules[module].weight_quantizer, self._modules[module].weight.shape[0]
        if not quantizer.is_enabled:
            return default
        found = int4.scales(quantizer.amax).reshape(rows, -1).cpu()
        if expert and expert[3] != "down":
            found = found.chunk(2)[expert[3] == "up"]
        return found.contiguous()


def _quantizers(model: torch.nn.Module) -> Iterator[Any]:
    from modelopt.torch.quantization.nn import TensorQuantizer

    return (module for module in model.modules() if isinstance(module, TensorQuantizer) and module.is_enabled)


def _layer(name: str) -> int:
    return int(name.split(".")[2])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt prints its progress, and warns of plugins that are not needed."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
