from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_rl.metrics import routing_pictures, svg
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.routing_pictures import (
    agreement_svg,
    deviation_svg,
    deviation_tails,
    heat_map,
    heat_maps,
    heatmap_svg,
    mean,
    over_steps,
    write_svg,
)
from tests.metrics.test_report import NASTY, Page


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


def write_run(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    return folder


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


def test_the_heat_map_has_a_row_a_layer_and_a_column_an_update():
    lines = eight_steps()
    assert heat_map(lines) == {1: [63 / 64 * 0.75, 62 / 64 * 0.75], 10: [54 / 64 * 0.75, 44 / 64 * 0.75]}
    assert heat_map(lines, "kl") == {1: [0.0, 1 / 64 * 0.75], 10: [0.0, 10 / 64 * 0.75]}
    assert heat_map([{"step": 1, "routing/layer_07/update_12/agreement": 0.5}]) == {7: [None] * 11 + [0.5]}
    assert heat_map([line(1, None)]) == heat_map([]) == {}


def test_heat_maps_of_groups_share_their_layers_and_average_their_runs():
    first, second, other = [line(1)], [line(1, 0.5)], [line(1, layers=(2, 10), updates=1)]
    layers, matrices = heat_maps({"two": [first, second], "one": [other], "none": [[{"step": 1}]]})
    assert layers == [1, 2, 10]
    assert matrices == {
        "two": [[63 / 64 * 0.75, 62 / 64 * 0.75], [], [54 / 64 * 0.75, 44 / 64 * 0.75]],
        "one": [[], [62 / 64], [54 / 64]],
    }
    assert mean([[1.0, None], [3.0, 5.0], None]) == [2.0, 5.0] and mean([]) is None


def test_values_over_steps():
    runs = [[line(1), line(2, None), line(3)], [line(1, 0.5), line(4)]]
    assert over_steps(runs[:1], "routing/agreement") == [[1, 0.75], [3, 0.75]]
    assert over_steps(runs, "routing/agreement") == [
        [1, 0.5625, 0.375, 0.75],
        [3, 0.75, 0.75, 0.75],
        [4, 0.75, 0.75, 0.75],
    ]


def test_the_page_of_one_run_has_the_numbers_under_one_heading(tmp_path):
    path = write_report(write_run(tmp_path / "run", eight_steps()))
    page = Page(path)
    assert path.read_text().count("<h2>Routing</h2>") == 1
    routing = [chart["title"] for chart in page.data["charts"] if chart["section"] == "routing"]
    assert routing == [
        "Routing agreement",
        "Route KL",
        "Predictor loss",
        "Routing staleness",
        "Engine agreement",
        "Tokens without a route",
        "Deviation tails",
        "Agreement by layer and update",
        "Route KL by layer and update",
    ]
    agreement = page.charts["Routing agreement"]["series"]
    assert [series["label"] for series in agreement] == ["all updates", "update 1", "update 2"]
    assert agreement[2]["points"][-2:] == [[8, 62 / 64], [10, 31 / 64]]
    assert len({series["color"] for series in agreement}) == 3
    kl = page.charts["Route KL"]
    assert kl["scale"] == "log"
    assert [series["label"] for series in kl["series"]] == [
        "all updates",
        "update 1 (zero, below a log scale)",
        "update 2",
    ]
    assert page.charts["Deviation tails"]["series"][0]["points"] == [[0, 0.65625], [1, 0.09375], [2, 0.0]]
    heat = page.charts["Agreement by layer and update"]
    assert heat["layers"] == [1, 10]
    assert heat["series"][0]["matrix"] == [[63 / 64 * 0.75, 62 / 64 * 0.75], [54 / 64 * 0.75, 44 / 64 * 0.75]]
    assert "no value" not in heat["svg"] and "layer 10, update 2: 0.5156" in heat["svg"]
    kl_map = page.charts["Route KL by layer and update"]
    assert kl_map["series"][0]["matrix"][0] == [0.0, 0.75 / 64] and "route KL" in kl_map["svg"]


def test_updates_are_in_their_order_and_a_single_one_is_not_drawn_twice(tmp_path):
    page = Page(write_report(write_run(tmp_path / "many", [line(1, updates=11), line(2, updates=11)])))
    labels = [series["label"] for series in page.charts["Routing agreement"]["series"]]
    assert labels == ["all updates", *(f"update {update}" for update in range(1, 12))]
    one = line(1, updates=1) | {"routing/update_1/agreement": 0.75}
    page = Page(write_report(write_run(tmp_path / "one", [one])))
    assert [series["label"] for series in page.charts["Routing agreement"]["series"]] == ["all updates"]


def test_several_runs_are_grouped(tmp_path):
    runs = [write_run(tmp_path / "a", [line(1)]), write_run(tmp_path / "b", [line(1, 0.5)])]
    runs.append(write_run(tmp_path / "dense", [{"step": 1, "reward/mean": 1.0}]))
    page = Page(write_report(runs))
    assert [(s["label"], s["points"]) for s in page.charts["Routing agreement"]["series"]] == [
        ("a", [[1, 0.75]]),
        ("b", [[1, 0.375]]),
    ]
    tails = page.charts["Deviation tails"]
    assert [(s["label"], s["points"][1]) for s in tails["series"]] == [("a", [1, 0.125]), ("b", [1, 0.0625])]
    bars = [title.text for title in ElementTree.fromstring(tails["svg"]).iter("title")]
    assert bars[:4] == [
        "a: 0.875 with 0 slots",
        "b: 0.438 with 0 slots",
        "a: 0.125 with 1 slots",
        "b: 0.0625 with 1 slots",
    ]
    assert bars[4:] == ["a: 0 with 2 slots", "b: 0 with 2 slots"]
    assert [s["label"] for s in page.charts["Route KL by layer and update"]["series"]] == ["a", "b"]


def test_runs_of_one_name_stay_apart(tmp_path):
    runs = [write_run(tmp_path / seed / "run", [line(1, scale)]) for seed, scale in (("0", 1.0), ("1", 0.5))]
    labels = [s["label"] for s in Page(write_report(runs)).charts["Deviation tails"]["series"]]
    assert labels == [str(run) for run in runs]


@pytest.mark.parametrize("null", [{}, {"routing/agreement": None, "routing/deviation_0": None}])
def test_no_routing_no_heading(tmp_path, null):
    lines = [{"step": step, "reward/mean": 0.5} | null for step in (1, 2)]
    path = write_report(write_run(tmp_path / "dense", lines))
    assert "Routing" not in path.read_text() and 'id="routing"' not in path.read_text()
    assert [chart["section"] for chart in Page(path).data["charts"]] == ["charts"]
    assert write_svg({"dense": [tmp_path / "dense"]}, tmp_path) == []


def test_pictures_as_files(tmp_path):
    groups = {"Pr2": [write_run(tmp_path / "p0", [line(1)]), write_run(tmp_path / "p1", [line(1, 0.5)])]}
    groups["free"] = [write_run(tmp_path / "f", [{"step": 1, "routing/agreement": 0.5}])]
    paths = write_svg(groups, tmp_path, "off-4")
    assert [path.name for path in paths] == [
        f"off-4-{n}.svg" for n in ("agreement", "deviation", "layers", "layers-kl")
    ]
    assert "Pr2: 0.656 with 0 slots" in paths[1].read_text()
    for path in paths:
        check_svg(path.read_text())


def check_svg(text: str) -> ElementTree.Element:
    """It is XML, self-contained, without NaN, and everything lies inside the viewBox."""
    root = ElementTree.fromstring(text)
    assert "nan" not in text.lower().replace("nano", "") and "var(" not in text and "<script" not in text
    width, height = map(float, root.get("viewBox").split()[2:])
    for node in root.iter():
        tag = node.tag.rpartition("}")[2]
        number = {
            key: float(node.get(key)) for key in ("x", "y", "width", "height", "x1", "x2", "y1", "y2") if node.get(key)
        }
        xs, ys = [], []
        if tag == "rect":
            assert number["width"] > 0 and number["height"] >= 0
            xs = [number.get("x", 0), number.get("x", 0) + number["width"]]
            ys = [number.get("y", 0), number.get("y", 0) + number["height"]]
        elif tag == "line":
            xs, ys = [number["x1"], number["x2"]], [number["y1"], number["y2"]]
        elif tag in ("polyline", "polygon"):
            points = [tuple(map(float, pair.split(","))) for pair in node.get("points").split()]
            xs, ys = [x for x, _ in points], [y for _, y in points]
        elif tag == "text":
            length = 5.5 * len(node.text)
            before = {"start": 0, "middle": 0.5, "end": 1}[node.get("text-anchor")] * length
            turned = node.get("transform")  # upwards from its start
            xs = [number["x"]] if turned else [number["x"] - before, number["x"] - before + length]
            ys = [number["y"], number["y"] - length] if turned else [number["y"] - 8, number["y"]]
        assert all(-0.1 <= x <= width + 0.1 for x in xs), (tag, node.attrib, node.text)
        assert all(-0.1 <= y <= height + 0.1 for y in ys), (tag, node.attrib, node.text)
    return root


@pytest.mark.parametrize(
    ("layers", "updates", "runs", "text"), [(4, 4, 6, ".990"), (48, 8, 2, ".99"), (94, 16, 1, None), (1, 2, 1, "1")]
)
def test_heat_maps_of_all_sizes(layers, updates, runs, text):
    matrix = [[1 - 0.04 * update * layer / layers for update in range(updates)] for layer in range(layers)]
    matrix[0][-1] = None
    root = check_svg(heatmap_svg({f"run {i}": matrix for i in range(runs)}, range(layers)))
    tips = [node.text for node in root.iter() if node.tag.endswith("title")][1:]
    assert len(tips) == layers * updates * runs
    assert sum("no value" in tip for tip in tips) == runs
    cells = [node.text for node in root.iter() if (node.get("class") or "").startswith("cell")]
    assert len(cells) == ((layers * updates - 1) * runs if text else 0)
    assert text is None or text in cells


def test_nothing_below_one_reads_as_one_and_all_cells_or_none_have_a_number():
    texts = routing_pictures._cell_texts
    assert texts([1.0, 0.9996, 0.25, 0.0], False, 30) == {1.0: "1", 0.9996: ".999", 0.25: ".250", 0.0: "0"}
    assert texts([1.0, 0.9996], False, 14) == {1.0: "1", 0.9996: ".99"}
    assert texts([0.0, 0.01234, 1.234e-5], True, 40) == {0.0: "0", 0.01234: "0.0123", 1.234e-5: "1.23e-5"}
    assert texts([0.0, 1.234e-5], True, 12) == {}


def test_colours_are_ordered_and_zero_kl_is_at_the_light_end():
    grey = [
        0.3 * red + 0.59 * green + 0.11 * blue
        for red, green, blue in map(routing_pictures._colour, (0, 0.2, 0.4, 0.6, 0.8, 1))
    ]
    assert grey == sorted(grey) and min(b - a for a, b in itertools.pairwise(grey)) > 20

    def fills(matrix, **kind):
        root = check_svg(heatmap_svg({"run": matrix}, range(len(matrix)), **kind))
        return {
            node[0].text.rpartition(" ")[2]: node.get("fill") for node in root.iter() if len(node) and node.get("fill")
        }

    dark, light = "#440154", "#fde725"
    kl = fills([[0.0], [1e-3], [1e-2], [0.1]], kl=True)
    assert kl["0"] == kl["0.001"] == light and kl["0.1"] == dark and kl["0.01"] not in (dark, light)
    assert fills([[0.0], [0.0]], kl=True) == {"0": light}
    agreement = fills([[0.9], [0.95], [1.0]])
    assert agreement["0.9"] == dark and agreement["1"] == light
    assert fills([[1.0]]) == {"1": light}


def test_bars_stand_for_powers_of_ten():
    root = check_svg(deviation_svg({"R2": [0.1, 0.01, 0.0], "none": [], "short": [0.001, None]}))
    bars = {node[0].text: float(node.get("height")) for node in root.iter() if node.tag.endswith("rect") and len(node)}
    heights = [bars[f"{name} slots"] for name in ("R2: 0.1 with 0", "R2: 0.01 with 1", "short: 0.001 with 0")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert heights[2] > 0 and bars["R2: 0 with 2 slots"] == 0 and len(bars) == 4
    colours = {
        node[0].text.split(":")[0]: node.get("class") for node in root.iter() if node.tag.endswith("rect") and len(node)
    }
    assert colours == {"R2": "s0", "short": "s2"}  # a run without data keeps its colour free
    check_svg(deviation_svg({f"run {i}": [1.0, *[10.0**-j for j in range(1, 9)]] for i in range(9)}))
    check_svg(deviation_svg({"zero": [0.0]}))


def test_lines_over_steps_with_zeros_and_bands():
    series = {"free": [[1, 0.9], [2, 0.8]], "Pr2": [[1, 0.99, 0.98, 1.0], [2, 0.97, 0.9, 0.99]], "none": []}
    kl = {
        "free": [[1, 0.0], [2, 1e-3], [3, 1e-1]],
        "Pr2": [[1, 0.01, 0.0, 0.02], [3, 0.02, 0.01, 0.03]],
        "none": [[1, 0.0]],
    }
    root = check_svg(agreement_svg(series, kl))
    lines = [node.get("points").split() for node in root.iter() if node.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [2, 2, 0, 2, 2, 0]  # zeros are not on the log axis
    assert sum(node.tag.endswith("polygon") for node in root.iter()) == 2
    free = [float(point.split(",")[1]) for point in lines[0]]
    assert free[1] > free[0]  # down is less agreement
    assert "nothing above zero" in agreement_svg({"a": [[1, 1.0]]}, {"a": [[1, 0.0]]})
    check_svg(agreement_svg({"one": [[7, 1.0]]}, {"one": [[7, 1e-9]]}))
    check_svg(agreement_svg({"flat": [[1, 1.0], [500, 1.0]]}))


def test_names_are_escaped():
    name = "<img src=x onerror=alert(1)> & co"
    for text in (
        agreement_svg({name: [[1, 1.0]]}),
        deviation_svg({name: [1.0]}, inline=True),
        heatmap_svg({name: [[1.0]]}, [0]),
    ):
        assert "<img" not in text
        assert any(node.text == name for node in ElementTree.fromstring(text).iter())


def test_the_light_colours_are_those_of_the_page():
    page = (Path(routing_pictures.__file__).parent / "report.html").read_text()
    light = dict(re.findall(r"--(\w+): (#\w+)", page[: page.index('[data-theme="dark"]')]))
    assert {name: light[name] for name in ("ink", "soft", *(f"s{i}" for i in range(8)))}.items() <= svg.LIGHT.items()


def test_a_browser_draws_the_routing_pictures(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    run = write_run(tmp_path / "run", eight_steps())
    (run / "config.yaml").write_text(f"name: {json.dumps(NASTY)}\n")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--virtual-time-budget=2000", "--dump-dom", write_report(run).as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    routing = dom[dom.index('id="routing"') : dom.index("<details>")]
    assert routing.count("<svg") == 9 and routing.count('class="picture"') == 3
    assert "NaN" not in routing and "<b>" not in routing
    assert routing.count("<title>") == 3 + 2 * 4  # bars and cells with their values
