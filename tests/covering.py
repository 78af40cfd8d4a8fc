"""Which parallel layouts, algorithms and models meet in tests of the trainer: each pair of two of them in every run of the
suite, all three in `tests/run.sh --all`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp2_sp": {"tensor": 2},
    "ep2": {"expert": 2},
    "pp2": {"pipeline": 2},
    "pp2_interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
    "cp2_all_gather": {"context": 2, "cp_comm_type": "all_gather"},
    "dp2_distributed_optimizer": {"distributed_optimizer": True},
    "dp2_replicated_optimizer": {"distributed_optimizer": False},
    "dp2_sharded": {"distributed_optimizer": True},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "etp2_ep2": {"tensor": 2, "expert": 2, "expert_tensor": 2},
    "tp2_ep2": {"tensor": 2, "expert": 2, "expert_tensor": 1},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_cp2": {"tensor": 2, "context": 2},
    "tp2_cp2_all_gather": {"tensor": 2, "context": 2, "cp_comm_type": "all_gather"},
    "pp2_ep2": {"pipeline": 2, "expert": 2},
    "ep4": {"expert": 4},
    "ep2_sharded": {"expert": 2, "distributed_optimizer": True},
}
"""Keys of `parallel`. In a sharded one each rank has the reduced gradients of its shard alone, as they train; in the others
all of them, to compare."""
SPLITS = {
    "TP": ("tp2_sp",),
    "PP": ("pp2",),
    "VPP": ("pp2_interleaved",),
    "EP": ("ep2",),
    "CP": ("cp2", "cp2_all_gather"),
    "DP": ("dp2_distributed_optimizer", "dp2_replicated_optimizer", "dp2_sharded"),
}
"""Ways to share the work among two ranks, and their layouts, which stand for them by turns."""
ALL = {**TWO_RANKS, **FOUR_RANKS}


class Case(NamedTuple):
    """What meets in one run."""

    algorithm: str
    layout: str
    model: str

    def __str__(self) -> str:
        return " ".join(self)


def pairwise(*axes: Iterable[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[tuple]:
    """Rows of one value of each axis, in which any two values that an allowed row has together stand together at least once.

    Greedy, and the same in every run: the next row has most of the pairs that still lack, and of such rows the values that
    have been least often.
    """
    rows = [row for row in product(*axes) if allowed(*row)]
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    lacking, uses, found = set().union(*pairs.values()), Counter(), []
    while lacking:
        found.append(max(rows, key=lambda row: (len(pairs[row] & lacking), -sum(uses[v] for v in enumerate(row)))))
        lacking -= pairs[found[-1]]
        uses.update(enumerate(found[-1]))
    return found


def on_two_ranks(
    algorithms: Sequence[str], models: Sequence[str], allowed: Callable[..., bool] = lambda *_: True
) -> list[Case]:
    """Each pair of an algorithm, a way to share the work, and a model. allowed: whether a model has an algorithm and layout."""
    turns: Counter[str] = Counter()
    cases = []
    for algorithm, split, model in pairwise(
        algorithms, SPLITS, models, allowed=lambda a, s, m: allowed(a, SPLITS[s][0], m)
    ):
        layouts = SPLITS[split]
        cases.append(Case(algorithm, layouts[turns[split] % len(layouts)], model))
        turns[split] += 1
    return cases


def on_four_ranks(
    algorithms: Sequence[str], models: Sequence[str], allowed: Callable[..., bool] = lambda *_: True
) -> list[Case]:
    """Each layout once, with the algorithms and models by turns."""
    turns: Counter[str] = Counter()
    cases = []
    for layout in FOUR_RANKS:
        able = [Case(a, layout, m) for a, m in product(algorithms, models) if allowed(a, layout, m)]
        cases.append(min(able, key=lambda case: (turns[case.algorithm], turns[case.model])))
        turns.update((cases[-1].algorithm, cases[-1].model))
    return cases


def others(
    cases: Sequence[Case],
    algorithms: Sequence[str],
    layouts: Iterable[str],
    models: Sequence[str],
    allowed: Callable[..., bool] = lambda *_: True,
) -> list[Case]:
    """The rest of the product."""
    rows = [Case(*row) for row in product(algorithms, layouts, models)]
    return [case for case in rows if case not in cases and allowed(*case)]


def world_of(layout: str) -> int:
    """Its processes: one where it is none of those above."""
    return 4 if layout in FOUR_RANKS else 2 if layout in TWO_RANKS else 1


def layers_of(layout: str) -> int:
    """Layers that a model needs under it: one for each part of a pipeline."""
    return 4 if "virtual_pipeline" in ALL.get(layout, {}) else 2


def parallel_of(layout: str, *, whole_experts: bool = False) -> dict[str, Any]:
    """Keys of `parallel`. whole_experts: the model's experts have biases, which expert-tensor parallelism does not cut."""
    keys: Mapping[str, Any] = ALL[layout]
    return {"expert_tensor": 1, **keys} if whole_experts and "tensor" in keys else {**keys}
