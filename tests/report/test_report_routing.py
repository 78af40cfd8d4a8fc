from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from examples.curves import Panel, write_curves, write_svg
from megatron_rl.report import charts
from megatron_rl.report.page import write_report
from megatron_rl.report.run_folder import deviation_tails, heat_map, mean
from tests.report.page import Page
from tests.report.test_report import NASTY
from tests.report.test_report import write_lines as write_run


def line(step: int, scale: float = 1.0, updates: int = 2, layers: tuple[int, ...] = (1, 10)) -> dict:
    """A step's routing metrics, all of them multiples of 1/64 times `scale`, or None where `scale` is."""

    def value(parts: int):
        return None if scale is None else parts / 64 * scale

    record = {"step": step, "routing/agreement": value(48), "routing/kl": value(2), "routing/staleness": value(4)}
    record |= {"routing/deviation_0": value(56), "routing/deviation_1": value(8), "routing/deviation_2": value(0)}
    record |= {"routing/predictor_loss": value(1), "routing/fallback_tokens": 3, "routing/engine_agreement": value(60)}
    for update in range(1, updates + 1):
        record |= {
            f"routing/update_{update}/agreement": value(64 - update),
            f"routing/update_{update}/kl": value(update - 1),
        }
        for layer in layers:
            record[f"routing/layer_{layer:02}/update_{update}/agreement"] = value(64 - layer * update)
            record[f"routing/layer_{layer:02}/update_{update}/kl"] = value(layer * (update - 1))
    return record


def eight_steps() -> list[dict]:
    """Eight steps with routing values, the last quarter of which are steps 8 (as they are) and 10 (halved)."""
    quarters = {1: 1, 2: 1, 3: None, 4: 1, 5: 1, 6: 1, 7: 1, 8: 4, 9: None, 10: 2, 11: None}
    return [{"step": 0, "eval/score": 0.5}, *(line(step, q and q / 4) for step, q in quarters.items())]


def test_deviation_tails_are_the_mean_of_the_last_quarter_of_the_steps():
    lines = eight_steps()
    assert deviation_tails(lines) == [56 / 64 * 0.75, 8 / 64 * 0.75, 0.0]  # (1 + 0.5) / 2
    assert deviation_tails(lines[:4]) == [14 / 64, 2 / 64, 0.0]  # two with values: the last one's
    assert deviation_tails([]) == deviation_tails([{"step": 1, "reward/mean": 1.0}]) == []
    assert deviation_tails([line(1, None)]) == []


def test_a_null_in_the_last_quarter_is_left_out_of_that_mean_alone():
    lines = [line(step) for step in range(1, 9)]
    lines[7]["routing/deviation_0"] = None
    lines[6]["routing/deviation_1"] = 0.5
    assert deviation_tails(lines) == [56 / 64, (0.5 + 8 / 64) / 2, 0.0]
    lines[7]["routing/deviation_1"] = float("nan")
    assert deviation_tails(lines)[1] == 0.5


def test_the_heat_map_has_a_value_for_each_layer_and_update():
    lines = eight_steps()
    shares = {(1, 1): 63, (1, 2): 62, (10, 1): 54, (10, 2): 44}
    assert heat_map(lines) == {place: share / 64 * 0.75 for place, share in shares.items()}
    kl = {(1, 1): 0, (1, 2): 1, (10, 1): 0, (10, 2): 10}
    assert heat_map(lines, "kl") == {place: value / 64 * 0.75 for place, value in kl.items()}
    assert heat_map([{"step": 1, "routing/layer_07/update_12/agreement": 0.5}]) == {(7, 12): 0.5}
    assert heat_map([line(1, None)]) == heat_map([]) == {}
    assert mean([1.0, None, 3.0]) == 2.0 and mean([]) is None


def test_the_page_of_one_run_has_the_numbers_under_one_heading(tmp_path):
    page = Page(write_report(write_run(tmp_path / "run", eight_steps())))
    assert list(page.charts) == [
        "Routing agreement",
        "Route KL",
        "Predictor loss",
        "Routing staleness",
        "Engine agreement",
        "Deviation tails",
        "Agreement by layer and update",
        "Route KL by layer and update",
    ]
    assert page.row("Tokens without a route", 2) == ["Tokens without a route", "3"]
    agreement = page.series("Routing agreement")
    assert list(agreement) == ["all updates", "update 1", "update 2"]
    assert agreement["update 2"][-2:] == [[8, 62 / 64], [10, 31 / 64]]
    assert len({color for _, color in page.charts["Routing agreement"]["legend"]}) == 3
    assert list(page.series("Route KL")) == ["all updates", "update 1 (zero, not on a log scale)", "update 2"]
    texts = [mark["text"] for mark in page.drawn("Deviation tails") if mark["role"] == "mark" and "text" in mark]
    assert texts == ["0.66", "0.094", "0"]
    heat = page.charts["Agreement by layer and update"]["spec"]["data"]["values"]
    found = {(cell["layer"], cell["update"]): cell["value"] for cell in heat}
    assert found == heat_map(eight_steps())
    cells = [mark["text"] for mark in page.drawn("Agreement by layer and update") if mark.get("fontSize") == 9]
    assert cells == [".738", ".727", ".633", ".516"]


def test_updates_are_in_their_order_and_a_single_one_is_not_drawn_twice(tmp_path):
    page = Page(write_report(write_run(tmp_path / "many", [line(1, updates=11), line(2, 0.5, updates=11)])))
    assert list(page.series("Routing agreement")) == ["all updates", *(f"update {update}" for update in range(1, 12))]
    one = [line(step, step, updates=1) | {"routing/update_1/agreement": 0.75 * step} for step in (1, 2)]
    page = Page(write_report(write_run(tmp_path / "one", one)))
    assert list(page.series("Routing agreement")) == ["all updates"]


def test_several_runs_are_grouped(tmp_path):
    runs = [
        write_run(tmp_path / name, [line(1, scale), line(2, scale / 2)]) for name, scale in (("a", 1.0), ("b", 0.5))
    ]
    runs.append(write_run(tmp_path / "dense", [{"step": 1, "reward/mean": 1.0}]))
    page = Page(write_report(runs))
    assert page.series("Routing agreement") == {"a": [[1, 0.75], [2, 0.375]], "b": [[1, 0.375], [2, 0.1875]]}
    rows = page.charts["Deviation tails"]["spec"]["data"]["values"]
    assert {(row["run"], row["slots"]): row["share"] for row in rows} == {
        ("a", 0): 0.4375, ("a", 1): 0.0625, ("a", 2): 0.0, ("b", 0): 0.21875, ("b", 1): 0.03125, ("b", 2): 0.0,
    }  # fmt: skip
    maps = [title for title in page.charts if title.startswith("Route KL by")]
    assert maps == ["Route KL by layer and update: a", "Route KL by layer and update: b"]
    ends = [page.charts[title]["spec"]["layer"][0]["encoding"]["color"]["scale"]["domain"] for title in maps]
    assert ends[0] == ends[1]  # one scale of colors


def test_any_name_of_a_run_can_be_drawn(tmp_path):
    run = write_run(tmp_path / "run", eight_steps())
    (run / "config.yaml").write_text(f"name: {json.dumps(NASTY)}\n")
    other = write_run(tmp_path / "other", eight_steps())
    for runs in ([run], [run, other]):
        page = Page(write_report(runs))
        assert all(any(mark["role"] == "mark" for mark in page.drawn(title)) for title in page.charts)


def test_runs_of_one_name_stay_apart(tmp_path):
    runs = [write_run(tmp_path / seed / "run", [line(1, scale)]) for seed, scale in (("0", 1.0), ("1", 0.5))]
    legend = Page(write_report(runs)).charts["Deviation tails"]["legend"]
    assert [label for label, _ in legend] == [str(run) for run in runs]


@pytest.mark.parametrize("null", [{}, {"routing/agreement": None, "routing/deviation_0": None}])
def test_no_routing_no_heading(tmp_path, null):
    lines = [{"step": step, "reward/mean": 0.5 * step} | null for step in (1, 2)]
    page = Page(write_report(write_run(tmp_path / "dense", lines)))
    assert "Routing" not in page.text and list(page.charts) == ["Reward"]
    assert write_svg({"dense": [tmp_path / "dense"]}, tmp_path) == []


def texts_of(path: Path) -> list[str]:
    """The texts of an SVG file: it is XML and needs neither a script nor the page's colors."""
    text = path.read_text()
    assert "NaN" not in text and "var(" not in text and "<script" not in text and "url(http" not in text
    return [node.text for node in ElementTree.fromstring(text).iter() if node.tag.endswith("text")]


def test_pictures_as_files(tmp_path):
    name = "<img src=x onerror=alert(1)> & co"
    groups = {name: [write_run(tmp_path / "p0", [line(1)]), write_run(tmp_path / "p1", [line(1, 0.5)])]}
    groups["free"] = [write_run(tmp_path / "f", [{"step": 1, "routing/agreement": 0.5}])]
    paths = write_svg(groups, tmp_path, "off-4")
    assert [path.name for path in paths] == [
        f"off-4-{n}.svg" for n in ("agreement", "deviation", "layers", "layers-kl")
    ]
    agreement, deviation, layers, _ = map(texts_of, paths)
    assert {"Top-k agreement", "Route KL, nats per token", name, "free"} <= set(agreement)
    assert {"0.66", "0.094"} <= set(deviation) and {name, ".738", ".516"} <= set(layers)


def test_curves_are_the_mean_of_a_groups_runs_in_a_band(tmp_path):
    runs = {"a": [write_run(tmp_path / str(i), [{"step": s, "x": i + s} for s in range(1, 5)]) for i in (0, 2)]}
    runs["b"] = [write_run(tmp_path / "b", [{"step": 1, "x": 0.0}, {"step": 2, "x": 7.0}])]
    write_curves(runs, [Panel("X", "x", smooth=2), Panel("none", "y")], tmp_path / "c.svg", title="Both")
    assert {"X", "a", "b", "none"} <= set(texts_of(tmp_path / "c.svg"))
    paths = [n for n in ElementTree.parse(tmp_path / "c.svg").getroot().iter() if n.tag.endswith("path")]
    lines = [n.get("d") for n in paths if n.get("stroke-width") == "2"]
    assert len(lines) == 2 and len({n.get("fill") for n in paths if n.get("opacity") == "0.15"}) == 2


def test_curves_are_smoothed_by_a_running_mean(tmp_path):
    """In each panel as its own numbers without smoothing: the picture is the same."""
    values = np.random.default_rng(np.random.SeedSequence().entropy).random(20).tolist()
    means = [sum(values[max(0, i - 3) : i + 1]) / len(values[max(0, i - 3) : i + 1]) for i in range(20)]
    lines = [{"step": i, "raw": v, "mean": m} for i, (v, m) in enumerate(zip(values, means, strict=True), 1)]
    runs = {"a": [write_run(tmp_path / "run", lines)]}
    drawn = []
    for name, panel in (("smoothed", Panel("X", "raw", smooth=4)), ("given", Panel("X", "mean"))):
        write_curves(runs, [panel], tmp_path / f"{name}.svg", title="X")
        paths = [n for n in ElementTree.parse(tmp_path / f"{name}.svg").getroot().iter() if n.tag.endswith("path")]
        [line] = [n.get("d") for n in paths if n.get("stroke-width") == "2"]
        drawn.append([float(number) for number in re.findall(r"[\d.]+", line)])
    assert np.abs(np.subtract(*drawn)).max() < 0.01


def test_nothing_below_one_reads_as_one():
    texts = [charts.cell_text(value, kl=False) for value in (1.0, 0.9996, 0.25, 0.0)]
    assert texts == ["1", ".999", ".250", "0"]
    assert [charts.cell_text(value, kl=True) for value in (0.0, 0.01234, 1.234e-5)] == ["0", "0.012", "1.2e-5"]


def fills(tmp_path: Path, metric: str, values: dict[int, float]) -> dict[int, str]:
    """The color of each layer's cell."""
    run = write_run(tmp_path, [{"step": 1} | {f"routing/layer_{k:02}/update_1/{metric}": v for k, v in values.items()}])
    title = ("Route KL" if metric == "kl" else "Agreement") + " by layer and update"
    cells = [m for m in Page(write_report(run)).drawn(title) if m["role"] == "mark" and m["marktype"] == "rect"]
    return dict(zip(sorted(values), (m["fill"] for m in sorted(cells, key=lambda m: m["x"])), strict=True))


def test_light_is_near_to_the_current_router(tmp_path):
    def gray(color: str) -> float:
        red, green, blue = map(int, re.findall(r"\d+", color))
        return 0.3 * red + 0.59 * green + 0.11 * blue

    agreement = fills(tmp_path / "a", "agreement", {0: 0.9, 1: 0.925, 2: 0.95, 3: 0.975, 4: 1.0})
    kl = fills(tmp_path / "b", "kl", {0: 0.1, 1: 1e-2, 2: 1e-3, 3: 0.0})
    for found in (agreement, kl):
        grays = [gray(color) for color in found.values()]
        assert grays == sorted(grays) and grays[-1] - grays[0] > 150
    assert kl[2] == kl[3] == agreement[4]  # a KL of zero is at the light end
    assert len(set(fills(tmp_path / "c", "kl", {0: 0.0, 1: 0.0}).values())) == 1


def test_bars_stand_for_powers_of_ten(tmp_path):
    shares = {"a": [0.1, 0.01, 0.0], "b": [], "c": [0.001]}
    runs = [
        write_run(
            tmp_path / name, [{"step": 1, "reward/mean": 0.5} | {f"routing/deviation_{j}": x for j, x in enumerate(s)}]
        )
        for name, s in shares.items()
    ]
    page = Page(write_report(runs))
    bars = [m for m in page.drawn("Deviation tails") if m["role"] == "mark" and m["marktype"] == "rect"]
    first, second, other = sorted(bars, key=lambda m: -m["height"])
    assert first["height"] - second["height"] == pytest.approx(second["height"] - other["height"], abs=0.2)
    assert other["height"] > 0 and first["fill"] == second["fill"] != other["fill"]
    assert page.charts["Deviation tails"]["legend"] == [["a", charts.color(0)], ["c", charts.color(2)]]


def test_a_browser_draws_the_routing_pictures(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    run = write_run(tmp_path / "run", eight_steps())
    (run / "config.yaml").write_text(f"name: {json.dumps(NASTY)}\n")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--virtual-time-budget=5000", "--dump-dom", write_report(run).as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    routing = dom[dom.index("<h2>Routing</h2>") : dom.index("<details>")]
    assert routing.count("<svg") == 8 and "NaN" not in routing and "<b>" not in routing
