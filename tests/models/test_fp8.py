"""Block FP8 weights against the definition in fp64, the layout of the export, and what SGLang would refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from megatron_rl.cli import main
from megatron_rl.config import ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.models import families, fp8
from megatron_rl.models.convert import convert
from tools.make_tiny_model import FAMILIES, Sizes, make_tiny_model

ALONE = ParallelConfig()
WHOLE_BLOCKS = Sizes(
    hidden=128, layers=2, heads=4, kv_heads=4, head_dim=32, intermediate=128, expert_intermediate=128, experts=2
)
"""Of which SGLang takes every matrix."""


def e4m3_values() -> torch.Tensor:
    """[127] fp64: 0 and all positive values of e4m3, from the definition: 4 bits of exponent (bias 7), 3 of mantissa."""
    subnormal = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (e - 7) for e in range(1, 16) for mantissa in range(8)]
    return torch.tensor(subnormal + normal[:-1], dtype=torch.float64)  # the largest code is NaN


def step(values: torch.Tensor) -> torch.Tensor:
    """Distance of neighbors in e4m3 at each magnitude."""
    exponent = values.abs().clamp(min=2.0**-6).log2().floor()
    return 2.0 ** (exponent - 3)


def blocks_of(tensor: torch.Tensor, block: int):
    for i in range(0, tensor.shape[0], block):
        for j in range(0, tensor.shape[1], block):
            yield (i // block, j // block), (slice(i, i + block), slice(j, j + block))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (1, 1), (129, 127), (64, 640)])
def test_quantized_blocks_are_the_nearest_e4m3(shape, dtype):
    weight = (torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]).to(dtype)
    weight[-1, -1] = 0.5  # in the last, smaller block
    quantized, scale_inv = fp8.quantize_blocks(weight)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == shape and quantized.is_contiguous()
    assert scale_inv.dtype == torch.float32 and scale_inv.shape == tuple(-(-n // 128) for n in shape)
    grid = e4m3_values()
    restored = fp8.dequantize_blocks(quantized, scale_inv)
    for index, block in blocks_of(weight, 128):
        exact, scale = weight[block].double(), scale_inv[index].double()
        assert abs(scale * 448 / exact.abs().max() - 1) < 1e-6
        scaled = exact / scale
        nearest = (scaled.abs()[..., None] - grid).abs().min(-1).values
        error = (quantized[block].double() - scaled).abs()
        assert (error <= nearest + 1e-5 * scaled.abs()).all()  # fp32 may decide a tie otherwise than fp64
        assert ((restored[block].double() - exact).abs() <= scale * step(scaled) * 0.5 * (1 + 1e-5)).all()
    again, scale_again = fp8.quantize_blocks(restored)
    torch.testing.assert_close(scale_again, scale_inv, rtol=1e-6, atol=0)
    assert torch.equal(again.float(), quantized.float())


def test_zeros_and_the_tiniest_block():
    weight = torch.zeros(200, 130)
    weight[:128, :128] = 1e-9
    weight[199, 129] = 3.0
    quantized, scale_inv = fp8.quantize_blocks(weight)
    assert torch.equal(scale_inv[0], torch.ones(2)) and scale_inv[1, 0] == 1
    restored = fp8.dequantize_blocks(quantized, scale_inv)
    assert abs(restored[199, 129] - 3.0) < 1e-6 and restored.count_nonzero() == 1


def test_which_tensors_are_quantized_in_every_family(tmp_path):
    """All matrices of attention, MLPs and experts; router, embedding, head and norms never."""
    for family in FAMILIES:
        names = list(load_file(make_tiny_model(family, tmp_path / family, sizes=Sizes(layers=2)) / "model.safetensors"))
        taken = {name for name in names if fp8.is_quantized(name)}
        kept = {name for name in names if name not in taken and not name.endswith("bias")}
        assert all(re.search(r"(_proj|_with_mqa|\.w[123])\.weight$", name) for name in taken), taken
        kinds = r"norm\.weight|embed_tokens|lm_head|(gate|router)\.weight|sinks|experts\.(gate_up|down)_proj$"
        assert all(re.search(kinds, name) for name in kept), (family, kept)
    assert not fp8.is_quantized("model.layers.0.mlp.gate.predictor.weight")


def test_two_families_that_disagree_on_a_name_are_told():
    """A stream of tensors names no family, so that a name means the same in all of them."""
    with pytest.raises(ValueError, match="two model families disagree on down_proj"):
        families.together(
            [families.FAMILIES["Qwen3ForCausalLM"].linears, {"down_proj": families.Linear("rows", "latents")}]
        )


def test_a_stream_of_pairs_and_a_simulated_one():
    name, router = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight"
    tensors = {router: torch.randn(8, 128), name: torch.randn(128, 256)}
    pairs = dict(fp8.quantized(tensors.items()))
    assert list(pairs) == [router, name, name + "_scale_inv"] and pairs[router] is tensors[router]
    restored = fp8.dequantize_blocks(pairs[name], pairs[name + "_scale_inv"])
    rounded = dict(fp8.quantized(tensors.items(), simulate=True))
    assert list(rounded) == [router, name] and torch.equal(rounded[name], restored.bfloat16())
    assert rounded[router] is tensors[router]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3"])
def test_convert_to_fp8(family, tmp_path):
    """From a Hugging Face folder and from a checkpoint: the same files, which are the weights within half a step."""
    source = make_tiny_model(family, tmp_path / "hf", sizes=WHOLE_BLOCKS, dtype=torch.bfloat16)
    convert(source, tmp_path / "direct", ALONE, quantize="fp8")
    convert(source, tmp_path / "checkpoint", ALONE)
    convert(tmp_path / "checkpoint", tmp_path / "fp8", ALONE, quantize="fp8")
    plain, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "direct"))
    written = load_file(tmp_path / "fp8" / "model.safetensors")
    assert written.keys() == direct.keys()
    assert all(torch.equal(written[name].float(), tensor.float()) for name, tensor in direct.items())
    for name, tensor in plain.items():
        if not fp8.is_quantized(name):
            assert torch.equal(written.pop(name), tensor)
            continue
        quantized, scale_inv = written.pop(name), written.pop(name + "_scale_inv")
        assert quantized.dtype == torch.float8_e4m3fn and scale_inv.dtype == torch.float32
        error = (fp8.dequantize_blocks(quantized, scale_inv) - tensor.float()).abs()
        assert error.max() <= 16.01 * scale_inv.max()  # half a step at 448
    assert not written
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("direct", "fp8")]
    assert all(
        c["quantization_config"].items()
        >= {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }.items()
        for c in configs
    )
    skipped = [set(c["quantization_config"]["modules_to_not_convert"]) for c in configs]
    assert skipped[0] == skipped[1] and "lm_head" in skipped[0]
    assert ("model.layers.1.mlp.gate" in skipped[0]) == (family in ("qwen3_moe", "deepseek_v3"))
    assert (tmp_path / "fp8" / "tokenizer.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "direct", "checkpoint", "fp8"}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3"])
def test_fp8_is_read_back_as_plain_weights(family, tmp_path):
    """What troubleshooting says of a folder that is quantized already."""
    source = make_tiny_model(family, tmp_path / "hf", sizes=WHOLE_BLOCKS, dtype=torch.float32)
    convert(source, tmp_path / "fp8", ALONE, quantize="fp8")
    convert(tmp_path / "fp8", tmp_path / "checkpoint", ALONE)
    convert(tmp_path / "checkpoint", tmp_path / "plain", ALONE)
    plain, codes = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fp8"))
    for name, tensor in plain.items():
        expected = codes[name]
        if fp8.is_quantized(name):
            expected = fp8.dequantize_blocks(expected, codes[name + "_scale_inv"])
        assert torch.equal(tensor.float(), expected.to(tensor.dtype).float()), name
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    convert(tmp_path / "plain", tmp_path / "again", ALONE, quantize="fp8")


@pytest.mark.parametrize("wrong", ["lost", "other blocks"])
def test_fp8_of_another_layout_is_not_read(wrong, tmp_path):
    source = make_tiny_model("qwen3_moe", tmp_path / "hf", sizes=WHOLE_BLOCKS)
    convert(source, tmp_path / "fp8", ALONE, quantize="fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.k_proj.weight"
    scale = tensors.pop(f"{name}_scale_inv")
    if wrong == "other blocks":
        tensors[f"{name}_scale_inv"] = scale.repeat(2, 2)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        UserError, match=rf"{name}: scales (none|of shape \[2, 2\]); expected scales for blocks of 128 x 128"
    ):
        convert(tmp_path / "fp8", tmp_path / "out", ALONE)
    assert not (tmp_path / "out").exists()


REFUSED = {
    "experts": (
        "qwen3_moe",
        {"expert_intermediate": 96},
        r"experts.0.\w+_proj.weight has 96 rows: SGLang needs multiples",
    ),
    "key heads": ("qwen3", {"kv_heads": 2}, r"self_attn.k_proj.weight has 64 rows"),
    "stacked experts": ("gpt_oss", {}, r"mlp.experts.\w+_proj holds all experts in one tensor"),
    "llama": ("llama", {}, "LlamaForCausalLM: SGLang 0.5.23 loses the scales"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_sglang_would_refuse(case, tmp_path):
    family, sizes, words = REFUSED[case]
    source = make_tiny_model(family, tmp_path / "hf", sizes=Sizes(**vars(WHOLE_BLOCKS) | sizes))
    convert(source, tmp_path / "checkpoint", ALONE)
    for place in (source, tmp_path / "checkpoint"):
        with pytest.raises(UserError, match=words) as error:
            convert(place, tmp_path / "out", ALONE, quantize="fp8")
        assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "checkpoint"}
    with pytest.raises(UserError, match=words):
        fp8.check_folder(source)


def test_conversion_on_two_processes(tmp_path):
    """The same bytes as from one, and a refusal that reaches both; neither leaves anything behind."""
    whole = make_tiny_model("qwen3_moe", tmp_path / "whole", sizes=WHOLE_BLOCKS, dtype=torch.bfloat16)
    small = make_tiny_model("qwen3_moe", tmp_path / "small", sizes=Sizes(layers=1))
    calls = [
        ("quantize", (str(model), f"{model}.checkpoint", f"{model}.fp8", layout))
        for model, layout in ((whole, {"tensor": 2}), (small, {"expert": 2}))
    ]
    first, second = run_ranks(2, "models.round_trips:several", (calls,), timeout=200)
    assert first == second and first[0] == (True, "")
    assert not first[1][0] and "SGLang needs multiples of 128" in first[1][1]
    convert(whole, tmp_path / "alone", ALONE, quantize="fp8")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "whole.fp8"))
    assert one.keys() == two.keys() and all(torch.equal(two[name].float(), t.float()) for name, t in one.items())


def test_command(tmp_path, capsys):
    source = make_tiny_model("qwen3", tmp_path / "hf", sizes=WHOLE_BLOCKS)
    assert main(["convert", str(source), str(tmp_path / "out"), "--quantize", "fp8"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert main(["convert", str(source), str(tmp_path / "out"), "--quantize", "fp8"]) == 2
    assert "exists; remove it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", str(source), str(tmp_path / "other"), "--quantize", "int4"])
    assert "invalid choice: 'int4'" in capsys.readouterr().err


def test_shards_of_tensor_parallel_servers():
    """128 rows of a fused part and 128 columns of a row-parallel one on every rank; on one rank columns do not count."""
    layer = "model.layers.0.self_attn"
    fp8.check_served(f"{layer}.o_proj.weight", (128, 100), 1)
    fp8.check_served(f"{layer}.q_proj.weight", (512, 100), 4)
    with pytest.raises(UserError, match="q_proj.weight has 64 rows on each of 4 tensor-parallel ranks"):
        fp8.check_served(f"{layer}.q_proj.weight", (256, 128), 4)
    with pytest.raises(UserError, match="o_proj.weight has 64 columns on each of 2"):
        fp8.check_served(f"{layer}.o_proj.weight", (128, 128), 2)
    with pytest.raises(UserError, match="kv_b_proj.weight has 192 rows on each of 2"):
        fp8.check_served(f"{layer}.kv_b_proj.weight", (384, 128), 2)
    fp8.check_served("lm_head.weight", (300, 100), 2)
    # Heads are shared where ranks outnumber them, and never cut.
    fp8.check_served(f"{layer}.k_proj.weight", (256, 100), 8, head_dim=128)
    with pytest.raises(UserError, match="k_proj.weight has 64 rows on each of 4"):
        fp8.check_served(f"{layer}.k_proj.weight", (256, 100), 4, head_dim=64)
    with pytest.raises(UserError, match="v_proj.weight has 64 rows on each of 4"):
        fp8.check_served(f"{layer}.v_proj.weight", (128, 100), 4, head_dim=64)
    # What every rank holds whole; and experts, which expert parallelism does not cut.
    fp8.check_served(f"{layer}.q_a_proj.weight", (1536, 100), 8)
    fp8.check_served(f"{layer}.kv_a_proj_with_mqa.weight", (576, 100), 8)
    expert = "model.layers.0.mlp.experts.3.gate_proj.weight"
    fp8.check_served(expert, (768, 100), 8, expert_tensor=1)
    with pytest.raises(UserError, match="gate_proj.weight has 96 rows on each of 8"):
        fp8.check_served(expert, (768, 100), 8, expert_tensor=8)


def test_other_refusals(tmp_path):
    source = make_tiny_model("qwen3", tmp_path / "hf", sizes=WHOLE_BLOCKS)
    with pytest.raises(UserError, match="exists; remove it"):
        convert(source, source, ALONE, quantize="fp8")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is quantized already \(mxfp4\); write plain weights first"):
        convert(source, tmp_path / "out", ALONE, quantize="fp8")


def test_simulated_blocks_may_have_any_size(tmp_path: Path):
    fp8.check_folder(make_tiny_model("qwen3_moe", tmp_path / "a", sizes=Sizes(layers=1)), simulate=True)
    with pytest.raises(UserError, match="holds all experts in one tensor"):
        fp8.check_folder(make_tiny_model("gpt_oss", tmp_path / "b", sizes=Sizes(layers=1)), simulate=True)
    save_file({"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="holds all experts in one tensor"):
        fp8.check_folder(tmp_path, simulate=True)
