"""GroupedExperts against Megatron's SequentialMLP, and expert tensor parallelism against one process."""

from __future__ import annotations

import pytest
import torch
from layer_world import MOE, ProcessGroupCollection, fill, layer_config, parallel_world
from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from ranks import run_ranks

from megatron_rl.checks.activations import GPU
from megatron_rl.models.experts import GroupedExperts
from megatron_rl.models.spec import layer_spec
from megatron_rl.ops import matmuls

SUBMODULES = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


@pytest.fixture(scope="module", autouse=True)
def world():
    with parallel_world():
        yield


def both(family: str, other: type = SequentialMLP):
    config = layer_config(family)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    modules = [cls(config.num_moe_experts, config, SUBMODULES, groups) for cls in (GroupedExperts, other)]
    for module in modules:
        fill(module)
    return config, modules


def outputs_and_gradients(module, x, counts, probs, direction):
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out, bias = module(x, counts, probs)
    assert bias is None
    out.backward(direction)
    return [out, x.grad, probs.grad, *[p.grad for _, p in sorted(module.named_parameters())]]


class GptOssExperts(GroupedExperts):
    """gpt-oss's experts by definition. (SequentialMLP cannot train them: it adds the bias to a view in place.)"""

    def forward(self, x, counts, probs):
        outputs = []
        for expert, rows, p in zip(
            self.local_experts, x.split(counts.tolist()), probs.split(counts.tolist()), strict=True
        ):
            up = rows @ expert.linear_fc1.weight.T + expert.linear_fc1.bias
            gate, linear = up.chunk(2, dim=-1)
            gate, linear = gate.clamp(max=0.7), linear.clamp(-0.7, 0.7)
            hidden = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
            outputs.append((hidden @ expert.linear_fc2.weight.T + expert.linear_fc2.bias) * p[:, None])
        return torch.cat(outputs), None


@pytest.fixture(params=["one by one", "together"])
def products(request, monkeypatch) -> list[tuple[int, ...]] | None:
    """Shapes of products of all experts at once, as on a GPU that has them; None: each expert has its own, as here."""
    if request.param == "one by one":
        return None
    seen, grouped = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(matmuls, "served", lambda x, groups: len(x) > 0)
    monkeypatch.setattr(
        matmuls.F,
        "grouped_mm",
        lambda *x, offs: (seen.append((*x[0].shape, *x[1].shape)), grouped(*x, offs=offs))[1],
    )
    return seen


@pytest.mark.parametrize("family", ["moe", "gpt_oss"])
@pytest.mark.parametrize("counts", [[5, 3, 9, 4], [0, 7, 0, 2], [0, 0, 0, 0], [11, 0, 0, 0]])
def test_equals_sequential_mlp(family, counts, products):
    """gpt_oss: biases, clamped quick-GELU and the offset of the linear half."""
    config, (ours, theirs) = both(family, GptOssExperts if family == "gpt_oss" else SequentialMLP)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert list(ours.sharded_state_dict("e.")) == list(theirs.sharded_state_dict("e."))
    tokens = sum(counts)
    x, direction = (torch.randn(tokens, config.hidden_size) * 2 for _ in range(2))
    arguments = (x, torch.tensor(counts), torch.rand(tokens), direction)
    for a, b in zip(outputs_and_gradients(ours, *arguments), outputs_and_gradients(theirs, *arguments), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    # fc1 and fc2: forward and both gradients, and those of both biases and of fc2's scales.
    if products is not None:
        assert len(products) == (0 if not tokens else 6 if family == "moe" else 9)


def test_in_bf16_products_of_all_experts_are_those_of_each(monkeypatch):
    """Rounded to bf16 alike, but for sums in another order: 2^-8 of the largest."""
    _, (ours, theirs) = both("gpt_oss", GroupedExperts)
    ours, theirs = ours.bfloat16(), theirs.bfloat16()
    counts = torch.tensor([0, 40, 3, 21])
    x, direction = (torch.randn(64, 32).bfloat16() for _ in range(2))
    arguments = (x, counts, torch.rand(64), direction)
    expected = outputs_and_gradients(theirs, *arguments)
    monkeypatch.setattr(matmuls, "served", lambda x, groups: True)
    for a, b in zip(outputs_and_gradients(ours, *arguments), expected, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= 2**-6 * b.double().norm()


@pytest.mark.parametrize("family", ["moe", "gpt_oss"])
def test_the_fused_activations_of_transformer_engines_grouped_experts_are_the_same(family):
    """What Megatron's TEGroupedMLP calls with bias_activation_fusion, which it has on a GPU."""
    config = layer_config(family)
    hidden, probs = torch.randn(13, 24) * 2, torch.rand(13, 1)
    gate, linear = hidden.chunk(2, dim=-1)
    if family == "moe":
        expected = torch.nn.functional.silu(gate) * linear * probs
        found = weighted_bias_swiglu_impl(hidden, None, probs)
    else:
        limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        expected = gate * torch.sigmoid(1.702 * gate) * (linear + offset) * probs
        found = weighted_bias_quick_geglu_impl(hidden, None, probs, False, offset, limit)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_what_transformer_engines_grouped_experts_keep_of_gpt_oss_is_what_the_plan_counts():
    """Between their two products, by Megatron's own functions: both halves, clamped and not; never a bias for every token.

    With the activation, which the second product keeps, Kernels.clamped_experts tensors of the inner size.
    """
    tokens, inner, hidden, counts = 64, 24, 512, [40, 24]
    config = layer_config("gpt_oss")
    up, probs, out = (torch.randn(tokens, width, requires_grad=True) for width in (2 * inner, 1, hidden))
    biases = [torch.randn(hidden, requires_grad=True) for _ in counts]
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
        activated = weighted_bias_quick_geglu_impl(up, None, probs, False, offset, limit)
        TEGroupedMLP._apply_bias(out, biases, counts, probs)
    assert activated.shape == (tokens, inner)
    numbers = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 4
    assert 0 <= numbers - (GPU.clamped_experts - 1) * tokens * inner <= tokens + len(counts) * hidden + 1


def test_every_expert_gets_a_gradient_and_idle_ones_get_zero():
    _, (ours, _) = both("gpt_oss")
    outputs_and_gradients(ours, torch.randn(3, 32), torch.tensor([0, 3, 0, 0]), torch.rand(3), torch.randn(3, 32))
    for expert, module in enumerate(ours.local_experts):
        for parameter in module.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) == (expert == 1)


def test_wrapped_linear_layers_take_megatrons_path():
    """A LoRA adapter or a quantizer around fc1 must not be passed by."""
    _, (ours, _) = both("moe")

    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            out, bias = self.inner(x)
            return 2 * out, bias

    arguments = (torch.randn(8, 32), torch.tensor([2, 2, 2, 2]), torch.rand(8))
    plain = ours(*arguments)[0]
    ours.local_experts[1].linear_fc1 = Doubled(ours.local_experts[1].linear_fc1)
    changed = ours(*arguments)[0] != plain
    assert changed[2:4].any(1).all()
    assert not changed[[0, 1, 4, 5, 6, 7]].any()


def moe_pass(family: str, expert_tensor: int) -> dict:
    """One MoE layer on the same tokens: this rank's part of the output, the gradients of its tokens and of its fc1."""
    options = {"tensor_model_parallel_size": expert_tensor, "sequence_parallel": True} if expert_tensor > 1 else {}
    config = layer_config(family, expert_tensor_parallel_size=expert_tensor, **options)
    spec = layer_spec(config).layer_specs[-1].submodules.mlp
    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = spec(config=config, pg_collection=groups, is_mtp_layer=False)
    module.set_layer_number(1)
    generator = torch.Generator().manual_seed(5)
    rank = groups.expt_tp.rank()
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            whole = list(parameter.shape)
            part = None
            if expert_tensor > 1 and "fc1" in name:
                whole[0] *= expert_tensor
                gate, linear = (torch.randn([whole[0] // 2, *whole[1:]], generator=generator) for _ in range(2))
                part = torch.cat([gate.chunk(expert_tensor)[rank], linear.chunk(expert_tensor)[rank]])
            elif "fc1" in name:
                part = torch.cat([torch.randn([whole[0] // 2, *whole[1:]], generator=generator) for _ in range(2)])
            elif expert_tensor > 1 and name.endswith("fc2.weight"):
                whole[1] *= expert_tensor
                part = torch.randn(whole, generator=generator).chunk(expert_tensor, dim=1)[rank]
            else:
                part = torch.randn(whole, generator=generator)
            parameter.copy_(part * 0.2)
    x = torch.randn(12, 1, config.hidden_size, generator=generator)
    direction = torch.randn(12, 1, config.hidden_size, generator=generator)
    mine = x.chunk(expert_tensor)[rank].clone().requires_grad_()
    out, _ = module(mine)
    out.backward(direction.chunk(expert_tensor)[rank])
    fc1 = {n: p.grad.chunk(2) for n, p in module.named_parameters() if n.endswith("fc1.weight")}
    return {"out": out.detach(), "x": mine.grad, "fc1": fc1}


def on_two_ranks() -> dict:
    with parallel_world(tensor=2, expert_tensor=2):
        return {family: moe_pass(family, 2) for family in ("moe", "deepseek")}


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, "test_experts:on_two_ranks", timeout=240)


@pytest.mark.parametrize("family", ["moe", "deepseek"])
def test_expert_tensor_parallelism_equals_one_process(two_ranks, family):
    """deepseek: with a shared expert, which is split over the same ranks."""
    one = moe_pass(family, 1)
    for key in ("out", "x"):
        torch.testing.assert_close(torch.cat([r[family][key] for r in two_ranks]), one[key], atol=1e-5, rtol=1e-5)
    assert len(one["fc1"]) == MOE["num_moe_experts"] + (family == "deepseek")
    for name, halves in one["fc1"].items():
        for half, expected in enumerate(halves):
            parts = torch.cat([r[family]["fc1"][name][half] for r in two_ranks])
            torch.testing.assert_close(parts, expected, atol=1e-5, rtol=1e-5)
