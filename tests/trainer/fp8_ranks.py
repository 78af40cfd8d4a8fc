"""What each process does in test_fp8_training.py; importing Megatron and modelopt is most of its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from ranks import end_layout
from trainer.layouts import make_config, make_trainer, run_layout, score, update

from megatron_rl.models import fp8
from megatron_rl.models.experts import FakeQuantizer
from megatron_rl.models.precision import TRAIN
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.trainer import Trainer

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
    delayed = delayed_scales(model, samples, Path(folder))
    return {"recipes": recipes, "cases": run(model, samples, cases), "delayed": delayed}


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


# -- delayed scaling, by a stand-in for what Transformer Engine keeps ------------------------------------------------------


class Scaled:
    """A local layer whose inputs are rounded to e4m3 by the scale of an earlier pass, with Transformer Engine's bookkeeping.

    Every forward raises the amax; `advance`, which it calls after a forward with gradients, makes scales of amaxes.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        layer.fp8_meta = {"num_gemms": 1}
        layer.init_fp8_meta_tensors = self.allocate
        layer.get_extra_state = lambda: torch.ones(3, dtype=torch.uint8)  # a pickle
        layer.set_extra_state = self.refuse
        layer.register_forward_pre_hook(self.enter)

    def allocate(self, _: Any) -> None:
        for key in ("scaling_fwd", "scaling_bwd"):
            self.layer.fp8_meta[key] = SimpleNamespace(scale=torch.ones(1), amax_history=torch.zeros(1, 1))

    def refuse(self, state: Any) -> None:
        if state is not None:
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

    def enter(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if "scaling_fwd" not in self.layer.fp8_meta:
            self.allocate(None)
        state, x = self.layer.fp8_meta["scaling_fwd"], args[0]
        state.amax_history.copy_(torch.maximum(state.amax_history, x.detach().abs().max()))
        rounded = (x.detach() * state.scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / state.scale
        return x + (rounded - x.detach()).to(x.dtype), *args[1:]

    def advance(self) -> None:
        for key in self.layer.fp8_meta.keys() & {"scaling_fwd", "scaling_bwd"}:
            state = self.layer.fp8_meta[key]
            state.scale.copy_(torch.where(state.amax_history[0] > 0, 448 / state.amax_history[0], state.scale))
            state.amax_history.zero_()


class WithScales:
    """A trainer whose attention layers are `Scaled`."""

    def __init__(self, model: str) -> None:
        self.trainer: Trainer = make_trainer(make_config(model, {"precision": {"train": "bf16"}}))
        self.trainer.model = replace(self.trainer.model, recipe=TRAIN["fp8_delayed"])
        self.layers = [
            Scaled(getattr(layer.self_attention, name))
            for layer in self.trainer.chunks[0].decoder.layers
            for name in ("linear_qkv", "linear_proj")
        ]
        self.trainer.chunks[0].decoder.register_forward_hook(self.leave)

    def leave(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self.advance()

    def advance(self) -> None:
        for layer in self.layers:
            layer.advance()

    def scales(self) -> torch.Tensor:
        """Scales and amaxes of all layers."""
        states = [layer.layer.fp8_meta.get("scaling_fwd") for layer in self.layers]
        return torch.stack([torch.cat([s.scale, s.amax_history[0]]) if s else torch.zeros(2) for s in states])

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.flatten().float() for _, tensor in self.trainer.export_weights()])


def delayed_scales(model: str, samples: list, folder: Path) -> dict[str, Any]:
    """Scales, amaxes and weights of trainers that score once and often, and that stop and go on."""
    found: dict[str, Any] = {}
    for times in (1, 3):
        one = WithScales(model)
        with mock.patch.object(fp8, "calibrate", one.advance):
            batches = one.trainer.pack(samples)
            passes = [one.trainer.compute_log_probs(batches) for _ in range(times)]
            found["first passes"] = [torch.cat(values) for values in passes]
            found[f"before {times}"] = one.scales()
            score(one.trainer, batches)
            update(one.trainer, batches)
            found[f"after {times}"], found[f"weights {times}"] = one.scales(), one.weights()
        if times == 1:
            path = checkpoint.save(folder, 2, one.trainer, one.trainer.ranks, extra={}, keep=2)
            score(one.trainer, batches)
            update(one.trainer, batches)
            found["went on"] = one.weights()
        end_layout()
    again = WithScales(model)
    with mock.patch.object(fp8, "calibrate", again.advance):
        checkpoint.load(path, again.trainer, again.trainer.ranks)
        found["loaded"] = again.scales()
        batches = again.trainer.pack(samples)
        score(again.trainer, batches)
        update(again.trainer, batches)
        found["resumed"] = again.weights()
    end_layout()
    # A process of another layout has other layers and experts: they start anew.
    other = WithScales(model)
    parallel = replace(other.trainer.config.parallel, expert=2)  # as if there were two processes before and now
    other.trainer.config = replace(other.trainer.config, parallel=parallel)
    checkpoint.load(path, other.trainer, other.trainer.ranks)
    found["other layout"] = other.scales()
    end_layout()
    # Another recipe's checkpoint has none.
    plain = make_trainer(make_config(model, {"precision": {"train": "bf16"}}))
    path = checkpoint.save(folder, 3, plain, plain.ranks, extra={}, keep=2)
    end_layout()
    anew = WithScales(model)
    checkpoint.load(path, anew.trainer, anew.trainer.ranks)
    found["anew"] = anew.scales()
    end_layout()
    return found
