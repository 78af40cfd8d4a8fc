"""Tiny model folders load where they must, and their tokenizers give text back."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_tiny_model import FAMILIES, QUICKSTART, Sizes, main, make_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_family_loads_and_runs(family, tmp_path):
    folder = make_tiny_model(family, tmp_path / family, sizes=Sizes(layers=2))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == 512
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Sort these numbers."}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    assert tokenizer.decode(ids[0]) == "<|im_start|>user\nSort these numbers.<|im_end|>\n<|im_start|>assistant\n"
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
    # Vectors that start as constants (norms; biases and sinks where there are some) must not be constant.
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            assert tensor.std() > 1e-3, name


def test_same_seed_same_weights(tmp_path):
    states = [
        AutoModelForCausalLM.from_pretrained(make_tiny_model("gpt_oss", tmp_path / str(i), seed=seed)).state_dict()
        for i, seed in enumerate([7, 7, 8])
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])


def test_bfloat16(tmp_path):
    folder = make_tiny_model("deepseek_v3", tmp_path / "m", dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    state = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    kinds = {name.rpartition(".")[2]: tensor.dtype for name, tensor in state.items()}
    assert kinds["weight"] == torch.bfloat16
    assert kinds["e_score_correction_bias"] == torch.float32


def test_quickstart_preset(tmp_path):
    assert main(["--preset", "quickstart", str(tmp_path / "q")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    assert model.dtype == torch.float32
    assert 5.1e6 < sum(p.numel() for p in model.parameters()) < 5.3e6
    assert model.config.vocab_size == QUICKSTART.vocab
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "q")
    ids = tokenizer("<6 15 3 12:")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(tokenizer("3 6 12 15")["input_ids"]).split() == ["3", "6", "12", "15"]
    assert len({tokenizer(str(n))["input_ids"][0] for n in range(20)} | set(tokenizer("+-*/()=:<>")["input_ids"])) == 30
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert "reserved" in tokenizer.decode([40], skip_special_tokens=True)


def test_gptoss_quickstart_preset(tmp_path):
    """The released models' yarn and pattern of windows, in the quickstart's size."""
    out = tmp_path / "q"
    assert main(["--preset", "gptoss_quickstart", "--tokenizer", "numbers", "--window", "16", str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert 5.1e6 < sum(p.numel() for p in model.parameters()) < 5.4e6
    rope = model.config.rope_parameters
    assert (rope["factor"], rope["original_max_position_embeddings"], rope["beta_fast"]) == (32.0, 4096, 32.0)
    assert model.config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert model.config.sliding_window == 16


def test_byte_level_text_survives(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model("qwen3", tmp_path / "m", sizes=Sizes(vocab=300)))
    text = "naïve 漢字 🙂\n  x = 3.14;\t<|im_end|> done"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt_oss", "--hidden", "96"], "square"),
        (["llama", "--vocab", "100"], "choose 260"),
        (["llama", "--tokenizer", "numbers", "--vocab", "20"], "needs 33"),
    ],
)
def test_bad_sizes_give_one_line(arguments, words, tmp_path, capsys):
    assert main([*arguments[:1], str(tmp_path / "m"), *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_a_folder_that_is_no_model_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["llama", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.txt").exists()
    assert "not a model folder" in capsys.readouterr().err
