"""Each family in Megatron, one process, fp32: logits equal transformers', and folders that cannot be used are named."""

from __future__ import annotations

import json
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models.round_trips import export, load_error
from ranks import refusing_ties, without_ties
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl.config import ParallelConfig
from megatron_rl.data.packing import Layout
from megatron_rl.errors import UserError
from megatron_rl.models.attention import CoreAttention
from megatron_rl.models.build import _set_kernels, load
from megatron_rl.models.convert import _parallel_state
from megatron_rl.models.freeze import check_patterns, plain_name
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.models.precision import TRAIN
from megatron_rl.models.shape import Shape, parameter_names, whole_model
from tools.make_tiny_model import FAMILIES, Sizes, make_tiny_model

ALONE = ParallelConfig()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, out / family, seed=3) for family in FAMILIES}


def drawn(reference: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [2, 40], and the logits of transformers' model, in which no two experts tie but for rounding."""

    def attempt(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(seed))
        with refusing_ties():
            return batch, reference(batch).logits

    return without_ties(attempt)


def packed(lengths: list[int]) -> object:
    from megatron.core.packed_seq_params import PackedSeqParams  # only once the platform is active

    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_and_weights(family, folders):
    folder = folders[family]
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    lengths = [19, 1, 33, 7]

    def attempt(seed: int) -> tuple[torch.Tensor, ...]:
        draws = torch.Generator().manual_seed(seed)
        batch, row = (torch.randint(0, 512, shape, generator=draws) for shape in ((2, 40), (1, sum(lengths))))
        with refusing_ties():
            apart = torch.cat([reference(part).logits for part in row.split(lengths, dim=1)], dim=1)
            return batch, row, reference(batch).logits, apart

    batch, row, together, apart = without_ties(attempt)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with _parallel_state(folder, ALONE):
        model = load(folder, parallel=ALONE, precision="fp32")
        chunks = model.make_chunks()
        chunk = chunks[0].eval()
        plain = chunk(batch, torch.arange(40).expand(2, -1), None)
        thd = chunk(row, positions, None, packed_seq_params=packed(lengths))
        exported = {name: tensor.clone() for name, tensor in model.export_hf_weights(chunks)}
    torch.testing.assert_close(plain, together, atol=2e-6, rtol=0)
    torch.testing.assert_close(thd, apart, atol=2e-6, rtol=0)
    stored = load_file(folder / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


def mxfp4(folder: Path, out: Path) -> None:
    """Give the gpt-oss folder experts that MXFP4 holds exactly, and write it to `out` with them as MXFP4 (as released).

    A block is 32 values along the input, two 4-bit floats a byte (the first in the low half), and one power of two.
    """
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    tensors = load_file(folder / "model.safetensors")
    packed = dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32))
        exponents = torch.randint(-8, -4, (experts, outputs, inputs // 32))
        exact = values[codes] * 2.0 ** exponents[..., None]
        tensors[name] = exact.view(experts, outputs, inputs).transpose(1, 2).contiguous()
        del packed[name]
        packed[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        packed[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, out / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("hidden", [64, 96])
@torch.no_grad()
def test_mxfp4_experts_are_loaded_exactly(hidden, tmp_path):
    """As gpt-oss is released; 64: the square shape of the released sizes, whose orientation nothing but the format tells."""
    plain, quantized, out = (tmp_path / name for name in ("plain", "quantized", "out"))
    make_tiny_model("gpt_oss", plain, seed=5, sizes=Sizes(hidden=hidden, expert_intermediate=64))
    mxfp4(plain, quantized)
    reference = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", dtype=torch.float32)
    batch, expected = drawn(reference)
    with _parallel_state(quantized, ALONE):
        model = load(quantized, parallel=ALONE, precision="fp32")
        chunks = model.make_chunks()
        logits = chunks[0].eval()(batch, torch.arange(40).expand(2, -1), None)
        model.save_hf(chunks, out)
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=1e-5)
    saved, stored = load_file(out / "model.safetensors"), load_file(plain / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_names_are_those_of_megatrons_parameters(folders):
    """Those that the plan and the check before a run derive from config.json, and of every name that a bridge knows."""
    for family, folder in folders.items():
        shape = Shape.from_config(read_hf_config(folder))
        with _parallel_state(folder, ALONE):
            model = load(folder, parallel=ALONE, precision="fp32")
            (names,) = model.parameter_names(model.make_chunks(load_weights=False))
            registry = model.bridge.mapping_registry()
        expected = {
            w.name.replace("*", str(i)): list(w.on_rank(ALONE).shape)
            for w in whole_model(shape)
            for i in range(w.copies)
        }
        assert {name: [p.numel(), 1][: p.dim()] for name, p in names.items()} == expected, family
        assert parameter_names(shape) == names.keys()
        # Transformer Engine's names: the same Hugging Face tensor by either.
        known = {m.megatron_param: m.hf_param for m in registry.get_all_mappings()}
        fused = [n for n in known if n.startswith("decoder") and (n.endswith("layer_norm_weight") or n[-1] == "*")]
        assert len(fused) > 2 or not shape.experts
        for name in fused:
            assert known[plain_name(name.replace("*", "7"), tied=False).replace("7", "*")] == known[name], name


FROZEN = {
    "*.mlp.router.*": {f"decoder.layers.{i}.mlp.router.{part}" for i in range(4) for part in ("weight", "bias")},
    "*.softmax_offset": {f"decoder.layers.{i}.self_attention.core_attention.softmax_offset" for i in range(4)},
}


def test_frozen_and_other_weights(folders, tmp_path):
    other = make_tiny_model("gpt_oss", tmp_path / "other", seed=4)
    with _parallel_state(other, ALONE):
        model = load(folders["gpt_oss"], parallel=ALONE, precision="fp32", freeze=[*FROZEN])
        chunks = model.make_chunks(weights=other)
        frozen = {name for name, p in chunks[0].named_parameters() if not p.requires_grad}
        assert frozen == set().union(*FROZEN.values())
        exported = dict(model.export_hf_weights(chunks))
        stored = load_file(other / "model.safetensors")
        assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
        with pytest.raises(UserError, match="does not have the architecture"):
            model.make_chunks(weights=folders["llama"])
        with pytest.raises(UserError, match=r"'\*\.attention\.\*' matches no parameter"):
            load(folders["gpt_oss"], parallel=ALONE, precision="fp32", freeze=["*.attention.*"]).make_chunks()


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (
            ["*.self_atention.*"],
            r"'\*\.self_atention\.\*' matches no parameter of the model; did you mean \*\.self_attention\.\*",
        ),
        (["*.router.*", "*.softmax_offsets"], r"'\*\.softmax_offsets' matches no .* \*\.softmax_offset"),
        (["router"], r"'router' matches no .* \*\.router\.\*"),
        (["decoder.*", "*.weight"], "leaves no parameter to train"),
        (
            ["*.linear_qkv.weight"],
            r"layers\.0\.self_attention\.linear_qkv\.weight and not .*linear_qkv\.bias.*\*\.linear_qkv\.\*",
        ),
        (["decoder.layers.2.*"], r"with vp2o\.enabled: decoder\.layers\.2\.mlp\.experts\."),
    ],
)
def test_lists_that_cannot_be(patterns, says, folders):
    names = parameter_names(Shape.from_config(read_hf_config(folders["gpt_oss"])))
    with pytest.raises(UserError, match=says) as error:
        check_patterns(patterns, names, vp2o=True)
    assert "\n" not in str(error.value) and "model.freeze" in str(error.value)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_beside_frozen_weights(recompute, folders):
    """Whatever is frozen, the others have the gradients that they have in the whole model: behind a frozen embedding too."""
    folder = folders["gpt_oss"]
    batch = torch.randint(4, 512, (1, 33))

    def gradients(**options) -> dict[str, torch.Tensor]:
        model = load(folder, parallel=ALONE, precision="fp32", **options)
        (chunk,) = model.make_chunks()
        logits = chunk.train()(batch, torch.arange(33)[None], None)
        logits.log_softmax(-1).gather(-1, batch.roll(-1)[..., None]).sum().backward()
        return {name: p.grad for name, p in chunk.named_parameters() if p.requires_grad}

    with _parallel_state(folder, ALONE):
        every = gradients()
        for patterns in (["embedding.*"], ["embedding.*", "decoder.*.weight", "*.bias"], ["*.self_attention.*"]):
            found = gradients(recompute=recompute, freeze=patterns)
            assert found.keys() == {name for name in every if not any(fnmatchcase(name, p) for p in patterns)}
            for name, grad in found.items():
                bound = 1e-5 * every[name].abs().max() + 1e-7
                assert grad is not None and (grad - every[name]).abs().max() <= bound, f"{patterns}: {name}"


def test_ignored_sinks(folders, tmp_path):
    """As transformers' model whose sinks are minus infinity, which is plain softmax; the sinks are exported as they are."""
    folder = folders["gpt_oss"]
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    sinks = [layer.self_attn.sinks.data.clone() for layer in reference.model.layers]
    for layer in reference.model.layers:
        layer.self_attn.sinks.data.fill_(-torch.inf)
    batch, plain = drawn(reference)
    for layer, values in zip(reference.model.layers, sinks, strict=True):
        layer.self_attn.sinks.data.copy_(values)
    exact = reference(batch).logits
    assert (exact - plain).abs().max() > 1e-3
    with _parallel_state(folder, ALONE):
        options = {"attention_sinks": "ignored", "flash_attention": "torch"}
        model = load(folder, parallel=ALONE, precision="fp32", **options)
        (chunk,) = chunks = model.make_chunks()
        logits = chunk(batch, torch.arange(40).expand(2, -1), None)
        logits.sum().backward()
        exported = dict(model.export_hf_weights(chunks))
    torch.testing.assert_close(logits, plain, atol=2e-6, rtol=1e-5)
    assert {m.flash_attention for m in chunk.modules() if isinstance(m, CoreAttention)} == {"torch"}
    sinks = {name for name, p in chunk.named_parameters() if not p.requires_grad}
    assert sinks == FROZEN["*.softmax_offset"]
    assert all(p.grad is not None for name, p in chunk.named_parameters() if name not in sinks)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


def test_export_follows_training(folders):
    """What is exported is the parameter as it is now, in the trained dtype."""
    folder = folders["qwen3_moe"]
    with _parallel_state(folder, ALONE):
        model = load(folder, parallel=ALONE, precision="bf16")
        chunks = model.make_chunks()
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.mul_(2)
        exported = dict(model.export_hf_weights(chunks))
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name], tensor.bfloat16() * 2), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_regime_that_cannot_run_is_refused(folders):
    """Also where no config was checked before."""
    with pytest.raises(
        UserError, match=r"precision.train = mxfp8 needs Transformer Engine .* here fp8_blockwise can be"
    ):
        load(folders["qwen3"], parallel=ALONE, precision="mxfp8")


@pytest.mark.parametrize("name", ["bf16", *(name for name, recipe in TRAIN.items() if recipe.fp8_recipe)])
def test_megatrons_own_fp8_settings_on_a_gpu(name, monkeypatch):
    """What would be asked of Transformer Engine there: one of Megatron's recipes, parameters in bf16."""
    from megatron.core.enums import Fp8Recipe

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    if name != "bf16":
        with pytest.raises(UserError, match="is installed but cannot be imported"):
            _set_kernels(SimpleNamespace(fp8=None), TRAIN[name], "none", plain=False)
    monkeypatch.setattr("megatron_rl.models.build.HAVE_TE", True)
    config = SimpleNamespace(fp8=None)
    _set_kernels(config, TRAIN[name], "none", plain=False)
    assert config.params_dtype == torch.bfloat16 and config.bf16
    if name == "bf16":
        assert config.fp8 is None
    else:
        assert config.fp8_recipe in [recipe.value for recipe in Fp8Recipe]
        assert config.fp8 == ("hybrid" if name in ("fp8_delayed", "fp8_tensorwise") else "e4m3")
    assert TRAIN["mxfp8"].multiple == 32 and TRAIN["fp8_delayed"].multiple == 16 and TRAIN["bf16"].multiple == 1
    assert Layout(tensor=2, context=2, multiple=16).total_multiple == 64


def test_plain_layers_have_no_recipe_of_transformer_engines(folders):
    """Nothing is to be remembered of their scales, and no pass is computed twice for it; FP8 is simulated."""
    recipe = load(folders["qwen3_moe"], parallel=ParallelConfig(), precision="fp8_blockwise", plain=True).recipe
    assert recipe.fp8_recipe == "" and recipe.block == 128


@pytest.mark.parametrize("apex", [False, True])
def test_gradients_accumulate_in_a_fused_kernel_where_apex_has_it(apex, monkeypatch):
    """With Transformer Engine alone Megatron's own output layer would refuse to be built."""
    from megatron.core.tensor_parallel import layers

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", apex)
    config = SimpleNamespace()
    _set_kernels(config, TRAIN["bf16"], "none", plain=False)
    assert config.gradient_accumulation_fusion is apex


def test_save_hf_names_the_trained_dtype(folders, tmp_path):
    folder = folders["qwen3_moe"]
    with _parallel_state(folder, ALONE):
        model = load(folder, parallel=ALONE, precision="bf16")
        chunks = model.make_chunks()
        model.save_hf(chunks, tmp_path / "out")
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="could not be written"):
            model.save_hf(chunks, tmp_path / "file" / "out")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert saved.dtype == torch.bfloat16
    assert not list(tmp_path.glob("*.partial"))


def edit_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported; supported: Deepseek"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt_oss", {"intermediate_size": 32}, "square"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_unsupported_settings(family, changes, words, tmp_path):
    folder = edit_config(make_tiny_model(family, tmp_path / "m", sizes=Sizes(layers=1)), **changes)
    with pytest.raises(UserError, match=words) as error:
        read_hf_config(folder)
    assert "\n" not in str(error.value)


def test_missing_folder_and_config(tmp_path):
    with pytest.raises(UserError, match="model.path is empty"):
        read_hf_config("")
    with pytest.raises(UserError, match="nowhere: does not exist"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no config.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", ')
    with pytest.raises(UserError, match="config.json cannot be read"):
        read_hf_config(tmp_path)


def test_weights_that_do_not_fit(tmp_path):
    """Missing, left over, misshapen and truncated: each is named; the bridge alone would only warn."""
    folder = make_tiny_model("qwen3_moe", tmp_path / "m", sizes=Sizes(layers=2))
    file = folder / "model.safetensors"
    whole = load_file(file)
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"

    save_file({name: tensor for name, tensor in whole.items() if name != expert}, file)
    assert f"tensor {expert} is missing" in load_error(str(folder), {})
    save_file(whole | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}, file)
    assert "tensor model.layers.1.self_attn.q_proj.bias has no place" in load_error(str(folder), {})
    save_file(whole | {"model.norm.weight": torch.ones(32)}, file)
    assert "tensor model.norm.weight has shape [32]" in load_error(str(folder), {})
    save_file(whole | {"model.layers.2.eh_proj.weight": torch.zeros(4)}, file)  # a draft layer behind the last one
    assert load_error(str(folder), {}) == ""
    save_file(whole, file)
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors is truncated" in load_error(str(folder), {})
    file.unlink()
    assert "has no .safetensors files" in load_error(str(folder), {})


def test_tied_embeddings_are_exported_once(folders):
    exported = export(str(folders["llama"]), {}, "fp32")
    assert "lm_head.weight" not in exported
    assert exported["model.embed_tokens.weight"].shape == (512, 64)


@pytest.mark.parametrize(
    ("family", "sizes", "world", "words"),
    [
        ("qwen3_moe", {"tensor": 4}, 4, "parallel.tensor = 4 does not divide the model's 2 key-value heads"),
        (
            "qwen3_moe",
            {"expert": 3},
            3,
            "parallel.expert = 3 does not divide the model's 8 experts; choose one of 1, 2",
        ),
        ("qwen3_moe", {"pipeline": 3}, 3, "parallel.pipeline = 3 does not divide the model's 4 layers"),
        ("qwen3_moe", {"pipeline": 2, "virtual_pipeline": 3}, 2, "parallel.virtual_pipeline = 3"),
        ("qwen3_moe", {"virtual_pipeline": 2}, 1, "needs parallel.pipeline above 1"),
        ("qwen3_moe", {"tensor": 2}, 3, "tensor x pipeline x context = 2 does not divide the 3 processes"),
        ("qwen3_moe", {"expert": 2, "expert_tensor": 2}, 2, "expert x expert_tensor x pipeline = 4"),
        ("qwen3_moe", {"expert_tensor": 5}, 5, "expert_tensor = 5 does not"),
        ("qwen3", {"expert": 2}, 2, "is dense"),
        ("gpt_oss", {"tensor": 2}, 2, "set parallel.expert_tensor to 1"),
    ],
)
def test_sizes_that_do_not_divide(family, sizes, world, words, folders):
    with pytest.raises(UserError) as error:
        check_parallel(read_hf_config(folders[family]), ParallelConfig(**sizes), world)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("family", "sizes", "world"),
    [
        ("qwen3_moe", {"tensor": 2, "expert": 8, "pipeline": 2, "virtual_pipeline": 2, "context": 2}, 16),
        ("deepseek_v3", {"tensor": 4}, 4),
        ("qwen3", {"tensor": 2}, 6),
    ],
)
def test_sizes_that_divide(family, sizes, world, folders):
    check_parallel(read_hf_config(folders[family]), ParallelConfig(**sizes), world)
