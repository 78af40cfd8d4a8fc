"""Epochs over a rollout batch: the updates that one would do by hand, and where they end early."""

from __future__ import annotations

import pytest
from epochs_ranks import EPOCHS, PARTS
from ranks import fresh_seed, run_ranks

from megatron_rl.config.load import build_config
from megatron_rl.hooks.guards import OLD_KL, TargetKL
from megatron_rl.metrics.reduce import figures, mean
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer.hooks import UpdateContext, updates_of

LAYOUTS = {"dp2": {}, "pp2": {"parallel": {"pipeline": 2}}, "cp2": {"parallel": {"context": 2}}}


@pytest.fixture(scope="module")
def found(tiny_model):
    """Layout -> what its first rank found, which all of them did."""
    seed = fresh_seed()
    model = str(tiny_model("qwen3_moe", "--layers", "2"))
    by_rank = run_ranks(2, "epochs_ranks:run_layouts", (model, seed, [*LAYOUTS.values()]), timeout=300.0)
    for one, other in zip(*by_rank, strict=True):  # their parts of the weights differ, what they did does not
        assert [[u[1:] for u in way] for way in one.values()] == [[u[1:] for u in way] for way in other.values()]
    return dict(zip(LAYOUTS, by_rank[0], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_epochs_are_two_passes_by_hand_to_the_bit(found, layout):
    """With log-probs and routes that are computed once, from batches that no update has touched; not with new ones."""
    epochs, by_hand, again = (found[layout][way] for way in ("epochs", "by hand", "scored again"))
    assert len(epochs) == PARTS * EPOCHS and epochs == by_hand
    assert len({tuple(weights.items()) for weights, *_ in epochs}) == len(epochs), "each update moves weights"
    assert epochs[0][1] == again[PARTS][1] == 0.0 and min(kl for _, kl, _ in epochs[1:]) > 0
    assert epochs[:PARTS] == again[:PARTS] and epochs[PARTS][0] != again[PARTS][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_beyond_the_target_kl_ends_the_step_on_all_ranks(found, layout):
    """Its weights stay those of the update before; below the limit nothing differs to the bit."""
    whole, stops = found[layout]["epochs"], []
    for limit, updates in found[layout].items():
        if isinstance(limit, str):
            continue
        beyond = [number for number, (_, kl, _) in enumerate(whole) if number and kl > limit]
        stop = min(beyond, default=len(whole))
        stops.append(stop)
        assert updates[:stop] == whole[:stop]
        if stop < len(whole):
            (*_, (before, *_), (weights, kl, left_out)) = updates
            assert len(updates) == stop + 1 and kl == whole[stop][1] > limit
            assert weights == before and left_out == len(whole) - stop
    assert min(stops) == 1 and max(stops) == len(whole)


def test_updates_of_a_rollout_batch():
    rollout = [["a"], ["b"], ["c"]]
    assert [*updates_of(rollout, 1)] == [(part, UpdateContext(part, rollout, False)) for part in range(3)]
    passes = [*updates_of(rollout, 3)]
    assert [part for part, _ in passes] == [0, 1, 2] * 3
    assert [place.update for _, place in passes] == [*range(9)]
    assert [place.again for _, place in passes] == [True] * 6 + [False] * 3


def test_the_first_update_is_always_done():
    """As one must be whose KL is not finite, or of no token: what is wrong there is another thing's to say."""
    [hook] = [
        hook
        for hook in update_hooks(build_config({"algorithm": {"target_kl": 0.5}, "batch": {"epochs": 4}}))
        if isinstance(hook, TargetKL)
    ]

    def asked(update: int, total: float, tokens: int) -> tuple[float, float]:
        hook.before_forward([], "update", UpdateContext(update))
        hook.check({OLD_KL: mean(total, tokens)})
        return float(not hook.ends_batch), figures(hook.metrics())["update/left_out"]

    assert asked(0, 50.0, 10) == (1.0, 0.0)
    assert asked(1, 5.0, 10) == (1.0, 0.0), "at the limit"
    assert asked(1, 5.001, 10) == (0.0, 3.0) and hook.ends_batch
    assert asked(3, 5.001, 10) == (0.0, 1.0)
    assert asked(2, float("nan"), 10) == asked(2, 0.0, 0) == (1.0, 0.0) and not hook.ends_batch
