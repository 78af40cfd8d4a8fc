"""Low-rank adapters on every family: what they compute, PEFT's own reading of their folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import refusing_ties, without_ties
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.cli import main
from megatron_rl.config.load import build_config
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.errors import UserError
from megatron_rl.models.peft_folder import read_folder
from megatron_rl.trainer.trainer import Trainer, build_trainer

ALL = ["*.self_attention.linear_*", "*.mlp.*linear_fc*", "*.mlp.router.*"]
TARGETS = {
    **dict.fromkeys(("qwen3_moe", "olmoe", "mixtral", "deepseek_v3"), ALL),
    **dict.fromkeys(("qwen3", "llama"), ALL[:2]),
    "gpt_oss": [ALL[0], ALL[2]],
}
FAMILIES = tuple(TARGETS)
ROUNDING = 2e-5
"""Log-probs of tiny models in fp32, whose sums are of a few hundred terms below 10: two orders of summation."""


@pytest.fixture(autouse=True)
def _torn_down():
    yield
    parallel.shutdown()


def make(folder: Path, **lora: object) -> Trainer:
    parallel.shutdown()
    config = build_config(
        {
            "model": {"path": str(folder)},
            "lora": lora,
            "precision": {"train": "fp32"},
            "batch": {"tokens_per_micro_batch": 48},
        }
    )
    ranks = parallel.initialize(config.parallel, 0)
    return build_trainer(config, ranks, total_updates=4 if lora else None, support=SamplingSupport())


def random_sequences(vocab: int = 64, seed: int | None = None) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    return [
        Sequence.demonstration(rng.integers(4, vocab, 3).tolist(), rng.integers(4, vocab, n).tolist())
        for n in rng.integers(2, 30, 5)
    ]


def log_probs(trainer: Trainer, sequences: list[Sequence], reference: bool = False) -> np.ndarray:
    batches = trainer.pack(sequences)
    if reference:
        trainer.reference = trainer.reference or trainer.chunks
        trainer.compute_fields(batches, frozenset({"reference_log_probs"}))
        found = [batch.fields["reference_log_probs"] for batch in batches]
    else:
        found = trainer.compute_log_probs(batches)
    by_sample = {}
    for batch, values in zip(batches, found, strict=True):
        for row, sample in enumerate(batch.samples):
            by_sample[sample] = values[(batch.segments.ids == row) & batch.mask].numpy()
    return np.concatenate([by_sample[index] for index in range(len(sequences))])


@torch.no_grad()
def shake(trainer: Trainer, size: float = 0.1) -> None:
    """Random numbers in each B, so that the adapters count."""
    for adapter in trainer.model.adapters(trainer.chunks):
        adapter.set(adapter.down(), torch.randn(adapter.up().shape) * size)
        if adapter.magnitude is not None:
            adapter.magnitude.mul_(1 + 0.2 * torch.rand(adapter.magnitude.shape))


def drawn_for(trainer: Trainer) -> tuple[list[Sequence], np.ndarray]:
    """Random sequences, and their log-probs, in which no two experts tie but for rounding."""

    def attempt(seed: int) -> tuple[list[Sequence], np.ndarray]:
        sequences = random_sequences(seed=seed)
        with refusing_ties():
            return sequences, log_probs(trainer, sequences)

    return without_ties(attempt)


@torch.no_grad()
def in_transformers(model: torch.nn.Module, sequences: list[Sequence]) -> np.ndarray:
    model.eval()
    found = []
    for sequence in sequences:
        tokens = torch.as_tensor(sequence.tokens).long()[None]
        rows = model(tokens).logits[0].float().log_softmax(-1)
        of_label = rows[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        found.append(of_label[sequence.prompt_length - 1 :].numpy())
    return np.concatenate(found)


def base_in_transformers(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_and_a_trained_one_is_its_merged_weights(family, tiny_model, tmp_path):
    """B = 0 is the base to the bit; with any B what the adapters compute is what the merged folder does."""
    folder, some = tiny_model(family), random_sequences()
    base_of_some = log_probs(make(folder), some)
    trainer = make(folder, rank=4, alpha=6.0, targets=TARGETS[family])
    assert (log_probs(trainer, some) == base_of_some).all()
    shake(trainer)
    sequences, changed = drawn_for(trainer)
    base = log_probs(trainer, sequences, reference=True)
    assert abs(changed - base).max() > 1e-2
    assert (log_probs(trainer, some, reference=True) == base_of_some).all()  # the adapters are off, and on again:
    assert (log_probs(trainer, sequences) == changed).all()
    trainer.save_hf(tmp_path / "merged")
    trainer.save_adapter(tmp_path / "adapter")
    assert abs(log_probs(make(tmp_path / "merged"), sequences) - changed).max() < ROUNDING
    again = make(folder, rank=4, alpha=6.0, targets=TARGETS[family], path=str(tmp_path / "adapter"))
    assert (log_probs(again, sequences) == changed).all()
    assert main(["convert", str(tmp_path / "adapter"), str(tmp_path / "by_convert")]) == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "by_convert"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():  # sums of four products
        assert torch.allclose(tensor, theirs[name], rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
def test_peft_computes_the_same(family, tiny_model, tmp_path):
    """PEFT's own forward on transformers' model, from the folder that we write."""
    folder = tiny_model(family)
    # Where there are routed experts PEFT 0.21 takes each gate_proj for one of theirs, those of shared experts too.
    targets = ["*.self_attention.linear_*", "*.mlp.experts.*" if "*.mlp.router.*" in TARGETS[family] else "*.mlp.*"]
    trainer = make(folder, rank=4, alpha=6.0, targets=targets)
    shake(trainer)
    sequences, ours = drawn_for(trainer)
    trainer.save_adapter(tmp_path / "adapter")
    model = PeftModel.from_pretrained(base_in_transformers(folder), str(tmp_path / "adapter"))
    assert abs(in_transformers(model, sequences) - ours).max() < ROUNDING


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3", {"targets": ALL[:2]}),
        ("qwen3", {"kind": "dora", "alpha": 5.5}),
        ("qwen3_moe", {"targets": ["*.self_attention.linear_*", "*.mlp.experts.*"]}),
        ("mixtral", {"targets": ["*.mlp.experts.*"], "alpha": 4.5}),
        ("olmoe", {"targets": ["*.self_attention.linear_proj*"]}),
        ("gpt_oss", {"targets": ["*.self_attention.linear_*"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_peft_takes_all_of_a_folder_and_merges_it_as_we_do(family, lora, tiny_model, tmp_path):
    """Nothing of the folder is left over, nothing is missing, and the merged model is that of `convert` to rounding."""
    folder, adapter = tiny_model(family), tmp_path / "adapter"
    trainer = make(folder, **({"rank": 4, "alpha": 6.0} | lora))
    shake(trainer)
    trainer.save_adapter(adapter)
    model = PeftModel.from_pretrained(base_in_transformers(folder), str(adapter))
    taken = model.load_adapter(str(adapter), "again")
    assert not taken.unexpected_keys
    assert not [key for key in taken.missing_keys if ".again" in key]
    layers = [key for key in load_file(adapter / "adapter_model.safetensors") if key.endswith("lora_A.weight")]
    assert layers and model.peft_config["again"].lora_alpha == lora.get("alpha", 6.0)
    PeftModel.from_pretrained(base_in_transformers(folder), str(adapter)).merge_and_unload().save_pretrained(
        str(tmp_path / "theirs")
    )
    assert main(["convert", str(adapter), str(tmp_path / "ours")]) == 0
    base, ours, theirs = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "ours", tmp_path / "theirs")
    )
    assert ours.keys() == theirs.keys()
    changed = {name for name in ours if not torch.equal(ours[name], base[name])}
    names = {key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight" for key in layers}
    assert changed == names
    for name, tensor in ours.items():  # sums of four products, and with DoRA a root, a quotient and a product
        torch.testing.assert_close(tensor, theirs[name], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_2", "olora", True, "gaussian", "orthogonal", False])
def test_adapters_of_any_start_are_read_or_refused(start, tiny_model, tmp_path):
    """Adapters that have changed the model are not B A beside the model."""
    folder, sequences = tiny_model("qwen3"), random_sequences()
    options = {"r": 2, "lora_alpha": 8, "init_lora_weights": start, "target_modules": ["o_proj", "down_proj"]}
    theirs = get_peft_model(base_in_transformers(folder), LoraConfig(**options))
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight += 0.05 * torch.randn_like(weight) * ("lora_" in name)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    if isinstance(start, str) and start.startswith(("pissa", "olora")):
        with pytest.raises(UserError, match=rf"init_lora_weights = {start} has changed the weights of its model"):
            read_folder(tmp_path / "theirs")
        return
    again = PeftModel.from_pretrained(base_in_transformers(folder), str(tmp_path / "theirs"))
    expected = in_transformers(again, sequences)
    trainer = make(folder, rank=2, alpha=8.0, path=str(tmp_path / "theirs"))
    assert abs(log_probs(trainer, sequences) - expected).max() < ROUNDING


def test_dora_is_what_peft_computes(tiny_model, tmp_path):
    """On dense layers, both ways: rows have lengths of their own."""
    folder, sequences = tiny_model("qwen3"), random_sequences()
    base = log_probs(make(folder), sequences)
    trainer = make(folder, rank=3, alpha=6.0, kind="dora")
    # m W / |W|: a division and a product more than the base
    assert abs(log_probs(trainer, sequences) - base).max() < ROUNDING
    shake(trainer)
    changed = log_probs(trainer, sequences)
    assert abs(changed - base).max() > 1e-2
    trainer.save_adapter(tmp_path / "adapter")
    model = PeftModel.from_pretrained(base_in_transformers(folder), str(tmp_path / "adapter"))
    assert abs(in_transformers(model, sequences) - changed).max() < ROUNDING
    trainer.save_hf(tmp_path / "merged")
    assert abs(log_probs(make(tmp_path / "merged"), sequences) - changed).max() < ROUNDING
    again = make(folder, rank=3, alpha=6.0, kind="dora", path=str(tmp_path / "adapter"))
    assert (log_probs(again, sequences) == changed).all()


@pytest.mark.parametrize("scaling", [False, True], ids=["alpha over r", "alpha over root r"])
def test_adapters_that_peft_trained_are_read(scaling, tiny_model, tmp_path):
    """Each projection has an A of its own there: with three times the rank the fused layer's adapter takes them up."""
    folder, sequences = tiny_model("qwen3"), random_sequences()
    options = {"r": 2, "lora_alpha": 8, "use_rslora": scaling, "init_lora_weights": False}
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    theirs = get_peft_model(base_in_transformers(folder), LoraConfig(target_modules=names, **options))
    theirs.save_pretrained(str(tmp_path / "theirs"))
    expected = in_transformers(theirs, sequences)
    settings = {"path": str(tmp_path / "theirs"), "alpha": 5.0}
    assert abs(log_probs(make(folder, rank=7, **settings), sequences) - expected).max() < ROUNDING
    with pytest.raises(
        UserError, match=r"lora\.rank = 5 is too small .* needs 6, because the layers that it fuses have diff"
    ):
        make(folder, rank=5, **settings)
    with pytest.raises(UserError, match=r"has an adapter for model\.layers\.0\.mlp\.down_proj, but lora\.targets"):
        make(folder, rank=7, targets=["*.self_attention.linear_*"], **settings)


def test_a_start_does_not_depend_on_the_run(tiny_model):
    """The same seed is the same A, another one another; layers and experts differ."""
    folder = tiny_model("qwen3_moe")
    first, again = (
        {a.name: a.down() for a in t.model.adapters(t.chunks)} for t in (make(folder, rank=2), make(folder, rank=2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    values = [down.flatten()[:4] for down in first.values()]
    assert all(not torch.equal(one, other) for i, one in enumerate(values) for other in values[:i])
    bound = 1 / first["decoder.layers.0.self_attention.linear_qkv"].shape[1] ** 0.5
    largest = first["decoder.layers.0.self_attention.linear_qkv"].abs().max()
    assert 0.5 * bound < largest <= bound  # uniform: below half with a probability of 2^-100


def test_only_adapters_have_gradients_and_optimizer_state(tiny_model):
    """Of the fp32 weights and moments there is nothing else."""
    trainer = make(tiny_model("qwen3_moe"), rank=2)
    trained = {
        n for names in trainer.model.parameter_names(trainer.chunks) for n, p in names.items() if p.requires_grad
    }
    assert trained
    assert all(name.endswith((".adapter.linear_in.weight", ".adapter.linear_out.weight")) for name in trained)
    stepped = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    adapters = trainer.model.adapters(trainer.chunks)
    assert stepped == sum(adapter.down().numel() + adapter.up().numel() for adapter in adapters)
    assert (
        sum(buffer.numel for ddp in trainer.ddp for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers])
        < 2 * stepped
    )


def test_a_folder_that_cannot_be_read_is_named(tiny_model, tmp_path):
    """One line for each: what is missing, damaged, or of another kind."""
    folder = tiny_model("qwen3")
    trainer = make(folder, rank=2)
    trainer.save_adapter(tmp_path / "good")
    settings = json.loads((tmp_path / "good" / "adapter_config.json").read_text())
    with pytest.raises(UserError, match=r"adapter_config\.json is missing"):
        read_folder(tmp_path / "nothing")
    for key, value in (("peft_type", "IA3"), ("bias", "all"), ("alpha_pattern", {"q_proj": 2})):
        (tmp_path / "good" / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
        with pytest.raises(UserError, match=rf"{key} = .* is not supported"):
            read_folder(tmp_path / "good")
    for start in ("pissa", "pissa_niter_4", "olora", "CorDA", "loftq", "lora_ga"):
        (tmp_path / "good" / "adapter_config.json").write_text(json.dumps(settings | {"init_lora_weights": start}))
        with pytest.raises(
            UserError, match=rf"init_lora_weights = {start.lower()} has changed the weights of its model"
        ):
            read_folder(tmp_path / "good")
    (tmp_path / "good" / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "good" / "adapter_model.safetensors").write_bytes(b"\x00" * 9)
    with pytest.raises(UserError, match="damaged"):
        read_folder(tmp_path / "good")


def test_a_model_that_is_not_there_is_asked_for(tiny_model, tmp_path, capsys):
    """`convert` needs the base."""
    trainer = make(tiny_model("qwen3"), rank=2)
    trainer.save_adapter(tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(tiny_model("qwen3")), "/gone"))
    assert main(["convert", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    assert "belongs to the model /gone, which does not exist; give its folder with --base" in capsys.readouterr().err
    for other, problem in (
        (tiny_model("qwen3_moe"), "is not a layer of the model"),
        (tiny_model("qwen3", "--heads", "8"), "fits a weight of"),
    ):
        assert main(["convert", str(tmp_path / "adapter"), str(tmp_path / "out"), "--base", str(other)]) == 2
        assert problem in capsys.readouterr().err
    assert not [*tmp_path.glob("out*")]
