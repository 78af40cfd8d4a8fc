"""Model folders: tensors by name, and how often a file is opened for them; code that a folder brings along."""

from __future__ import annotations

import ast
import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.errors import UserError
from megatron_rl.models import hf_folder
from megatron_rl.models.fp8 import Dequantized
from megatron_rl.models.hf_folder import (
    INDEX,
    OpenFiles,
    check_same_tokenizer,
    check_weight_files,
    read_tokenizer,
    weights_digest,
    whole_folder,
)
from megatron_rl.models.parallel_check import read_hf_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "index",
    ["[" * 50_000, "5", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../b.safetensors"}}'],
)
def test_an_index_that_is_damaged_or_leads_elsewhere(index, tmp_path):
    (folder := tmp_path / "model").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    (folder / INDEX).write_text(index)
    with pytest.raises(
        UserError, match=rf"model folder {folder}: {INDEX} (is damaged|names .*b.safetensors, which is not)"
    ):
        check_weight_files(folder)


@pytest.mark.parametrize("content", [b"\xff" * 8 + b"{}", b"[" * 50_000, b"\2" + b"\0" * 7 + b"[]", b"x"])
def test_weights_that_are_none_are_named(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors cannot be read"):
        weights_digest(tmp_path)


def test_a_file_is_opened_once_and_a_look_for_a_name_reads_nothing(tmp_path, monkeypatch):
    tensors = {f"t{i}": torch.randn(3, i + 1) for i in range(6)}
    file_of = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, tmp_path / file)
    opened, real = [], hf_folder.safe_open
    monkeypatch.setattr(hf_folder, "safe_open", lambda path, *a, **k: opened.append(path.name) or real(path, *a, **k))
    found = Dequantized(OpenFiles(tmp_path, file_of))
    assert "t0" in found and "absent" not in found and len(found) == 6 and not opened
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    assert sorted(opened) == ["part-0.safetensors", "part-1.safetensors"]


@pytest.fixture
def with_code(tiny_model, tmp_path, monkeypatch) -> Path:
    """A model folder whose own code writes a file when it is imported; a question on the terminal is answered by yes."""
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *_: asked.append(True) or "y")
    folder = shutil.copytree(tiny_model("qwen3", "--layers", "2"), tmp_path / "model")
    mark = tmp_path / "written"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": own}))
    yield folder
    assert not asked and not mark.exists()


def test_code_of_a_folder_that_is_not_needed_is_left_alone(with_code, tiny_model):
    assert read_hf_config(with_code).model_type == "qwen3"
    plain = tiny_model("qwen3", "--layers", "2")
    assert read_tokenizer(with_code).get_vocab() == read_tokenizer(plain).get_vocab()
    check_same_tokenizer(plain, with_code, "critic.path")


def test_a_folder_that_needs_its_own_code_is_refused(with_code):
    for file, key in (("config.json", "model_type"), ("tokenizer_config.json", "tokenizer_class")):
        path = with_code / file
        path.write_text(json.dumps({**json.loads(path.read_text()), key: "MadeUp"}))
    for read, what in ((read_hf_config, r"config\.json"), (read_tokenizer, "its tokenizer")):
        wanted = rf"{with_code}: {what} cannot be read \(it names code in the folder itself .* never run; [^\n]*\)$"
        with pytest.raises(UserError, match=wanted):
            read(with_code)


def test_no_call_leaves_it_to_transformers_whether_code_is_run():
    found = 0
    for path in sorted([*(ROOT / "megatron_rl").rglob("*.py"), *(ROOT / "tools").glob("*.py")]):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name.endswith(".from_pretrained") and name.startswith(("Auto", "transformers.Auto", "PreTrained")):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
                found += 1
    assert found > 4


BESIDE = {
    "README.md": b"words",
    "LICENSE": b"terms",
    "assets/curve.png": b"\x89PNG",
    "additional_chat_templates/tool_use.jinja": None,
    "additional_chat_templates/rag.jinja": None,
    "original/tokenizer.model": b"\0\1",
    "vocab.bin": b"a vocabulary",
    "merges.own": b"of a tokenizer of one's own",
    "chat_template.jinja": None,
    "generation_config.json": b'{"eos_token_id": [2, 0], "temperature": 0.6}',
    "special_tokens_map.json": b"{}",
    "preprocessor_config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "samples.jsonl": b"{}",
    "tokenizer.json": None,
    "tokenizer_config.json": None,
    "config.json": None,
}
"""Files that go with any weights; None: written by transformers."""
OF_WEIGHTS = [
    *(
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    *(
        "original/consolidated.00.pth",
        "gguf/model-Q4.gguf",
        "onnx/model.onnx",
        "tf_model.h5",
        "flax_model.msgpack",
        "MODEL.PT",
    ),
    *(
        "optimizer.pt",
        "rng_state_0.pth",
        "trainer_state.json",
        "training_args.bin",
        "checkpoint-10/config.json",
        "runs/a/config.yaml",
    ),
    *(
        "hf_quant_config.json",
        "quantize_config.json",
        "adapter_config.json",
        "modeling_own.py",
        ".cache/huggingface/x",
        ".gitattributes",
    ),
    *("checkpoints/step_000001/common.pt", "global_step1/latest", "events.out.tfevents.1"),
    *("latest", "scheduler.pkl", "args.pickle", "model.safetensors.index.fp32.json"),
    *("draft/model.safetensors", "draft/config.json", "draft/inner/tokenizer.json"),
]


@pytest.mark.parametrize("inside", ["", "runs/r/hf.partial", "mine/r/hf.partial"])
def test_all_that_goes_with_any_weights_is_kept_and_nothing_of_these(inside, tiny_model, tmp_path):
    """Also where the copy is made in a subfolder of the model's own folder."""
    source = shutil.copytree(tiny_model("qwen3", "--layers", "2"), tmp_path / "model")
    out = source / inside if inside else tmp_path / "out"
    tokenizer = read_tokenizer(source)
    plain = tokenizer.chat_template
    tokenizer.chat_template = {
        "default": plain,
        "tool_use": "TOOLS {{ tools }}" + plain,
        "rag": "{{ documents }}" + plain,
    }
    tokenizer.save_pretrained(source)
    for name, content in [*BESIDE.items(), *((name, b"x") for name in OF_WEIGHTS)]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            (source / name).write_bytes(content)
    (source / "linked.json").symlink_to(source / "special_tokens_map.json")
    (source / "gone.json").symlink_to(tmp_path / "nowhere")
    if inside:
        (out.parent / "metrics.jsonl").parent.mkdir(parents=True)
        (out.parent / "metrics.jsonl").write_text("{}")
    hf_folder.copy_metadata(source, out, torch.bfloat16, {"more": 1})
    found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert found == {*BESIDE, "linked.json"}
    for name in found - {"config.json"}:
        assert (out / name).read_bytes() == (source / name).read_bytes() and not (out / name).is_symlink()
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["more"]) == ("bfloat16", 1)
    copied = read_tokenizer(out)
    assert copied.chat_template == tokenizer.chat_template and set(copied.chat_template) == {
        "default",
        "tool_use",
        "rag",
    }
    messages = [{"role": "user", "content": "hi"}]
    rendered = [
        t.apply_chat_template(messages, chat_template="tool_use", tools=[], tokenize=False) for t in (tokenizer, copied)
    ]
    assert rendered[0] == rendered[1] and rendered[0].startswith("TOOLS")


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    for error, expected in ((KeyError("x"), KeyError), (OSError(28, "disk full"), UserError)):
        message = "x|model folder .*out: could not be written .disk full"
        with pytest.raises(expected, match=message), whole_folder(out) as partial:
            partial.mkdir()
            (partial / "file").write_text("half")
            raise error
        assert not list(tmp_path.iterdir())
    for text, replace in (("first", False), ("second", True)):
        with whole_folder(out, replace=replace) as partial:
            partial.mkdir()
            (partial / text).write_text(text)
            assert not (out / text).exists()
        assert [file.name for file in out.iterdir()] == [text]
    with pytest.raises(UserError, match="adapter folder"), whole_folder(out, "adapter folder") as partial:
        partial.mkdir()
    assert (out / "second").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]
