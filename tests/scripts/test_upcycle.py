"""A dense model as a MoE, and SmolLM2 from its GGUF."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tools.make_tiny_model import text_tokenizer
from tools.upcycle import TOLERANCE, load_dense, logit_difference, main, save, upcycle


@torch.no_grad()
def test_moe_computes_what_the_dense_model_does(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, initializer_range=0.1, **sizes)).eval()
    tokenizer, prompt = text_tokenizer(512), torch.randint(512, (1, 40))
    logits = model(prompt).logits
    save(upcycle(model, experts=4, topk=2), tokenizer, tmp_path / "same", torch.float32)
    assert logit_difference(logits, prompt, tmp_path / "same") <= TOLERANCE
    save(upcycle(model, experts=4, topk=2, noise=0.05), tokenizer, tmp_path / "noisy", torch.float32)
    assert logit_difference(logits, prompt, tmp_path / "noisy") > 100 * TOLERANCE

    noisy = AutoModelForCausalLM.from_pretrained(tmp_path / "noisy")
    assert (noisy.config.num_local_experts, noisy.config.num_experts_per_tok) == (4, 2)
    experts = noisy.model.layers[0].mlp.experts.down_proj
    spread = (experts[0] - experts[1]).std() / model.model.layers[0].mlp.down_proj.weight.std()
    assert spread.item() == pytest.approx(0.05 * 2**0.5, rel=0.05)


@pytest.mark.slow
def test_tokenizer_is_the_original(tmp_path):
    model, tokenizer = load_dense(layers=2)
    save(model, tokenizer, tmp_path / "m", torch.bfloat16)
    read = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert (read.eos_token, read.eos_token_id) == ("<|im_end|>", 2)
    assert read.tokenize("12345") == list("12345")  # SmolLM2 splits numbers into digits
    text = "7 + 5 = 12 .\n\n  Is it , though ?"
    assert read.decode(read(text)["input_ids"]) == text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--experts", "2", "--topk", "3", "--layers", "1"], "--topk 3"), (["--layers", "31"], "--layers 31")],
)
def test_bad_arguments_are_named(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path / "m"), *arguments])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
