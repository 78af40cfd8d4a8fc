"""What each process does in test_fp8_training.py; importing Megatron and modelopt is most of its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from ranks import end_layout
from trainer.layouts import make_config, make_trainer, run_layout

from megatron_rl.models.fake_quant import FakeQuantizer
from megatron_rl.trainer import checkpoint

from megatron.core.transformer.moe.experts import SequentialMLP  # isort: skip


def run(model: str, samples: list, cases: list[dict]) -> list[dict]:
    """Scored log-probs, gradients and weights of each case, on the same processes."""
    return [run_layout(make_config(model, overrides), samples, updates=1) for overrides in cases]


def alone(model: str, samples: list, cases: list[dict], folder: str) -> dict:
    """All that one process shows."""
    recipes = {}
    for name in ("fp8_blockwise", "fp8_tensorwise", "bf16"):
        trainer = make_trainer(make_config(model, {"precision": {"train": name}}))
        recipes[name] = {
            "quantized": quantized_modules(trainer.chunks[0]),
            "state": sorted(trainer.chunks[0].state_dict()),
            "sharded": sorted(trainer.chunks[0].sharded_state_dict(metadata={"dp_cp_group": None})),
            "exported": {k: (v.dtype, v.clone()) for k, v in trainer.export_weights()},
            "linear": one_linear(trainer.chunks[0]),
            "experts": expert_paths(trainer.chunks[0]),
        }
        if name == "fp8_blockwise":
            recipes["saved"] = save_and_load(trainer, Path(folder))
        end_layout()
    return {"recipes": recipes, "cases": run(model, samples, cases)}


def quantized_modules(chunk: torch.nn.Module) -> list[str]:
    """Names of the modules whose forward is preceded by anything, and of the experts that round their products' inputs."""
    names = [name for name, module in chunk.named_modules() if module._forward_pre_hooks]
    return names + [name for name, module in chunk.named_modules() if getattr(module, "quantizer", None)]


def one_linear(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The output projection of layer 0's attention on random input, and its gradients."""
    layer = chunk.decoder.layers[0].self_attention.linear_proj
    x = (torch.randn(21, 1, layer.input_size) * torch.rand(21, 1, 1) * 3).bfloat16().requires_grad_()
    weight = layer.weight.detach().clone()
    grad = torch.randn(21, 1, layer.output_size).bfloat16()
    chunk.zero_grad()
    out, _ = layer(x)
    out.backward(grad)
    assert "weight" not in layer.__dict__ and layer.weight is dict(layer.named_parameters())["weight"]
    found = {"x": x.detach(), "weight": weight, "out": out.detach(), "grad": grad, "grad_x": x.grad}
    # DDP's hook has moved the gradient into its fp32 buffer.
    found["grad_weight"] = layer.weight.main_grad.clone()
    layer.weight.main_grad.zero_()
    return {name: tensor.squeeze(1) for name, tensor in found.items()}


def expert_paths(chunk: torch.nn.Module) -> list[torch.Tensor]:
    """The experts' output by our few products, and by Megatron's own loop over experts."""
    experts = chunk.decoder.layers[0].mlp.experts
    counts = torch.tensor([5, 0, 11, 1] + [2] * (experts.num_local_experts - 4))
    x = torch.randn(int(counts.sum()), experts.config.hidden_size).bfloat16()
    probs = torch.rand(len(x))
    with torch.no_grad():
        return [experts(x, counts, probs)[0], SequentialMLP.forward(experts, x, counts, probs)[0]]


def save_and_load(trainer, folder: Path) -> bool:
    """Whether a checkpoint brings all weights back; one of a bf16 trainer too."""
    before = {name: p.detach().clone() for name, p in trainer.chunks[0].named_parameters()}
    path = checkpoint.save(folder, 1, trainer, trainer.ranks, extra={}, keep=1)
    for p in trainer.chunks[0].parameters():
        p.data.zero_()
    checkpoint.load(path, trainer, trainer.ranks)
    same = all(torch.equal(p, before[name]) for name, p in trainer.chunks[0].named_parameters())
    end_layout()
    plain = make_trainer(replace(trainer.config, precision=make_config("", {"precision": {"train": "bf16"}}).precision))
    checkpoint.load(path, plain, plain.ranks)
    return same and all(torch.equal(p, before[name]) for name, p in plain.chunks[0].named_parameters())


def scales() -> tuple[torch.Tensor, ...]:
    """Inputs of three experts, one without tokens and one of large numbers, rounded together and each by itself; a
    weight rounded as a whole, and as four shards of whole blocks."""
    quantizer = FakeQuantizer(0)
    x = torch.randn(9, 40) * torch.tensor([1.0] * 4 + [1000.0] * 5)[:, None]
    each = torch.cat([quantizer.inputs(x[:4]), quantizer.inputs(x[4:])])
    together = quantizer.inputs(x, [4, 0, 5])
    quantizer, weight = FakeQuantizer(128), torch.randn(256, 512) * torch.rand(256, 512)
    shards = [torch.cat([quantizer.weight(part) for part in half.split(256, 1)], 1) for half in weight.split(128)]
    return x, together, each, quantizer.weight(weight), torch.cat(shards)
