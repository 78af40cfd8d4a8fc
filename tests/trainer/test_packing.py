"""Packing: every label, mask and value lands where it belongs, under every layout; budgets hold; loads are even."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.packing import IGNORED, Layout, Sample, assign, micro_batch_count, pack, pack_all
from megatron_rl.errors import UserError
from megatron_rl.ops.packed_layout import PackedLayout

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 17)), min_size=1, max_size=12)


def make(sizes, seed=0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            rng.integers(1, 50, p + r).astype(np.int32),
            p,
            rng.random(r) < 0.8,
            rng.normal(size=r).astype(np.float32),
            float(i),
        )
        for i, (p, r) in enumerate(sizes)
    ]


@settings(max_examples=60, deadline=None)
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
            row = int(batch.sequence_ids[t])
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
                float(batch.rollout_log_probs[t]),
                float(batch.advantages[t]),
            )
    for row, sample in enumerate(samples):
        for position in range(sample.inputs):
            token, label, mask, log_prob, advantage = seen.pop((row, position))
            assert token == sample.tokens[position]
            i = position + 1 - sample.prompt_length
            if i < 0:
                assert label == IGNORED and not mask
            else:
                assert label == sample.tokens[position + 1]
                assert mask == sample.loss_mask[i]
                assert log_prob == sample.rollout_log_probs[i]
                assert advantage == sample.advantage
    assert not seen


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 200))
def test_budget_holds_and_nothing_is_lost(sizes, budget):
    count = micro_batch_count(sizes, budget)
    bins = assign(sizes, count)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert max(sum(sizes[i] for i in b) for b in bins) <= budget


def test_more_micro_batches_than_sequences_are_padding_alone():
    batches = pack_all(make([(3, 4)]), 3, Layout(tensor=2, context=2))
    assert [b.num_sequences for b in batches] == [1, 0, 0]
    assert all((b.labels == IGNORED).all() and b.tokens.shape[1] % 2 == 0 for b in batches[1:])


@settings(max_examples=40, deadline=None)
@given(lengths, st.sampled_from([1, 2, 4]), st.integers(0, 2**31))
def test_kept_tokens_lie_with_their_tokens(sizes, context, seed):
    rng = np.random.default_rng(seed)
    samples = make(sizes, seed)
    for sample in samples[1:]:
        responses = len(sample.loss_mask)
        sample.kept = [
            rng.choice(50, int(rng.integers(1, 6)), replace=False).astype(np.int32) for _ in range(responses)
        ]
    for rank in range(context):
        batch = pack(samples, list(range(len(samples))), Layout(1, context, rank))
        if len(samples) == 1:
            assert batch.kept is None
            continue
        for t in range(batch.tokens.shape[1]):
            row, position = int(batch.sequence_ids[t]), int(batch.position_ids[0, t])
            ids = batch.kept.ids[batch.kept.borders[t] : batch.kept.borders[t + 1]].tolist()
            i = position + 1 - samples[row].prompt_length if row >= 0 else -1
            known = row > 0 and 0 <= i < len(samples[row].loss_mask)
            assert ids == (samples[row].kept[i].tolist() if known else [])


@settings(max_examples=40, deadline=None)
@given(lengths, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.integers(0, 2**31))
def test_what_a_gpu_would_be_waited_for_comes_with_the_batch(sizes, layout, seed):
    samples = make(sizes, seed)
    tensor, context = layout
    for rank in range(context):
        batch = pack(samples, list(range(len(samples))), Layout(tensor, context, rank))
        assert torch.equal(batch.label_rows, (batch.labels != IGNORED).nonzero()[:, 0])
        later = PackedLayout.build(batch.cu_seqlens, batch.tokens.shape[1], context, rank)
        assert torch.equal(batch.layout.positions, later.positions) and torch.equal(batch.layout.place, later.place)
        assert torch.equal(batch.layout.sequences.on_device, batch.cu_seqlens)


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_that_the_model_does_not_have_is_named(token):
    (sample,) = make([(2, 3)])
    sample.tokens[3] = token
    with pytest.raises(UserError, match=rf"token {token} at position 3 .* vocabulary of 50"):
        pack([sample], [0], Layout(vocabulary=50))
    assert pack([sample], [0], Layout()).labels[2] == token
