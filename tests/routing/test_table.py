"""Tables of expert ids: what may be replayed, what is refused, and which tokens are kept for the predictors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.routing.metrics import route_metrics
from megatron_rl.routing.table import RouteShape, evenly_spaced, has_route, route_dtype

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
    "dtype": (lambda r: r.astype(np.int16), "int16, those of 8 experts are uint8"),
    "out of range": (set_at((0, 0, 1), 8), "expert 8, the model has 8"),
    "twice": (set_at((0, 0), 4), "twice"),
    "half a route": (set_at((0, 0, 0), 255), "a part of its experts"),
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


def test_figures_from_sums():
    first = {f"routing/{layer}/deviation/{slot}": 0.0 for layer in (1, 2) for slot in range(3)}
    first |= {
        "routing/1/deviation/0": 6,
        "routing/1/deviation/1": 2,
        "routing/2/deviation/0": 4,
        "routing/2/deviation/2": 4,
    }
    first |= {"routing/1/cached": 4, "routing/1/kl": 2.0, "routing/2/cached": 4, "routing/2/kl": 6.0}
    second = {"routing/1/deviation/0": 8, "routing/1/deviation/1": 0, "routing/1/deviation/2": 0}
    second |= {"routing/1/cached": 2, "routing/1/kl": 1.0, "routing/1/predictor_loss": 3.0, "loss/policy": 7.0}
    metrics = route_metrics([first, second])
    assert metrics["routing/agreement"] == pytest.approx(1 - (2 + 8) / (2 * 24))
    assert [metrics[f"routing/deviation_{j}"] for j in range(3)] == pytest.approx([18 / 24, 2 / 24, 4 / 24])
    assert metrics["routing/kl"] == pytest.approx(9 / 10) and metrics["routing/predictor_loss"] == pytest.approx(1.5)
    assert metrics["routing/update_1/agreement"] == pytest.approx(1 - 10 / 32)
    assert metrics["routing/layer_01/agreement"] == pytest.approx(1 - 2 / 32)
    assert metrics["routing/layer_02/update_1/agreement"] == pytest.approx(0.5)
    assert metrics["routing/layer_01/update_2/kl"] == pytest.approx(0.5)
    assert "routing/layer_02/update_2/kl" not in metrics and not any("loss/policy" in name for name in metrics)
    assert route_metrics([{"tokens": 3.0}]) == {}
