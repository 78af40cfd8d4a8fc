"""Tables of expert ids: what may be replayed, what is refused, and which tokens are kept for the predictors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.metrics.reduce import derived, figures, merge, of_update, on_host, total
from megatron_rl.routing.measure import ExpertLoad, Load, share_of_experts, shares
from megatron_rl.routing.passes import of_layers, per_token
from megatron_rl.routing.table import RouteShape, RouteTable, evenly_spaced, has_route, route_dtype

SHAPE = RouteShape(moe_layers=(1, 2, 3), experts=8, topk=2)


def table(tokens: int = 5) -> np.ndarray:
    routes = SHAPE.empty(tokens)
    routes[:] = [3, 6]
    routes[1] = 255
    return routes


def test_one_byte_an_expert_and_two_from_256_on():
    assert route_dtype(255) == torch.uint8 and route_dtype(256) == torch.int16
    assert RouteShape((0,), 255, 2).empty(3).dtype == np.uint8
    wide = RouteShape((0,), 300, 2).empty(3)
    assert wide.dtype == np.int16 and (wide == -1).all() and not has_route(torch.from_numpy(wide)).any()
    assert has_route(torch.from_numpy(table())).tolist() == [[True] * 3, [False] * 3, *[[True] * 3] * 3]


def set_at(index, value):
    def change(routes: np.ndarray) -> np.ndarray:
        routes[index] = value
        return routes

    return change


BAD = {
    "layers": (lambda r: r[:, :2], "2 MoE layers, the model wants 3"),
    "k": (lambda r: np.concatenate([r, r[:, :, :1]], -1), "3 experts a token, the model wants 2"),
    "tokens": (lambda r: r[:-1], "4 input tokens, the model wants 5"),
    "dimensions": (lambda r: r[0], "2 dimensions|3 input tokens"),
    "dtype": (lambda r: r.astype(np.int16), "int16, but 8 experts need uint8"),
    "out of range": (set_at((0, 0, 1), 8), "expert 8, the model has 8"),
    "twice": (set_at((0, 0), 4), "twice"),
    "half a route": (set_at((0, 0, 0), 255), "only a part of its experts"),
}


def test_a_table_with_and_without_routes_passes():
    SHAPE.check(table(), 5)


@pytest.mark.parametrize("case", BAD)
def test_a_table_that_cannot_be_replayed_is_refused(case):
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        SHAPE.check(change(table()), 5)


def test_cached_tokens_are_spread_from_the_first_to_the_last():
    assert evenly_spaced(5, 9).tolist() == [0, 1, 2, 3, 4]
    kept = evenly_spaced(1000, 9)
    assert len(kept) == 9 and kept[0] == 0 and kept[-1] == 999
    assert np.ptp(np.diff(kept)) <= 1
    for count in range(1, 60):
        for budget in (1, 2, 7, 58):
            kept = evenly_spaced(count, budget)
            assert len(set(kept.tolist())) == len(kept) == min(count, budget)


def declared(update: int, counts: dict[int, list[int]], kl: dict[int, tuple[float, int]], **others) -> dict:
    """An update's metrics, from counts of tokens by how many experts differ, and sums of KL with their tokens, by layer."""
    found = of_layers("kl", {n: per_token(*of) for n, of in kl.items()}, update, each=True)
    for name, figure, each in (("agreement", share_of_experts, True), ("deviation", shares, False)):
        layers = {n: derived(figure, np.array(of, float)) for n, of in counts.items()}
        found |= of_layers(name, layers, update, each=each)
    return of_update(found | others)


def test_layers_and_updates_count_towards_the_figures_of_all():
    first = declared(1, {1: [6, 2, 0], 2: [4, 0, 4]}, {1: (2.0, 4), 2: (6.0, 4)})
    learned = of_layers("predictor_loss", {1: per_token(3.0, 2)}, 2)
    second = declared(2, {1: [8, 0, 0], 2: [0, 0, 0]}, {1: (1.0, 2), 2: (0.0, 0)}, **learned, other=total(7.0))
    metrics = figures(merge([first, second]))
    assert metrics["routing/agreement"] == pytest.approx(1 - (2 + 8) / (2 * 24))
    assert [metrics[f"routing/deviation_{j}"] for j in range(3)] == pytest.approx([18 / 24, 2 / 24, 4 / 24])
    assert metrics["routing/kl"] == pytest.approx(9 / 10) and metrics["routing/predictor_loss"] == pytest.approx(1.5)
    assert metrics["routing/update_1/agreement"] == pytest.approx(1 - 10 / 32)
    assert metrics["routing/layer_01/agreement"] == pytest.approx(1 - 2 / 32)
    assert metrics["routing/layer_02/update_1/agreement"] == pytest.approx(0.5)
    assert metrics["routing/layer_01/update_2/kl"] == pytest.approx(0.5)
    # Of no token there is no figure.
    assert "routing/layer_02/update_2/kl" not in metrics and "routing/layer_02/update_2/agreement" not in metrics
    assert metrics["other"] == 7.0


def test_the_load_of_a_step_is_the_mean_over_its_layers_and_updates():
    """And not that of loads added up, which are of other experts."""
    found = []
    for update, loads in enumerate([{0: [4, 0, 0, 0], 1: [1, 1, 1, 1]}, {0: [0, 0, 0, 4], 1: [0, 0, 0, 0]}], 1):
        per_batch = []
        for part in (0, 1):  # of two micro-batches
            table = RouteTable(RouteShape((0, 1), 4, 1), torch.ones(2, dtype=torch.bool), torch.arange(0))
            table.left(Load).update({n: torch.tensor(load) * (0.25 + 0.5 * part) for n, load in loads.items()})
            per_batch.append(ExpertLoad(table, update).metrics())
        found.append(of_update(merge(on_host(per_batch))))
    metrics = figures(merge(found))
    assert metrics["routing/load_max"] == pytest.approx((4 + 1 + 4) / 3)
    assert metrics["routing/active_experts"] == pytest.approx((0.25 + 1 + 0.25) / 3)
    assert metrics["routing/layer_00/load_max"] == 4 and metrics["routing/layer_01/load_max"] == 1
    assert metrics["routing/update_2/load_max"] == 4
