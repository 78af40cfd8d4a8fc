"""The fused and sharded layout of SGLang's parameters, family by family, against fused tensors that are built here."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from megatron_rl_plugin import fingerprint
from megatron_rl_plugin.fingerprint import describe
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.sync.checksums import ExpectedChecksums, keep_together, locate, parse

H, I, E, HEADS, KV, D, VOCAB = 32, 24, 4, 8, 2, 4, 41  # noqa: E741
LAYER = "model.layers.0"


def pad_rows(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """SGLang pads the vocabulary with zeros to a multiple of 64."""
    return torch.cat([tensor, tensor.new_zeros(-len(tensor) % multiple, *tensor.shape[1:])])


class World:
    """Hugging Face tensors of one layer, and what each tensor-parallel rank of SGLang makes of them."""

    def __init__(self, tensor_parallel: int = 1, expert_parallel: int = 1):
        self.tp, self.ep = tensor_parallel, expert_parallel
        self.pushed: dict[str, torch.Tensor] = {}
        self.ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(tensor_parallel)]

    def new(self, name: str, *shape: int) -> torch.Tensor:
        self.pushed[name] = torch.randn(shape)
        return self.pushed[name]

    def rows(self, tensor: torch.Tensor, rank: int, cuts: int | None = None) -> torch.Tensor:
        """A rank's share of the rows; with fewer cuts than ranks neighbors share one (key-value heads)."""
        cuts = cuts or self.tp
        return tensor.chunk(cuts)[rank * cuts // self.tp]

    def attention(self, bias: bool = False, heads: int = HEADS, kv: int = KV) -> None:
        for kind in ["weight", "bias"] if bias else ["weight"]:
            wide = [H] if kind == "weight" else []
            q = self.new(f"{LAYER}.self_attn.q_proj.{kind}", heads * D, *wide)
            k = self.new(f"{LAYER}.self_attn.k_proj.{kind}", kv * D, *wide)
            v = self.new(f"{LAYER}.self_attn.v_proj.{kind}", kv * D, *wide)
            for r, rank in enumerate(self.ranks):
                shards = [self.rows(q, r), self.rows(k, r, min(self.tp, kv)), self.rows(v, r, min(self.tp, kv))]
                rank[f"{LAYER}.self_attn.qkv_proj.{kind}"] = torch.cat(shards)
        out = self.new(f"{LAYER}.self_attn.o_proj.weight", H, heads * D)
        norm = self.new(f"{LAYER}.input_layernorm.weight", H)
        for r, rank in enumerate(self.ranks):
            rank[f"{LAYER}.self_attn.o_proj.weight"] = out.chunk(self.tp, 1)[r]
            rank[f"{LAYER}.input_layernorm.weight"] = norm

    def vocabulary(self) -> None:
        table = pad_rows(self.new("model.embed_tokens.weight", VOCAB, H), 64)
        for r, rank in enumerate(self.ranks):
            rank["model.embed_tokens.weight"] = self.rows(table, r)

    def mlp(self, prefix: str) -> None:
        gate, up = self.new(f"{prefix}.gate_proj.weight", I, H), self.new(f"{prefix}.up_proj.weight", I, H)
        down = self.new(f"{prefix}.down_proj.weight", H, I)
        for r, rank in enumerate(self.ranks):
            rank[f"{prefix}.gate_up_proj.weight"] = torch.cat([self.rows(gate, r), self.rows(up, r)])
            rank[f"{prefix}.down_proj.weight"] = down.chunk(self.tp, 1)[r]

    def experts(self, prefix: str, gate="gate_proj", up="up_proj", down="down_proj") -> None:
        gates = [self.new(f"{prefix}.{e}.{gate}.weight", I, H) for e in range(E)]
        ups = [self.new(f"{prefix}.{e}.{up}.weight", I, H) for e in range(E)]
        downs = [self.new(f"{prefix}.{e}.{down}.weight", H, I) for e in range(E)]
        inside = self.tp // self.ep
        for r, rank in enumerate(self.ranks):
            own = range(E)[r // inside * E // self.ep : (r // inside + 1) * E // self.ep]
            cut = r % inside
            w13 = [torch.cat([gates[e].chunk(inside)[cut], ups[e].chunk(inside)[cut]]) for e in own]
            rank[f"{prefix}.w13_weight"] = torch.stack(w13)
            rank[f"{prefix}.w2_weight"] = torch.stack([downs[e].chunk(inside, 1)[cut] for e in own])

    def padded_experts(self, multiple: int) -> None:
        """As SGLang pads them for its CPU and some GPU kernels: gate, zeros, up, zeros; and columns of w2."""
        prefix = f"{LAYER}.mlp.experts"
        self.experts(prefix)
        (rank,) = self.ranks
        gate, up = rank[f"{prefix}.w13_weight"].chunk(2, dim=1)
        rank[f"{prefix}.w13_weight"] = torch.cat(
            [pad_rows(part.transpose(0, 1), multiple).transpose(0, 1) for part in (gate, up)], dim=1
        )
        rank[f"{prefix}.w2_weight"] = torch.nn.functional.pad(rank[f"{prefix}.w2_weight"], (0, -I % multiple))

    def gpt_oss_experts(self, hidden: int, intermediate: int, triton: bool) -> None:
        prefix = f"{LAYER}.mlp.experts"
        w13 = self.new(f"{prefix}.gate_up_proj", E, hidden, 2 * intermediate)
        w2 = self.new(f"{prefix}.down_proj", E, intermediate, hidden)
        b13 = self.new(f"{prefix}.gate_up_proj_bias", E, 2 * intermediate)
        b2 = self.new(f"{prefix}.down_proj_bias", E, hidden)
        for r, rank in enumerate(self.ranks):
            shard13, shard2 = w13.chunk(self.tp, 2)[r], w2.chunk(self.tp, 1)[r]
            rank[f"{prefix}.w13_weight"] = shard13 if triton else shard13.transpose(1, 2).contiguous()
            rank[f"{prefix}.w2_weight"] = shard2 if triton else shard2.transpose(1, 2).contiguous()
            rank[f"{prefix}.w13_weight_bias"] = b13.chunk(self.tp, 1)[r]
            rank[f"{prefix}.w2_weight_bias"] = b2 if r == 0 else torch.zeros_like(b2)

    def engine(self):
        return [{name: parse(describe(tensor)) for name, tensor in rank.items()} for rank in self.ranks]

    def mismatches(self, pushed: dict[str, torch.Tensor] | None = None) -> list[str]:
        engine = self.engine()
        shapes = {name: parameter.shape for name, parameter in engine[0].items()}
        expected = ExpectedChecksums(engine, partial(locate, parameters=shapes))
        for name, tensor in (pushed or self.pushed).items():
            expected.add(name, tensor)
        return expected.mismatches(engine)


def dense(world: World) -> None:
    world.vocabulary()
    world.attention(bias=True)
    world.mlp(f"{LAYER}.mlp")


def qwen3_moe(world: World) -> None:
    world.vocabulary()
    world.attention()
    world.experts(f"{LAYER}.mlp.experts")


def mixtral(world: World) -> None:
    world.attention()
    world.experts(f"{LAYER}.block_sparse_moe.experts", "w1", "w3", "w2")


def deepseek(world: World) -> None:
    a = world.new(f"{LAYER}.self_attn.q_a_proj.weight", 12, H)
    b = world.new(f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", 10, H)
    for rank in world.ranks:
        rank[f"{LAYER}.self_attn.fused_qkv_a_proj_with_mqa.weight"] = torch.cat([a, b])
    world.mlp(f"{LAYER}.mlp.shared_experts")
    world.experts(f"{LAYER}.mlp.experts")


def with_scales(family, block: int = 2):
    """Every matrix in FP8 beside it: scales stand for what they belong to, in blocks of block x block."""

    def build(world: World) -> None:
        family(world)
        for tensors in (world.pushed, *world.ranks):
            for name in [n for n in tensors if re.search(r"proj.*weight$|experts.*weight$", n)]:
                scale = tensors[name][..., ::block, ::block].contiguous()
                tensors[f"{name}_scale_inv"] = scale
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    build.__name__ = f"{family.__name__}_fp8"
    return build


FAMILIES = [dense, qwen3_moe, mixtral, deepseek]


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("family", [*FAMILIES, *map(with_scales, FAMILIES)])
def test_what_was_pushed_is_what_is_found(family, tp, ep):
    """Also key-value heads shared by ranks (tp 4), the padded vocabulary, and whole experts on each rank."""
    world = World(tp, ep)
    family(world)
    assert world.mismatches() == []
    in_any_order = dict(reversed(world.pushed.items()))
    assert world.mismatches(in_any_order) == []


@pytest.mark.parametrize(
    ("heads", "kv", "tp"),
    [(8, 2, 4), (8, 4, 8), (16, 4, 8), (32, 4, 8), (16, 4, 16), (32, 8, 16), (48, 16, 16), (24, 4, 8)],
)
def test_key_value_heads_that_ranks_share(heads, kv, tp):
    """A scale has one row a head, fewer than there are ranks; and shapes alone do not tell 16 and 4 heads' cuts on 16."""
    world = World(tp)
    with_scales(lambda world: world.attention(heads=heads, kv=kv), block=D)(world)
    assert world.mismatches() == []
    for kind in ("weight", "weight_scale_inv"):
        wrong = {name: tensor.clone() for name, tensor in world.pushed.items()}
        tensor = wrong[f"{LAYER}.self_attn.v_proj.{kind}"]
        tensor.view(torch.uint8).view(-1)[-1] ^= 1
        assert len(world.mismatches(wrong)) == 1


def test_padded_experts():
    world = World()
    world.padded_experts(multiple=32)
    assert world.ranks[0][f"{LAYER}.mlp.experts.w13_weight"].shape == (E, 64, H)
    assert world.ranks[0][f"{LAYER}.mlp.experts.w2_weight"].shape == (E, H, 32)
    assert world.mismatches() == []


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 24), (32, 16), (32, 32)])
@pytest.mark.parametrize("tp", [1, 2])
def test_gpt_oss(hidden, intermediate, triton, tp):
    """[E, in, out] on the Hugging Face side; w13 is square in one case, w2 in another (gpt-oss-20b)."""
    world = World(tp)
    world.attention(bias=True)
    world.gpt_oss_experts(hidden, intermediate, triton)
    assert world.mismatches() == []


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrong_tensor_is_named(family, tp):
    """Each pushed tensor, changed in one element, is named, and nothing else is."""
    world = World(tp)
    family(world)
    for name in world.pushed:
        wrong = {k: v.clone() for k, v in world.pushed.items()}
        wrong[name].view(-1)[-1] += 1e-3
        (line,) = world.mismatches(wrong)
        assert line.startswith(locate(name, {k: v.shape for k, v in world.ranks[0].items()}).parameter)
        assert re.sub(r"experts\.\d", "experts.*", name) in line


@pytest.mark.parametrize("tp", [1, 2])
def test_exchanged_tensors(tp):
    world = World(tp)
    qwen3_moe(world)
    experts = f"{LAYER}.mlp.experts"
    pairs = [
        (f"{experts}.0.gate_proj.weight", f"{experts}.1.gate_proj.weight"),
        (f"{experts}.0.gate_proj.weight", f"{experts}.0.up_proj.weight"),
        (f"{experts}.2.down_proj.weight", f"{experts}.3.down_proj.weight"),
        (f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight"),
    ]
    for a, b in pairs:
        (line,) = world.mismatches(world.pushed | {a: world.pushed[b], b: world.pushed[a]})
        assert "w13" in line or "w2" in line or "qkv" in line


def test_transposed_and_missing_tensors():
    world = World()
    qwen3_moe(world)
    out = f"{LAYER}.self_attn.o_proj.weight"
    (line,) = world.mismatches(world.pushed | {out: world.pushed[out].T.contiguous()})
    assert out in line
    without = {name: tensor for name, tensor in world.pushed.items() if name != out}
    assert world.mismatches(without) == [f"{out} (nothing was pushed for it)"]
    without = {name: tensor for name, tensor in world.pushed.items() if "k_proj" not in name}
    assert ["qkv_proj" in line for line in world.mismatches(without)] == [True]


def test_names_without_a_place():
    shapes = {f"{LAYER}.mlp.gate.weight": (E, H)}
    for name in ("model.layers.7.mlp.gate.weight", f"{LAYER}.mlp.experts.0.gate_proj.weight", "oddity"):
        assert locate(name, shapes) is None


def test_shared_expert_that_is_served_as_the_last_routed_one():
    shapes = {f"{LAYER}.mlp.experts.w13_weight": (E + 1, 2 * I, H), f"{LAYER}.mlp.experts.w2_weight": (E + 1, H, I)}
    slot = locate(f"{LAYER}.mlp.shared_experts.up_proj.weight", shapes)
    assert (slot.parameter, slot.expert, slot.part) == (f"{LAYER}.mlp.experts.w13_weight", E, 1)


def test_halves_of_one_fused_parameter_travel_together():
    """SGLang forgets a half of fused_qkv_a_proj_with_mqa that comes in another call than its partner."""
    world = World()
    deepseek(world)
    shapes = {name: tuple(tensor.shape) for name, tensor in world.ranks[0].items()}
    names = list(world.pushed)
    half = names.pop(0)
    names.append(half)  # as far from its partner as can be
    groups = list(keep_together(((name, world.pushed[name]) for name in names), partial(locate, parameters=shapes)))
    assert sorted(name for group in groups for name, _ in group) == sorted(world.pushed)
    assert [len(group) for group in groups if len(group) > 1] == [2]
    assert {name for name, _ in groups[-1]} == {half, f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight"}


def test_checksums_of_a_server_without_the_plugin_are_recognised():
    assert parse("0f" * 8) is None


@pytest.mark.parametrize("family", [dense, qwen3_moe])
def test_fingerprints_of_gpu_tensors_stay_on_the_gpu(family):
    """On fake CUDA tensors, whose values nobody can read: fetching any of them would be an error."""
    world = World(tensor_parallel=2)
    family(world)
    engine = world.engine()
    shapes = {name: parameter.shape for name, parameter in engine[0].items()}
    expected = ExpectedChecksums(engine, partial(locate, parameters=shapes))
    caches = (fingerprint._keys, fingerprint._powers)
    try:
        with FakeTensorMode():
            [cached.cache_clear() for cached in caches]
            for name, tensor in world.pushed.items():
                expected.add(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
    finally:
        [cached.cache_clear() for cached in caches]
    hashes = [h for pieces in expected._pieces.values() for piece in pieces for h in piece.hashes]
    assert len(hashes) >= len(world.pushed) and {h.device.type for h in hashes} == {"cuda"}
