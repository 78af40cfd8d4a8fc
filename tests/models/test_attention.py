"""Core attention, packed rotary embedding and context parallelism, against Megatron's own modules and one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layer_world import ProcessGroupCollection, fill, layer_config, packed_params, parallel_world, process_group
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from ranks import run_ranks

from megatron_rl.errors import UserError
from megatron_rl.models.attention import CoreAttention, HeadsNormSelfAttention, rotate_packed
from megatron_rl.models.packed import TokenPlaces
from megatron_rl.models.spec import layer_spec


@pytest.fixture(scope="module", autouse=True)
def world():
    with parallel_world():
        yield


def core(config, cls=CoreAttention, layer_number=1, **options):
    return cls(config, layer_number, AttnMaskType.causal, "self", **options)


@pytest.mark.parametrize("family", ["dense", "gpt_oss"])
@pytest.mark.parametrize("layer_number", [1, 2])
def test_equals_megatrons_attention_without_packing(family, layer_number):
    """Layer 1 of gpt_oss has the window, layer 2 has not; both have sinks."""
    config = layer_config(family, masked_softmax_fusion=False)
    ours, theirs = core(config, layer_number=layer_number), core(config, DotProductAttention, layer_number)
    fill(ours), fill(theirs)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    length, batch = 11, 3
    q = torch.randn(length, batch, 4, 16)
    k, v = torch.randn(length, batch, 2, 16), torch.randn(length, batch, 2, 16)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    results = []
    for module in (ours, theirs):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = module(*inputs, mask, attn_mask_type=AttnMaskType.causal)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        results.append([out, *[x.grad for x in inputs], *[p.grad for p in module.parameters()]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_off_by_one_is_a_sink_of_zero():
    config = layer_config("gpt_oss", window_size=None)
    learnable, fixed = core(config), core(dataclasses.replace(config, softmax_type="off-by-one"))
    q, k, v = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    torch.nn.init.zeros_(learnable.softmax_offset)
    packed = packed_params([4, 2])
    torch.testing.assert_close(fixed(q, k, v, packed_seq_params=packed), learnable(q, k, v, packed_seq_params=packed))


def test_what_is_not_supported_is_refused():
    with pytest.raises(UserError, match="attention_dropout to 0"):
        core(layer_config(attention_dropout=0.1))
    with pytest.raises(UserError, match=r"cp_comm_type: 'p2p' is not supported; a2a and all_gather are"):
        core(layer_config(), cp_comm_type="p2p")
    with pytest.raises(UserError, match="only causal is"):
        CoreAttention(layer_config(), 1, AttnMaskType.no_mask, "self")
    with pytest.raises(UserError, match="bias"):
        x = torch.zeros(2, 1, 4, 16)
        core(layer_config())(x, x, x, attention_bias=torch.zeros(1))


def test_the_sinks_are_sharded_for_checkpoints():
    module = core(layer_config("gpt_oss"))
    (key, tensor), *rest = module.sharded_state_dict("here.").items()
    assert (key, tensor.global_shape, tensor.replica_id[:2], rest) == ("here.softmax_offset", (4,), (0, 0), [])
    assert core(layer_config()).sharded_state_dict("here.") == {}
    assert module.softmax_offset.tensor_model_parallel


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_zigzag_layout_is_megatrons(context):
    """Chunk by chunk, from its definition; tokens behind the last sequence are one more."""
    lengths = [2 * context * n for n in (3, 1, 0, 2)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = (int(cu_seqlens[-1]) + 2 * context) // context
    for rank in range(context):
        expected, positions = [], []
        for start, length in zip(
            [*cu_seqlens[:-1].tolist(), int(cu_seqlens[-1])], [*lengths, 2 * context], strict=True
        ):
            chunks = torch.arange(length).chunk(2 * context) if length else []
            mine = [chunks[rank], chunks[2 * context - 1 - rank]] if length else []
            expected += [start + int(p) for chunk in mine for p in chunk]
            positions += [int(p) for chunk in mine for p in chunk]
        layout = TokenPlaces.build(cu_seqlens, tokens, context, rank)
        assert layout.order[rank].tolist() == expected
        assert layout.positions.tolist() == positions
    if context > 1:
        with pytest.raises(ValueError, match="padded to multiples"):
            TokenPlaces.build(torch.tensor([0, 2 * context + 1, 6 * context]), 6, context)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mla_interleaved", [False, True])
@pytest.mark.parametrize("kind", ["rope", "partial", "yarn"])
def test_rotation_of_a_pack_is_bitwise_megatrons(kind, interleaved, mla_interleaved):
    lengths = [5, 1, 9, 4, 9]
    packed, tokens = packed_params(lengths), sum(lengths)
    cp_group = parallel_state.get_context_parallel_group()
    if kind == "yarn":
        rotary = YarnRotaryEmbedding(
            16, original_max_position_embeddings=4, scaling_factor=4.0, use_cpu_initialization=True
        )
        angles, mscale = rotary(max(lengths), packed_seq=True)
    else:
        percent = 0.5 if kind == "partial" else 1.0
        angles, mscale = RotaryEmbedding(16, rotary_percent=percent, use_cpu_initialization=True)(max(lengths)), 1.0
    config = layer_config(rotary_interleaved=interleaved)
    options = {"mscale": mscale, "cp_group": cp_group, "mla_rotary_interleaved": mla_interleaved}
    a = torch.randn(tokens, 4, 16, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    theirs = apply_rotary_pos_emb(a, angles, config, cu_seqlens=packed.cu_seqlens_q, **options)
    positions = TokenPlaces.build(packed.cu_seqlens_q, tokens).positions
    names = {"interleaved": interleaved, "mla_interleaved": mla_interleaved, "mscale": mscale}
    ours = rotate_packed(b.unsqueeze(1), angles, positions, **names).squeeze(1)
    assert torch.equal(ours, theirs)
    direction = torch.randn_like(ours)
    theirs.backward(direction), ours.backward(direction)
    assert torch.equal(a.grad, b.grad)


LENGTHS = [8, 24, 16, 8]


def attention_pass(family: str, context: int, cp_comm_type: str | None = None) -> dict:
    """Output and gradients of one attention layer on this context-parallel rank's part of a pack."""
    config = layer_config(family, context_parallel_size=context)
    attention = layer_spec(config).layer_specs[0].submodules.self_attention
    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = attention.module(
        config,
        attention.submodules,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        cp_comm_type=cp_comm_type,
        pg_collection=groups,
    )
    fill(module)
    packed, whole = packed_params(LENGTHS), sum(LENGTHS)
    generator = torch.Generator().manual_seed(3)
    hidden, direction = (torch.randn(whole, 1, config.hidden_size, generator=generator) for _ in range(2))
    order = TokenPlaces.build(packed.cu_seqlens_q, whole // context, context).order[groups.cp.rank()]
    mine = hidden[order].requires_grad_()
    rotary = {}
    if not config.multi_latent_attention:
        embedding = RotaryEmbedding(config.kv_channels, rotary_percent=1.0, use_cpu_initialization=True)
        rotary = {"rotary_pos_emb": embedding(max(LENGTHS), packed_seq=True)}
    out, _ = module(mine, None, packed_seq_params=packed, **rotary)
    out.backward(direction[order])
    parameters = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {"order": order, "out": out.detach(), "hidden": mine.grad, "parameters": parameters}


def refusal(cp_comm_type: str) -> str:
    x = torch.zeros(4, 2, 16)
    try:
        module = core(layer_config(num_attention_heads=2), cp_comm_type=cp_comm_type)
        module(x, x, x, packed_seq_params=packed_params([16]))
    except UserError as error:
        return str(error)
    return "accepted"


def heads_norm_pass(tensor: int) -> list[dict]:
    """OLMoE's norms of q and k on this tensor-parallel rank's heads."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = layer_config(num_query_groups=4, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1)
    spec = layer_spec(config).layer_specs[0].submodules.self_attention
    module = HeadsNormSelfAttention(
        config, spec.submodules, layer_number=1, attn_mask_type=AttnMaskType.causal, pg_collection=groups
    )
    generator, results = torch.Generator().manual_seed(0), []
    heads = slice(groups.tp.rank() * 4 // tensor, (groups.tp.rank() + 1) * 4 // tensor)
    for norm in (module.q_layernorm, module.k_layernorm):
        norm.weight.data.copy_(torch.rand(4 * 16, generator=generator))
        x, direction = (torch.randn(5, 1, 4, 16, generator=generator)[:, :, heads] for _ in range(2))
        mine = x.clone().requires_grad_()
        out = norm(mine)
        out.backward(direction)
        results.append({"out": out.detach(), "x": mine.grad, "weight": norm.weight.grad})
    return results


def on_four_ranks() -> dict:
    """Everything that needs ranks, in one start of processes; 4 heads, 2 key-value heads."""
    results: dict = {}
    with process_group():
        for context in (2, 4):
            with parallel_world(context=context):
                for family in ("dense", "gpt_oss", "deepseek"):
                    for comm in ("a2a", "all_gather"):
                        results[family, context, comm] = attention_pass(family, context, comm)
                if context == 4:
                    results["refusal"] = refusal("a2a")
                    results["no refusal"] = refusal("all_gather")
        with parallel_world(tensor=2):
            results["norms"] = heads_norm_pass(2)
    return results


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(4, "test_attention:on_four_ranks", timeout=280)


@pytest.mark.parametrize("family", ["dense", "gpt_oss", "deepseek"])
@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("cp_comm_type", ["a2a", "all_gather"])
def test_context_parallelism_equals_one_process(four_ranks, family, context, cp_comm_type):
    """With 4 ranks a2a repeats the 2 key-value heads."""
    one = attention_pass(family, 1)
    many = [rank[family, context, cp_comm_type] for rank in four_ranks[:context]]
    order = torch.cat([part["order"] for part in many])
    for key in ("out", "hidden"):
        torch.testing.assert_close(torch.cat([p[key] for p in many]), one[key][order], atol=1e-5, rtol=1e-5)
    for name, grad in one["parameters"].items():
        total = sum(part["parameters"][name] for part in many)
        torch.testing.assert_close(total, grad, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert ("core_attention.softmax_offset" in one["parameters"]) == (family == "gpt_oss")


def test_heads_that_the_ranks_cannot_share_are_refused(four_ranks):
    assert four_ranks[0]["refusal"].startswith("parallel.context = 4: a tensor-parallel rank's 2 heads in 2 groups")
    assert four_ranks[0]["no refusal"] == "accepted"


def test_norm_over_all_heads_under_tensor_parallelism(four_ranks):
    for i, one in enumerate(heads_norm_pass(1)):
        many = [rank["norms"][i] for rank in four_ranks[:2]]
        for key in ("out", "x"):
            joined = torch.cat([part[key] for part in many], dim=2)
            torch.testing.assert_close(joined, one[key], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(sum(part["weight"] for part in many), one["weight"], atol=1e-6, rtol=1e-5)
