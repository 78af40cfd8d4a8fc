from __future__ import annotations

import json
import math

import pytest

from megatron_rl.algorithms.kl import AdaptiveController, FixedController

TRACE = [
    # kl, samples, and by hand: kl / 4 - 1, cut to +-0.2, times samples / 1000; the value is the last one times 1 + that
    (8.0, 500, 0.22),  # +1, cut to +0.2; x 1/2: 0.2 x 1.1
    (4.4, 1000, 0.242),  # +0.1; x 1: 0.22 x 1.1
    (4.0, 250, 0.242),  # on target
    (3.6, 250, 0.23595),  # -0.1; x 1/4: 0.242 x 0.975
    (0.0, 1000, 0.18876),  # -1, cut to -0.2; x 1: 0.23595 x 0.8
    (4.8, 2000, 0.264264),  # +0.2, the bound itself; x 2: 0.18876 x 1.4
    (-1.0, 500, 0.2378376),  # k1 may be negative: -1.25, cut to -0.2; x 1/2: 0.264264 x 0.9
    (5.0, 0, 0.2378376),  # nothing was measured
]


def test_adaptive_controller_by_hand():
    controller = AdaptiveController(0.2, 4.0, 1000)
    for kl, samples, expected in TRACE:
        assert controller.update(kl, samples) == pytest.approx(expected, rel=1e-14)
        assert controller.value == pytest.approx(expected, rel=1e-14)


def test_adaptive_controller_goes_on_from_its_state():
    whole, first = AdaptiveController(0.2, 4.0, 1000), AdaptiveController(0.2, 4.0, 1000)
    for kl, samples, _ in TRACE[:3]:
        whole.update(kl, samples)
        first.update(kl, samples)
    second = AdaptiveController(9.0, 4.0, 1000)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for kl, samples, _ in TRACE[3:]:
        assert second.update(kl, samples) == whole.update(kl, samples)


def test_adaptive_controller_finds_the_coefficient_that_holds_the_target(rng):
    """In a world where the KL is c / value, from far above and far below: the value tends to c / target."""
    c, target = rng.uniform(0.5, 5.0, 2)
    for start in (0.01, 100.0):
        controller = AdaptiveController(start, target, 1000)
        for _ in range(400):  # 20 % each: 1.2^400 and 0.8^400 go anywhere
            controller.update(c / controller.value, 1000)
        assert controller.value == pytest.approx(c / target, rel=1e-6)


def test_fixed_controller_has_the_same_face():
    controller = FixedController(0.05)
    assert [controller.update(kl, samples) for kl, samples, _ in TRACE] == [0.05] * len(TRACE)
    controller.load_state_dict(AdaptiveController(0.2, 4.0, 1000).state_dict())
    assert controller.value == 0.05
    adaptive = AdaptiveController(0.2, 4.0, 1000)
    adaptive.load_state_dict(controller.state_dict())
    assert adaptive.value == 0.05
    assert FixedController(0.0).update(1.0, 1) == 0.0
    public = {name for name in dir(AdaptiveController) if not name.startswith("_")}
    assert public == {name for name in dir(FixedController) if not name.startswith("_")}


def test_controllers_refuse_what_is_not_positive():
    for bad in (0.0, -1.0, math.nan, math.inf):
        for name in ("value", "target", "horizon"):
            with pytest.raises(ValueError, match=f"{name} = "):
                AdaptiveController(**{"value": 0.2, "target": 4.0, "horizon": 1000, name: bad})
        with pytest.raises(ValueError, match="value = "):
            AdaptiveController(0.2, 4.0, 1000).load_state_dict({"value": bad})
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="value = "):
            FixedController(bad)
    controller = AdaptiveController(0.2, 4.0, 1000)
    for samples in (-1, 5000):
        with pytest.raises(ValueError, match=f"samples = {samples}"):
            controller.update(4.0, samples)
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match="kl = "):
            controller.update(kl, 10)
    assert controller.value == 0.2
    assert controller.update(0.0, 4999) > 0
