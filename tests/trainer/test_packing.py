"""Packing: every label, mask and value lands where it belongs, under every layout; budgets hold; loads are even."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.packing import IGNORED, Layout, assign, micro_batch_count, pack, pack_all
from megatron_rl.data.sequence import FIELDS, Field, RouterFeatures, Sequence
from megatron_rl.data.trajectory import Trajectory, load_trajectories, save_trajectories
from megatron_rl.errors import UserError
from megatron_rl.ops.token_places import TokenPlaces
from megatron_rl.routing.table import RouteShape

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 17)), min_size=1, max_size=12)


def make(sizes, seed=0) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    samples = []
    for i, (p, r) in enumerate(sizes):
        sample = Sequence(tokens=rng.integers(1, 50, p + r).astype(np.int32), prompt_length=p)
        sample["loss_mask"], sample["rollout_log_probs"] = rng.random(r) < 0.8, rng.normal(size=r)
        sample["advantages"] = float(i)
        samples.append(sample)
    return samples


@pytest.mark.parametrize("kinds", ["hidden", "logits", "mixed", "mixed with none"])
def test_logits_of_the_engine_keep_to_their_own_hidden_states(kinds):
    """A sequence whose hidden states were not asked for leaves what predictors learn from, beside one that has them."""
    rng, shape = np.random.default_rng(), RouteShape((0, 2), 8, 2)
    samples = make([(int(rng.integers(1, 6)), int(rng.integers(4, 12))) for _ in range(6)])
    widths = {"hidden": [3] * 6, "logits": [0] * 6, "mixed": [3, 0] * 3, "mixed with none": [3, 0, None] * 2}[kinds]
    expected, start = [], 0
    for sample, width in zip(samples, widths, strict=True):
        sample.routes = np.argsort(rng.random((sample.inputs, 2, 8)), -1)[..., :2].astype(np.uint8)
        if width is not None:
            positions = torch.from_numpy(np.flatnonzero(rng.random(sample.response_length) < 0.6)).int()
            sizes = ((len(positions), 2, width), (len(positions), 2, 8))
            sample.features = RouterFeatures(positions, *(torch.from_numpy(rng.random(size)) for size in sizes))
            if width or kinds == "logits":
                expected.append((start + sample.prompt_length - 1 + positions, sample.features))
        start += sample.inputs
    table = pack(samples, [*range(6)], Layout(routes=shape)).routes
    assert table.cached.tolist() == torch.cat([rows for rows, _ in expected]).tolist()
    for column, layer in enumerate(shape.moe_layers):
        features = table.features[layer]
        assert torch.equal(features.logits, torch.cat([f.logits for _, f in expected])[:, column])
        if kinds == "logits":
            assert features.hidden is None
        else:
            assert torch.equal(features.hidden, torch.cat([f.hidden for _, f in expected])[:, column])


@settings(max_examples=60)
@given(lengths, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]), st.integers(0, 2**31))
def test_all_ranks_together_hold_each_position_once(sizes, layout, seed):
    samples = make(sizes, seed)
    tensor, context = layout
    seen: dict[tuple[int, int], tuple] = {}
    for rank in range(context):
        batch = pack(samples, list(range(len(samples))), Layout(tensor, context, rank))
        tokens = batch.tokens.shape[1]
        assert tokens % tensor == 0
        assert int(batch.cu_seqlens[-1]) == tokens * context
        assert (batch.cu_seqlens.diff() % (2 * context if context > 1 else 1) == 0).all()
        for t in range(tokens):
            row = int(batch.segments.ids[t])
            if row < 0:
                assert batch.labels[t] == IGNORED and not batch.mask[t]
                continue
            position = int(batch.position_ids[0, t])
            key = (row, position)
            assert key not in seen
            seen[key] = (
                int(batch.tokens[0, t]),
                int(batch.labels[t]),
                bool(batch.mask[t]),
                float(batch["rollout_log_probs"][t]),
                float(batch["advantages"][t]),
            )
    for row, sample in enumerate(samples):
        for position in range(sample.inputs):
            token, label, mask, log_prob, advantage = seen.pop((row, position))
            assert token == sample.tokens[position]
            i = position + 1 - sample.prompt_length
            if i < 0:
                assert label == IGNORED and not mask
            else:
                assert label == (sample.tokens[position + 1] if mask else IGNORED), "what does not count costs no row"
                assert mask == sample["loss_mask"][i]
                assert log_prob == sample["rollout_log_probs"][i]
                assert advantage == sample["advantages"][i]
    assert not seen


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 200))
def test_budget_holds_and_nothing_is_lost(sizes, budget):
    count = micro_batch_count(sizes, budget)
    bins = assign(sizes, count)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert max(sum(sizes[i] for i in b) for b in bins) <= budget


def test_more_micro_batches_than_sequences_are_padding_alone():
    batches = pack_all(make([(3, 4)]), 3, Layout(tensor=2, context=2))
    assert [b.segments.count for b in batches] == [1, 0, 0]
    assert all((b.labels == IGNORED).all() and b.tokens.shape[1] % 2 == 0 for b in batches[1:])


@settings(max_examples=40)
@given(lengths, st.sampled_from([1, 2, 4]), st.integers(0, 2**31))
def test_kept_tokens_lie_with_their_tokens(sizes, context, seed):
    rng = np.random.default_rng(seed)
    samples = make(sizes, seed)
    for sample in samples[1:]:
        responses = sample.response_length
        sample.kept = [
            rng.choice(50, int(rng.integers(1, 6)), replace=False).astype(np.int32) for _ in range(responses)
        ]
    for rank in range(context):
        batch = pack(samples, list(range(len(samples))), Layout(1, context, rank))
        if len(samples) == 1:
            assert batch.kept is None
            continue
        for t in range(batch.tokens.shape[1]):
            row, position = int(batch.segments.ids[t]), int(batch.position_ids[0, t])
            ids = batch.kept.ids[batch.kept.borders[t] : batch.kept.borders[t + 1]].tolist()
            i = position + 1 - samples[row].prompt_length if row >= 0 else -1
            known = row > 0 and 0 <= i < samples[row].response_length
            assert ids == (samples[row].kept[i].tolist() if known else [])


@settings(max_examples=40)
@given(lengths, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.integers(0, 2**31))
def test_what_a_gpu_would_be_waited_for_comes_with_the_batch(sizes, layout, seed):
    samples = make(sizes, seed)
    tensor, context = layout
    for rank in range(context):
        batch = pack(samples, list(range(len(samples))), Layout(tensor, context, rank))
        assert torch.equal(batch.label_rows, (batch.labels != IGNORED).nonzero()[:, 0])
        later = TokenPlaces.build(batch.cu_seqlens, batch.tokens.shape[1], context, rank)
        assert torch.equal(batch.places.positions, later.positions) and torch.equal(batch.places.place, later.place)
        assert torch.equal(batch.places.sequences.on_device, batch.cu_seqlens)


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_that_the_model_does_not_have_is_named(token):
    (sample,) = make([(2, 3)])
    sample.tokens[3] = token
    sample["loss_mask"] = True
    with pytest.raises(UserError, match=rf"token {token} at position 3 .* vocabulary of 50"):
        pack([sample], [0], Layout(vocabulary=50))
    assert pack([sample], [0], Layout()).labels[2] == token


# -- fields ----------------------------------------------------------------------------------------------------------------


def trajectory(sample: Sequence) -> Trajectory:
    return Trajectory(prompt_id="a", group_id=0, **vars(sample))


@settings(max_examples=40)
@given(lengths, st.sampled_from([1, 2, 4]), st.integers(0, 2**31))
def test_a_new_field_is_one_declaration(sizes, context, seed):
    """Nothing but FIELDS knows of it, and it goes where all others go: on disk, into batches and their parts."""
    rng = np.random.default_rng(seed)
    samples = make(sizes, seed)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setitem(FIELDS, "surprise", Field(np.int32, default=-7))
        for sample in samples[::2]:  # the others have its default
            sample["surprise"] = rng.integers(0, 1000, sample.response_length)
        save_trajectories(Path(folder) / "step.npz", [trajectory(sample) for sample in samples])
        loaded = load_trajectories(Path(folder) / "step.npz")
        for ours, theirs in zip(samples, loaded, strict=True):
            assert ours.fields.keys() == theirs.fields.keys() and theirs["surprise"].dtype == np.int32
            assert all(np.array_equal(values, theirs[name]) for name, values in ours.fields.items())
        left = {(row, i) for row, sample in enumerate(samples) for i in range(sample.response_length)}
        for rank in range(context):
            whole = pack(loaded, list(range(len(loaded))), Layout(1, context, rank))
            chosen = torch.from_numpy(rng.permutation(whole.tokens.shape[1])[: 1 + whole.tokens.shape[1] // 2])
            moved = whole.to(torch.device("meta"))
            assert moved["surprise"].device.type == "meta" and moved["surprise"].shape == whole["surprise"].shape
            assert moved.fields.keys() == whole.fields.keys() == {*samples[0].fields}
            for batch in (whole, whole.take(chosen)):
                assert batch["surprise"].dtype == torch.int32
                for t, value in enumerate(batch["surprise"].tolist()):
                    row, position = int(batch.segments.ids[t]), int(batch.position_ids[0, t])
                    i = position + 1 - samples[row].prompt_length
                    inside = row >= 0 and i >= 0
                    assert value == (int(samples[row]["surprise"][i]) if inside else -7)
                    left -= {(row, i)} if inside and batch is whole else set()
        assert not left, "every label has come"


def test_a_field_that_is_not_declared_is_none():
    (sample,) = make([(2, 3)])
    with pytest.raises(KeyError, match="surprise"):
        sample["surprise"] = 1.0
    with pytest.raises(KeyError, match="surprise"):
        sample["surprise"]
    with pytest.raises(ValueError, match="broadcast"):
        sample["advantages"] = np.zeros(2)


def test_one_value_for_all_labels_and_the_default_of_none():
    (sample,) = make([(2, 3)])
    sample["advantages"] = 0.5
    assert sample["advantages"].tolist() == [0.5] * 3 and sample["advantages"].dtype == np.float32
    assert "old_log_probs" not in sample.fields and sample["old_log_probs"].tolist() == [0.0] * 3
    batch = pack([sample], [0], Layout())
    assert batch.fields.keys() == {"loss_mask", "rollout_log_probs", "advantages"}, (
        "of a pass over it there is nothing yet"
    )
    assert pack([Sequence.demonstration([1, 2], [3])], [0], Layout()).fields.keys() == batch.fields.keys()


def test_an_older_record_loads(tmp_path):
    """Of before fields had names of their own: log_probs, and rows without what came later."""
    (sample,) = make([(2, 3)])
    row = {"prompt_id": "a", "group_id": 1, "prompt_length": 2, "finish_reason": "stop", "text": "", "reward": 1.0}
    row |= {"reward_parts": {}, "weight_spans": [["0", 0, 3]]}
    arrays = {"0.tokens": sample.tokens, "0.loss_mask": sample["loss_mask"], "0.log_probs": sample["rollout_log_probs"]}
    np.savez(tmp_path / "step.npz", rows=np.frombuffer(json.dumps([row]).encode(), np.uint8), **arrays)
    (loaded,) = load_trajectories(tmp_path / "step.npz")
    assert loaded.fields.keys() == {"loss_mask", "rollout_log_probs"}
    assert all(np.array_equal(values, sample[name]) for name, values in loaded.fields.items())
    assert loaded.reward == 1.0 and [(s.version, s.start, s.end) for s in loaded.weight_spans] == [("0", 0, 3)]
