"""The covering array of layouts, algorithms and models."""

from __future__ import annotations

from itertools import combinations, product

from covering import FOUR_RANKS, SPLITS, TWO_RANKS, Case, on_four_ranks, on_two_ranks, others, pairwise
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@given(SIZES, st.sets(st.integers(0, 10**6)))
def test_each_pair_that_is_allowed_stands_together(sizes, refused):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = [row for number, row in enumerate(product(*axes)) if number not in {n % 97 for n in refused}]
    found = pairwise(*axes, allowed=lambda *row: row in rows)
    assert found == pairwise(*axes, allowed=lambda *row: row in rows) and len({*found}) == len(found)
    assert {*found} <= {*rows}
    expected, covered = ({pair for row in some for pair in combinations(row, 2)} for some in (rows, found))
    assert covered == expected
    if not refused and len(sizes) == 2:
        assert len(found) == sizes[0] * sizes[1]


def test_algorithms_meet_splits_and_models():
    def allowed(algorithm: str, layout: str, model: str) -> bool:
        return (algorithm, model) != ("b", "y") and (layout, model) != ("etp2_ep2", "y")

    split_of = {layout: split for split, layouts in SPLITS.items() for layout in layouts}
    assert {*split_of} == {*TWO_RANKS}
    two = on_two_ranks("abc", "xy", allowed)
    assert {(c.algorithm, split_of[c.layout]) for c in two} == {*product("abc", SPLITS)}
    assert {(c.algorithm, c.model) for c in two} == {*product("abc", "xy")} - {("b", "y")}
    assert {(split_of[c.layout], c.model) for c in two} == {*product(SPLITS, "xy")}
    four = on_four_ranks("abc", "xy", allowed)
    assert [c.layout for c in four] == [*FOUR_RANKS] and {c.algorithm for c in four} == {*"abc"}
    rest = others(two, "abc", TWO_RANKS, "xy", allowed)
    assert {*two, *rest} >= {Case(*row) for row in product("abc", TWO_RANKS, "xy") if allowed(*row)}
    assert not {*two} & {*rest}
    assert all(allowed(*case) for case in [*two, *four, *rest])
