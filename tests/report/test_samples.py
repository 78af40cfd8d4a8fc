from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.report.page import leading
from megatron_rl.report.samples import choose

ROLLOUTS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abcdefgh"), st.sampled_from([0.0, 0.5, 1.0])))


def test_the_best_paid_and_the_most_frequent_are_kept_and_the_rest_goes_over_prompts():
    rollouts = [(0, f"plain {i}", 0.1) for i in range(20)] + [(group, "again", 0.0) for group in (3, 4, 5)]
    rollouts += [(1, "odd", 0.2), (2, "well paid", 0.9)]
    assert choose(rollouts, 5) == {
        (2, "well paid"): 1,
        (1, "odd"): 1,
        (3, "again"): 3,
        (0, "plain 0"): 1,  # then a turn of the prompts, in their order
        (4, "again"): 3,
    }
    assert choose(rollouts, 0) == choose([], 8) == {}


def test_a_response_paid_by_one_prompt_is_kept_with_that_prompt():
    assert choose([(0, "yes", 0.0), (1, "yes", 1.0), (2, "no", 0.5)], 1) == {(1, "yes"): 2}


@settings(max_examples=200)
@given(rollouts=ROLLOUTS, most=st.integers(1, 20))
def test_what_is_chosen(rollouts, most):
    chosen = choose(rollouts, most)
    counts = Counter(response for _, response, _ in rollouts)
    assert len(chosen) == min(most, len({r[:2] for r in rollouts}))
    assert all(place in {r[:2] for r in rollouts} and count == counts[place[1]] for place, count in chosen.items())
    if rollouts:
        assert max(r[2] for r in rollouts) in [r[2] for r in rollouts if r[:2] in chosen]
    if most >= 2 and max(counts.values(), default=1) > 1:
        assert max(counts.values()) in chosen.values()


def test_counts_are_added_over_steps_and_once_in_a_step():
    rows = [
        {"step": 1, "response": "x", "reward": 0.5, "count": 4},
        {"step": 1, "response": "x", "reward": 1.0, "count": 4},  # for another prompt of the step
        {"step": 3, "response": "x", "reward": 0.25, "count": 2},
        {"step": 3, "response": "y", "reward": 0.75},  # of a log without counts
    ]
    lists = leading(rows)
    assert [
        (o["sample"]["response"], o["best"], o["count"], o["first"], o["last"]) for o in lists["Highest reward"]
    ] == [
        ("x", 1.0, 6, 1, 3),
        ("y", 0.75, 1, 3, 3),
    ]
    assert [o["count"] for o in lists["Most frequent"]] == [6]
