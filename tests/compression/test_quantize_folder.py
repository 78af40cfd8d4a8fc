"""Calibrated FP8 and INT4: scales and codes by their definitions, the folder against the calibrated model, and the cost."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from models.test_fp8 import step
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl.cli import main
from megatron_rl.compression import quantization
from megatron_rl.config import ParallelConfig
from megatron_rl.data.sequence import Sequence
from megatron_rl.errors import UserError
from megatron_rl.models import fp8
from megatron_rl.models.convert import convert
from megatron_rl.models.experts import FakeQuantizer
from megatron_rl.quantize import cost
from tools.make_tiny_model import Sizes, make_tiny_model

FORMATS = ("fp8_tensor", "int4")
SIZES = Sizes(
    hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=256, expert_intermediate=128, experts=8
)
SERVED = ("qwen3_moe", "olmoe", "mixtral", "qwen3", "llama")


def a_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Random weights whose rows, and groups of 128 columns, are of unlike sizes."""
    make_tiny_model(family, folder, sizes=SIZES, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if fp8.is_quantized(name):
            rows, columns = tensor.shape
            weight = torch.randn(rows, columns) * columns**-0.5
            weight *= torch.logspace(-0.5, 0.5, rows)[torch.randperm(rows)][:, None]
            weight *= 3.0 ** torch.arange(columns // 128).repeat_interleave(128)
            tensors[name] = weight.to(dtype)
        elif "embed" in name or "lm_head" in name:
            tensors[name] = (torch.randn(tensor.shape) * 0.1).to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def some_tokens(count: int = 6, length: int = 50) -> list[torch.Tensor]:
    return [torch.randint(5, 500, (1, length)) for _ in range(count)]


@torch.no_grad()
def logits(model, texts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(tokens).logits[0] for tokens in texts])


def calibrated(folder: Path, form: quantization.Format, texts: list[torch.Tensor], keep_layers: tuple[int, ...] = ()):
    quantization.check_source(folder, form, [*keep_layers])
    model = quantization.load(folder)
    quantization.calibrate(model, form, [*keep_layers], lambda: _run(model, texts))
    return model


def _run(model, texts: list[torch.Tensor]) -> None:
    logits(model, texts)


def dequantized(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights in fp32 by their plain names, and FP8's scales of inputs by the same; from the definitions."""
    tensors, weights, inputs = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if tensor.dtype == torch.float8_e4m3fn:
            weights[name] = tensor.float() * tensors[f"{module}.weight_scale"]
            inputs[name] = tensors[f"{module}.input_scale"]
        elif kind == "weight_packed":
            rows, columns = tensors[f"{module}.weight_shape"].tolist()
            codes = (tensor.numpy()[..., None] >> np.arange(0, 32, 4)) & 15
            groups = torch.from_numpy(codes.reshape(rows, columns // 128, 128) - 8).float()
            weights[f"{module}.weight"] = (groups * tensors[f"{module}.weight_scale"].float()[..., None]).flatten(1)
        elif kind not in ("weight_scale", "weight_shape", "input_scale"):
            weights[name] = tensor
    return weights, inputs


@pytest.mark.parametrize("shape", [(1, 128), (64, 256), (7, 1024)])
def test_packing_is_its_definition(shape):
    """Number i of a word is in bits 4 i to 4 i + 3, with 8 added."""
    codes = torch.randint(-8, 8, shape, dtype=torch.int8)
    packed = quantization.pack(codes)
    assert packed.dtype == torch.int32 and packed.shape == (shape[0], shape[1] // 8)
    for row, words in zip(codes.tolist(), packed.tolist(), strict=True):
        for at, word in enumerate(words):
            exact = sum((code + 8) << 4 * i for i, code in enumerate(row[8 * at : 8 * at + 8]))
            assert word % 2**32 == exact
    assert torch.equal(quantization.unpack(packed), codes)


def test_codes_are_the_nearest_and_zeros_stay_zeros():
    weight = torch.randn(32, 384) * torch.logspace(-3, 1, 32)[:, None]
    weight[3, 128:256] = 0
    amax = weight.unflatten(1, (3, 128)).abs().amax(-1)
    scale = quantization.scales(amax)
    assert scale.dtype == torch.bfloat16 and scale[3, 1] == 1
    restored = quantization.dequantize(quantization.pack(quantization.encode(weight, scale)), scale).double()
    half = scale.double().repeat_interleave(128, 1) / 2
    # Rounding the scale down in bf16 (2^-8 at most) leaves up to 7 / 256 of a step above the highest code: below half a step.
    assert ((restored - weight.double()).abs() <= half * (1 + 1e-5)).all() and not restored[3, 128:256].any()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", SERVED)
def test_the_folder_is_the_calibrated_model(family, form, tmp_path):
    """Every matrix but those of a layer that is kept; each within half a step, of its own row, group and scale; and the
    model of these weights, its inputs rounded by the folder's scales, has the log-probs of the calibrated one."""
    folder, texts = a_model(family, tmp_path / "model"), some_tokens()
    model = calibrated(folder, form, texts, keep_layers=(1,))
    expected = logits(model, texts).log_softmax(-1)
    with quantization.plain(model):
        original = logits(model, texts).log_softmax(-1)
    quantization.export(model, form, folder, tmp_path / "hf", [1])
    source, (weights, inputs) = load_file(folder / "model.safetensors"), dequantized(tmp_path / "hf")
    assert weights.keys() == source.keys()
    changed = {name for name, tensor in source.items() if not torch.equal(weights[name], tensor)}
    assert changed == {name for name in source if fp8.is_quantized(name) and ".layers.0." in name}
    written = load_file(tmp_path / "hf" / "model.safetensors")
    for name in changed:
        exact, error = source[name].double(), (weights[name].double() - source[name].double()).abs()
        if form == "fp8_tensor":
            scale = written[name.replace(".weight", ".weight_scale")].double()
            assert exact.abs().max() <= 448 * scale * (1 + 1e-6)
            assert (error <= scale * step(exact / scale) / 2 * (1 + 1e-5)).all(), name
        else:
            scale = written[name.replace(".weight", ".weight_scale")].double()
            amax = exact.unflatten(1, (-1, 128)).abs().amax(-1)
            ratio = 7 * scale / amax
            assert ratio.min() >= 0.5 * (1 - 2**-8) and ratio.max() <= 1.0 + 2**-8, name
            wide = scale.repeat_interleave(128, 1)
            assert (error <= torch.maximum(wide / 2, exact.abs() - 7 * wide) * (1 + 1e-5)).all(), name
    if form == "int4" or family in ("qwen3", "llama"):  # FP8 of fused experts rounds inside of them
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        restored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        for name, scale in inputs.items():

            def rounded(_, args, scale=scale):
                return ((args[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)

            restored.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(rounded)
        found = logits(restored.eval(), texts).log_softmax(-1)
        near, far = ((found - other).abs().median() for other in (expected, original))
        assert near < 1e-5 and far > 100 * near, (near, far)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama"])
def test_scales_of_inputs_are_the_largest_that_calibration_saw(family, tmp_path):
    """Of attention and of what enters the experts, from hooks on the plain model; alike for all experts; shared by what SGLang
    stacks, as are the scales of its weights."""
    folder, texts = a_model(family, tmp_path / "model"), some_tokens()
    quantization.export(calibrated(folder, "fp8_tensor", texts), "fp8_tensor", folder, tmp_path / "hf", [])
    found = load_file(tmp_path / "hf" / "model.safetensors")
    seen: dict[str, float] = {}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in plain.named_modules():
        if name.endswith(("_proj", ".mlp")):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.__setitem__(name, max(seen.get(name, 0.0), float(args[0].abs().max())))
            )
    logits(plain, texts)
    for layer in range(2):
        at = f"model.layers.{layer}"
        for part in "qkvo":
            scale = found[f"{at}.self_attn.{part}_proj.input_scale"]
            assert abs(scale * 448 / seen[f"{at}.self_attn.{part}_proj"] - 1) < 1e-5
        stacks = [[f"{at}.self_attn.{part}_proj" for part in "qkv"]]
        if family == "llama":
            stacks.append([f"{at}.mlp.{part}_proj" for part in ("gate", "up")])
        else:
            names = ("gate_proj", "up_proj", "down_proj") if family == "qwen3_moe" else ("w1", "w3", "w2")
            block = "mlp" if family == "qwen3_moe" else "block_sparse_moe"
            experts = [[f"{at}.{block}.experts.{e}.{name}" for name in names] for e in range(8)]
            stacks += [[gate, up] for gate, up, _ in experts]
            assert len({float(found[f"{down}.input_scale"]) for *_, down in experts}) == 1
            for gate, up, _ in experts:
                for name in (gate, up):
                    assert abs(found[f"{name}.input_scale"] * 448 / seen[f"{at}.mlp"] - 1) < 1e-5
        for stack in stacks:
            assert len({(float(found[f"{n}.weight_scale"]), float(found[f"{n}.input_scale"])) for n in stack}) == 1
            plain_ones = load_file(folder / "model.safetensors")
            largest = max(float(plain_ones[f"{name}.weight"].abs().max()) for name in stack)
            assert abs(found[f"{stack[0]}.weight_scale"] * 448 / largest - 1) < 1e-5


def test_int4_scales_are_chosen_by_the_outputs(tmp_path):
    """With inputs that differ between channels, groups lose less of their outputs than with scales for their largest weight."""
    folder, texts = a_model("llama", tmp_path / "model"), some_tokens()
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name] = 10 ** torch.randn_like(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    seen = []
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layer = plain.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    logits(plain, texts)
    model = calibrated(folder, "int4", texts)
    quantization.export(model, "int4", folder, tmp_path / "hf", [])
    weight, inputs = layer.weight.detach(), torch.cat(seen).unflatten(1, (-1, 128))
    chosen = dequantized(tmp_path / "hf")[0]["model.layers.0.self_attn.q_proj.weight"]
    scale = quantization.scales(weight.unflatten(1, (-1, 128)).abs().amax(-1))
    largest = quantization.dequantize(quantization.pack(quantization.encode(weight, scale)), scale)
    lost = [
        torch.einsum("tgk,ngk->tng", inputs, (w - weight).unflatten(1, (-1, 128))).square().sum(0)
        for w in (chosen, largest)
    ]
    # bf16 scales move a group's error a little after the choice.
    assert (lost[0] <= 1.3 * lost[1]).float().mean() > 0.97 and lost[0].sum() < 0.9 * lost[1].sum()


@pytest.mark.parametrize("form", FORMATS)
def test_without_its_quantizers_the_model_is_the_original(form, tmp_path):
    folder, texts = a_model("qwen3_moe", tmp_path / "model"), some_tokens(2)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    model = calibrated(folder, form, texts[:1])  # some experts have seen no token
    first = logits(model, texts)
    with quantization.plain(model):
        assert torch.equal(logits(model, texts), logits(original, texts))
    assert torch.equal(logits(model, texts), first) and not torch.equal(first, logits(original, texts))


def test_the_cost_is_its_definition(tmp_path):
    """Over the counted labels alone, in fp64 from the logits of both models."""
    folder, texts = a_model("qwen3", tmp_path / "model"), some_tokens(3)
    model = calibrated(folder, "int4", texts)
    sequences, kl, difference, nats = [], [], [], []
    for tokens in texts:
        prompt = int(torch.randint(1, 40, ()))
        mask = np.random.default_rng().random(50 - prompt) < 0.7
        sequences.append(Sequence(tokens=tokens[0].numpy(), prompt_length=prompt, fields={"loss_mask": mask}))
        with quantization.plain(model):
            old = logits(model, [tokens])
        tables = [table[prompt - 1 : -1].double().log_softmax(-1) for table in (old, logits(model, [tokens]))]
        kept = torch.from_numpy(mask)
        kl.append((tables[0].exp() * (tables[0] - tables[1])).sum(-1)[kept])
        old, new = (table.gather(1, tokens[0, prompt:, None])[:, 0][kept] for table in tables)
        difference.append(new - old)
        nats.append(torch.stack([-old, -new]))
    found, d, nats = cost(model, sequences), torch.cat(difference), torch.cat(nats, 1).mean(1)
    assert found["held_out_tokens"] == len(d)
    exact = {"kl": torch.cat(kl).mean(), "abs_mean": d.abs().mean(), "ratio_max": d.max().exp()}
    exact |= {"ratio_min": d.min().exp(), "loss_original": nats[0], "loss_quantized": nats[1]}
    for name, value in exact.items():
        assert abs(found[name] - float(value)) < 1e-4 * abs(float(value)) + 1e-6, name
    assert cost(model, []) == {}


def test_block_fp8_of_convert_is_what_the_fake_quantized_trainer_multiplies_by(tmp_path):
    """precision.train: fp8_blockwise trains for the weights that `convert --quantize fp8` writes, but for ties that fp32
    decides otherwise. (That its layers are products of such weights is in tests/trainer/test_fp8_training.py.)"""
    sizes = Sizes(**vars(SIZES) | {"kv_heads": 4})
    source = make_tiny_model("qwen3_moe", tmp_path / "hf", sizes=sizes, dtype=torch.bfloat16)
    convert(source, tmp_path / "fp8", ParallelConfig(), quantize="fp8")
    trainer, codes = FakeQuantizer(fp8.BLOCK), load_file(tmp_path / "fp8" / "model.safetensors")
    other = numbers = 0
    for name, tensor in load_file(source / "model.safetensors").items():
        if fp8.is_quantized(name):
            served = fp8.dequantize_blocks(codes[name], codes[name + fp8.SCALE]).bfloat16()
            trained = trainer.weight(tensor)
            # Neighbors in e4m3, whose step is the same among the smallest numbers.
            smallest = float(codes[name + fp8.SCALE].max()) * 2**-9
            torch.testing.assert_close(trained, served, rtol=2**-3 * 1.01, atol=smallest * 1.01)
            other, numbers = other + int((trained != served).sum()), numbers + served.numel()
    print(f"{other} of {numbers} weights differ")
    assert other < 2e-3 * numbers


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """A run of the command, in this process."""
    monkeypatch.setattr("megatron_rl.distributed.parallel.shutdown", _forget_parallel_state)
    rows = [{"text": " ".join(random.choices(["one", "two", "three", "four"], k=40))} for _ in range(12)]
    for split, chosen in (("train", rows[:8]), ("eval", rows[8:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    a_model("qwen3_moe", tmp_path / "model")
    config = {
        "name": "q",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"task": "file", "path": str(tmp_path / "train.jsonl"), "text_key": "text"},
        "rollout": {"context_length": 64, "max_new_tokens": 8},
        "quantize": {"calibration_samples": 5},
    }
    config["data"]["eval_path"] = str(tmp_path / "eval.jsonl")
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    yield ["quantize", str(tmp_path / "c.yaml")]
    _forget_parallel_state()


def _forget_parallel_state() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("form", FORMATS)
def test_command(form, arguments, tmp_path, capsys):
    assert main([*arguments, "--quantize.format", form, "--quantize.keep_layers", "[1]"]) == 0
    run = tmp_path / "runs" / "q"
    report = json.loads((run / "quantization.json").read_text())
    assert report["format"] == form and report["calibration_sequences"] == 5 and report["held_out_tokens"] > 0
    assert 0 < report["kl"] < 1 and report["ratio_min"] <= 1 <= report["ratio_max"]
    assert json.dumps(report, indent=2) in capsys.readouterr().out
    assert (run / "hf" / "tokenizer.json").is_file() and not (run / "checkpoints").exists()
    settings = json.loads((run / "hf" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == {"fp8_tensor": "modelopt", "int4": "compressed-tensors"}[form]
    assert any("layers.1" in name.replace("\\", "") for name in settings["ignore"])
    assert main(arguments) == 2
    assert "hf exists; remove it, or choose another name" in capsys.readouterr().err


REFUSALS = {
    "layer": (["--quantize.keep_layers", "[2]"], "quantize.keep_layers: no layer 2; .* has 0 to 1"),
    "no data": (["--data.path", "nowhere.jsonl"], "nowhere.jsonl"),
    "format": (["--quantize.format", "int8"], "quantize.format"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_of_the_command(case, arguments, tmp_path, capsys):
    overrides, words = REFUSALS[case]
    assert main([*arguments, *overrides]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatron-rl: error:")]
    assert re.search(words, line), line
    assert not (tmp_path / "runs" / "q" / "hf").exists()


def test_refused_models(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path / "qwen3", sizes=Sizes(layers=1, hidden=64, intermediate=96))
    with pytest.raises(UserError, match=r"\d+ x \d+: for int4, SGLang needs multiples of 64 x 128; use .*fp8_tensor"):
        quantization.check_source(folder, "int4", [])
    quantization.check_source(folder, "fp8_tensor", [])
    quantization.check_source(folder, "int4", [0])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UserError, match=r"is quantized already \(awq\); set model.path to the plain weights"):
        quantization.check_source(folder, "int4", [])
    gpt_oss = make_tiny_model("gpt_oss", tmp_path / "gpt_oss", sizes=Sizes(layers=1))
    with pytest.raises(UserError, match="GptOssForCausalLM: SGLang only reads it in MXFP4"):
        quantization.check_source(gpt_oss, "fp8_tensor", [])


@pytest.mark.parametrize("form", FORMATS)
def test_the_folder_is_not_taken_for_plain_weights(form, tmp_path):
    """The trainer reads block FP8 alone, and says so of these."""
    folder, texts = a_model("qwen3", tmp_path / "model"), some_tokens(1)
    quantization.export(calibrated(folder, form, texts), form, folder, tmp_path / "hf", [])
    method = {"fp8_tensor": "modelopt", "int4": "compressed-tensors"}[form]
    with pytest.raises(UserError, match=rf"hf: is quantized \({method}\), for serving; use the unquantized weights"):
        convert(tmp_path / "hf", tmp_path / "checkpoint", ParallelConfig())
    assert not (tmp_path / "checkpoint").exists()
