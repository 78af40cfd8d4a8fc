from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatron_rl.cli import main
from megatron_rl.config import Config
from megatron_rl.config.load import to_yaml
from megatron_rl.errors import UserError
from megatron_rl.metrics.classes import BELOW
from megatron_rl.metrics.logger import STANDARD, RunLogger
from megatron_rl.report import charts as vega
from megatron_rl.report.charts import MOST_ROWS, SECTIONS, charts_of
from megatron_rl.report.page import write_report
from megatron_rl.report.run_folder import before_after, compared
from tests.report.page import Page

NASTY = '</script><script>document.title="owned"</script><!-- <b>\u2028"quoted" & \\'

PARTS = {"reward/exact": 1.0, "reward/format": 0.5, "finish": "stop"}


def make_run(folder: Path, steps: int, total: int = 20, **changes) -> Path:
    config = Config(name=folder.name, steps=total, **changes)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    with RunLogger(folder, config) as logger:
        logger.log_eval(0, {"eval/score": 0.25, "eval/pass@4": 0.5})
        for step in range(1, steps + 1):
            if step % 10 == 0:
                logger.log_eval(step, {"eval/score": 0.25 + step / 40, "eval/pass@4": 0.5})
            logger.log_step(
                step,
                {
                    "reward/mean": step / total,
                    "mismatch/kl": float("nan") if step == 2 else 1e-4 * step,
                    "time/rollout_s": 2.0 + step / 100,
                    "time/train_s": 1.0,
                    "time/step_s": 3.0 + step / 100,
                },
            )
            logger.log_samples(step, [{"prompt": NASTY, "response": f"answer {step} {NASTY}", "reward": 1.0} | PARTS])
    return folder


DOCS = Path(__file__).resolve().parents[2] / "docs"
CHARTED = {metric: chart for section in SECTIONS.values() for chart in section for metric in chart.series}
CARDS = ["mismatch/p<*/tokens", "mismatch/p<*/abs", "mismatch/p<*/abs_max", "mismatch/p<*/bias", "routing/deviation_*"]
"""Metrics that cards of another form than lines draw."""


def names_in(text: str) -> list[str]:
    """Metrics in backquotes, * for what is filled in; one without a room has that of the one before it in row or text."""
    found = []
    for line in re.split(r"\n(?=\||\s*\n)", text):
        room = ""
        for name in re.findall(r"`([a-z]\w*(?:/[\w<>@*.]+)*)`", line):
            room = f"{name.rpartition('/')[0]}/" if "/" in name else room
            found.append(re.sub(r"[A-Z]+", "*", name if "/" in name else room + name))
    return found


def is_named(metric: str, pattern: str) -> bool:
    """True where a pattern of the documents, or of a chart, stands for a metric or for another pattern."""
    expression = re.escape(pattern).replace(r"\*", "[^/]+")
    return re.fullmatch(expression, metric) is not None


def write_lines(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    return folder


def test_a_run_as_one_page(tmp_path):
    run = make_run(tmp_path / "sorting", 20)
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path)
    assert "20 steps" in page.text
    assert page.series("Evaluation") == {
        "score": [[0, 0.25], [10, 0.5], [20, 0.75]],
        "pass@4": [[0, 0.5], [10, 0.5], [20, 0.5]],
    }
    assert [step for step, _ in page.series("Mismatch")["KL (k3)"]] == [1, *range(3, 21)]  # the null is left out
    assert list(page.series("Step time by phase")) == ["rollout", "train"]
    assert "Routing agreement" not in page.charts
    assert page.row("score", 5) == ["score", "0.250", "0.750", "+0.500", "0 → 20"]
    order = [
        page.text.index(title)
        for title in (
            "First and last evaluation",
            "Curves",
            "Responses with the highest reward",
            "Sample rollouts",
            "Config of",
        )
    ]
    assert order == sorted(order)


def test_every_chart_is_drawn_without_a_gap_in_its_numbers(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run", 30, total=30)))
    assert len(page.charts) >= 4
    for title in page.charts:
        marks = page.drawn(title)
        assert {"line", "area"} & {mark["marktype"] for mark in marks} and "NaN" not in str(marks)


@pytest.mark.parametrize("top", [3.0, 7.5, 9.0, 24.0, 0.09, 1250.0])
def test_tick_labels_say_where_they_stand(tmp_path, top):
    """Equal distances between labels are equal differences: never 0, 3, 5, 8 for 0, 2.5, 5, 7.5."""
    lines = [{"step": step, "time/train_s": top * step / 9, "time/rollout_s": 0.0} for step in range(1, 10)]
    for ticks in Page(write_report(write_lines(tmp_path / "run", lines))).ticks("Step time by phase"):
        numbers = [(place, float(text.replace(",", "").replace("\u2212", "-"))) for place, text in ticks]
        (a, x), (b, y) = numbers[0], numbers[-1]
        assert len(numbers) >= 3 and a != b
        for place, value in numbers:
            assert value == pytest.approx(x + (place - a) / (b - a) * (y - x), abs=abs(y - x) / 300)


def test_numbers_that_never_change_are_a_table(tmp_path):
    lines = [
        {"step": step, "reward/mean": step / 9, "loss/clip_fraction": 0.0, "entropy": 0.5, "time/train_s": 2.0}
        for step in (1, 2, 3)
    ]
    page = Page(write_report(write_lines(tmp_path / "run", lines)))
    assert list(page.charts) == ["Reward"]
    assert page.row("Clip fraction", 2) == ["Clip fraction", "0"] and page.row("Entropy", 2) == ["Entropy", "0.5"]
    assert page.row("Step time by phase", 2) == ["Step time by phase", "2"]


@pytest.mark.parametrize(("distinct", "shown"), [((0.5, 0.75), False), ((0.5, 1.25), True)])
def test_distinct_answers_are_shown_where_they_are_not_pass_at_n(tmp_path, distinct, shown):
    lines = [
        {"step": step, "eval/score": 0.1, "eval/pass@4": right, "eval/distinct@4": different}
        for step, right, different in zip((0, 5), (0.5, 0.75), distinct, strict=True)
    ]
    run = write_lines(tmp_path / "run", lines)
    page = Page(write_report(run))
    table = before_after(run)
    assert ("Different right answers" in page.charts) == shown == ("distinct@4" in page.text)
    assert shown == ("distinct@4" in table.columns[0].cells) and "pass@4" in table.columns[0].cells


def test_runs_are_compared_by_the_newest_of_what_all_have(tmp_path):
    """A run that was trained, and one that was only evaluated."""
    trained = write_lines(
        tmp_path / "trained",
        [{"step": step, "eval/score": step / 8, "eval/reward/correct": step / 4, "eval/loss": 1.0} for step in (0, 2)],
    )
    (scored := tmp_path / "scored" / "evals").mkdir(parents=True)
    (scored.parent / "config.yaml").write_text("name: scored")
    (scored / "scores.jsonl").write_text('{"step": 0, "eval/reward/correct": 0.875, "eval/score": 0.75}')
    page = Page(write_report([trained, scored.parent]))
    assert page.row("reward/correct", 3) == ["reward/correct", "0.500", "0.875"]
    assert page.row("score", 3) == ["score", "0.250", "0.750"]
    table = compared([trained, scored.parent])
    assert [list(column.cells) for column in table.columns] == [
        ["score", "reward/correct"],
        ["0.250", "0.500"],
        ["0.750", "0.875"],
    ]
    assert compared([trained]) is None and "Runs side by side" not in Page(write_report(trained)).text


def test_lines_that_coincide_are_all_seen(tmp_path):
    """pass@n is broad, pale and below; greedy is dashed."""
    lines = [
        {"step": step, "eval/score": 0.1 + step / 50, "eval/pass@4": 0.5 + step / 50, "eval/greedy": 0.5 + step / 50}
        for step in (0, 5, 10)
    ]
    page = Page(write_report(write_lines(tmp_path / "run", lines)))
    drawn = [
        mark for mark in page.drawn("Evaluation") if mark["marktype"] == "line" and len(mark.get("stroke", "")) > 3
    ]
    first = {mark["stroke"]: mark for mark in reversed(drawn)}
    color = dict(page.charts["Evaluation"]["legend"])
    assert list(color.values()) == [vega.color(i) for i in range(3)]
    score, best, greedy = (first[color[label]] for label in ("score", "pass@4", "greedy"))
    assert drawn[0]["stroke"] == color["pass@4"]
    assert best["strokeWidth"] > 2 * greedy["strokeWidth"] and best["opacity"] < 0.5
    assert greedy["strokeDash"] and not best.get("strokeDash") and score["strokeWidth"] == greedy["strokeWidth"]


def test_numbers_of_gpus_have_charts_where_there_are_any(tmp_path):
    config = Config(name="gpu", steps=2)
    with RunLogger(tmp_path, config) as logger:
        for step in (1, 2):
            numbers = {"memory/peak_gb": 61.5 + step, "memory/reserved_gb": 70.0, "throughput/mfu": 0.3 + step / 100}
            logger.log_step(step, {"time/step_s": 3.0, "time/train_s": 1.0, "time/sleep_s": 2.0 * step, **numbers})
    page = Page(write_report(tmp_path))
    assert page.series("GPU memory") == {
        "allocated, peak": [[1, 62.5], [2, 63.5]],
        "reserved, peak": [[1, 70.0], [2, 70.0]],
    }
    assert page.series("GPU utilization") == {"MFU": [[1, 0.31], [2, 0.32]]}
    assert list(page.series("Step time by phase")) == ["sleep", "train"]
    assert not {"GPU memory", "GPU utilization"} & set(Page(write_report(make_run(tmp_path / "cpu", 2))).charts)


def test_the_page_needs_nothing_from_outside_and_rollouts_stay_text(tmp_path):
    path = write_report(make_run(tmp_path / "run", 3, total=3))
    text, page = path.read_text(encoding="utf-8"), Page(path)
    assert not page.links and "@import" not in text and "url(http" not in text
    assert len(text) < 3e6
    assert page.tags.count("script") == 4  # the theme, the data, the library, the program: none of a rollout's own
    assert page.cells[-5:] == ["1", "1", NASTY, f"answer 3 {NASTY}", "stop\nexact 1\nformat 0.5"]


def test_names_and_config_are_escaped(tmp_path):
    run = make_run(tmp_path / "run", 1, total=1)
    (run / "config.yaml").write_text("name: '<script>alert(1)</script>'\nsteps: 1\ndata: {task: '<img src=x>'}\n")
    page = Page(write_report(run))
    assert page.tags.count("script") == 4 and "img" not in page.tags
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.parametrize(
    "name",
    ["[bold]x[red]", "[bold]x[/]", "a[/b]", "l\u00e4uf \u2028 # y", "{{ 7 * 7 }}", "a'b\"c<!--", "%s %x", "a\\[b]"],
)
def test_any_name_of_a_run_is_shown_as_it_is(tmp_path, capsys, monkeypatch, name):
    """On the page, in tables of the terminal and as a label of Prometheus."""
    monkeypatch.setenv("COLUMNS", "500")
    runs = [make_run(tmp_path / one, 10, total=10) for one in (name, "other")]
    assert main(["report", *map(str, runs)]) == main(["status", str(runs[0])]) == 0
    flat = lambda text: "".join(text.split())  # noqa: E731  (lines of the terminal are broken)
    printed, path, name = capsys.readouterr(), name, Path(name).name
    assert flat(printed.out).count(flat(path)) >= 2
    assert flat(printed.out).count(flat(name)) >= 3 and not printed.err
    page = Page(write_report(runs))
    assert name in page.text and set(page.series("Reward")) == {name, "other"} and page.tags.count("script") == 4
    registry = CollectorRegistry()
    Gauge("steps", "of", ["run"], registry=registry).labels(name).set(1)
    [family] = text_string_to_metric_families(generate_latest(registry).decode())
    assert family.samples[0].labels == {"run": name}


def test_a_run_in_progress_and_one_that_never_began(tmp_path):
    run = make_run(tmp_path / "half", 7)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "reward/me')
    assert "step 7 of 20" in Page(write_report(run)).text
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text(to_yaml(Config(name="empty")))
    page = Page(write_report(empty))
    assert "No step has been logged yet" in page.text and not page.charts
    with pytest.raises(UserError, match="holds no run"):
        write_report(tmp_path / "nothing")


def test_two_runs_side_by_side(tmp_path):
    runs = [make_run(tmp_path / "a", 5), make_run(tmp_path / "b", 9, seed=7)]
    path = write_report(runs)
    assert path == tmp_path / "report.html"
    page = Page(path)
    assert {name: len(points) for name, points in page.series("Reward").items()} == {"a": 5, "b": 9}
    assert [step for step, _ in page.series("Step time")["a"]] == [1, 2, 3, 4, 5]
    assert page.row("config key", 6) == ["config key", "a", "b", "seed", "0", "7"]


def test_long_series_are_averaged(tmp_path):
    lines = [{"step": step, "reward/mean": step % 4} for step in range(1, 4 * MOST_ROWS + 1)]
    points = Page(write_report(write_lines(tmp_path / "long", lines))).series("Reward")["reward"]
    assert len(points) == MOST_ROWS and points[-1] == [4 * MOST_ROWS, 1.5]


def test_a_gamed_reward_is_seen(tmp_path):
    """The best-paid and the most frequent responses of a run, by the counts of the steps."""
    run = write_lines(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    rows = [
        {"step": 1, "prompt": "2+2", "response": "so it is 4", "reward": 0.9, "count": 1},
        {"step": 1, "prompt": "1+1", "response": "as you say", "reward": 1.0, "count": 30},
        {"step": 2, "prompt": "3+3", "response": "no idea", "reward": 0.0, "count": 50},
        {"step": 2, "prompt": "3+3", "response": "as you say", "reward": 0.25, "count": 12},
        {"step": 2, "prompt": "4+4", "response": "as you say", "reward": 0.25, "count": 12},
        {"step": 2, "prompt": "4+4", "response": "could not be scored", "reward": None, "count": 2},
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(run))
    assert page.row("Highest reward", 6) == ["Highest reward", "1", "42", "1+1", "as you say", "steps 1 to 2"]
    assert page.row("Most frequent", 6) == ["Most frequent", "0", "50", "3+3", "no idea", "step 2"]


def test_a_conversation_is_shown_turn_by_turn_with_what_trains_marked(tmp_path):
    turns = [
        {"role": "assistant", "text": f"<tool_call>{NASTY}", "trains": True, "malformed": "a call without end"},
        {"role": "tool", "text": "Error: " + "x" * 10_000, "trains": False},
        {"role": "assistant", "text": "7", "trains": True},
    ]
    run = make_run(tmp_path / "agent", 2)
    sample = {
        "step": 2,
        "prompt": "3+4=",
        "response": "7",
        "reward": 1.0,
        "turns": turns,
        "masked": True,
        "finish": "turns",
    }
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample) + "\n")
    text = write_report(run).read_text()
    start = text.index('<ol class="turns">')
    shown = text[start : text.index("</ol>", start)]
    assert shown.count('<li class="trains">') == 2 and shown.count("<li>") == 1
    assert "a call without end" in shown and "characters" in shown and len(shown) < 8000
    assert "<script>" not in shown and "not trained on" in text


def test_a_browser_draws_it(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    run = make_run(tmp_path / "run", 20)
    turns = [
        {"role": "assistant", "text": "a call <b>", "trains": True},
        {"role": "tool", "text": "7", "trains": False},
        {"role": "assistant", "text": "it is 7", "trains": True},
    ]
    sample = {"step": 20, "prompt": "3+4=", "response": "7", "reward": 1.0, "turns": turns, "finish": "stop"}
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample) + "\n")
    path = write_report(run)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    charts = Page(path).charts
    drawn = dom.count("<svg") - path.read_text().count("<svg")  # the library's own text has one
    assert drawn == len(charts) > 0
    assert dom.count("<path") >= len(charts)
    assert "owned" not in re.search(r"<title>(.*?)</title>", dom).group(1)
    assert dom.count('<li class="trains">') >= 2 and "a call &lt;b&gt;" in dom and "it is 7" in dom


def promised() -> list[str]:
    """Metrics in tables of the sections that say that the report draws them."""
    found = []
    for document in sorted(DOCS.glob("*.md")):
        for section in re.split(r"^#+ ", document.read_text(), flags=re.MULTILINE):
            tables = re.findall(r"^\| (?:metric|name) \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
            if tables and re.search(r"megatron-rl report[^`]*`\s+draws|drawn\s+by\s+`megatron-rl report", section):
                found += names_in(
                    "".join(re.sub(r"^\|([^|]*)\|.*$", r"\1", row) + "\n" for row in tables[0].split("\n"))
                )
    return found


def test_what_the_documents_say_is_drawn_is_drawn():
    names = promised()
    rooms = {name.partition("/")[0] for name in names}
    assert len(names) > 60 and {"mismatch", "pruning", "corrected", "routing", "vp2o"} <= rooms
    charts = {heading: [chart.series for chart in found] for heading, found in charts_of(map(filled, names)).items()}
    drawn = [pattern for heading, found in charts.items() if heading != "Other metrics" for s in found for pattern in s]
    for name in names:
        later = name.replace("routing/", "routing/later/")
        there = [m for m in (*drawn, *CARDS) if is_named(m, name) or is_named(name, m) or is_named(m, later)]
        assert there, f"no chart has {name}"


def test_what_is_drawn_is_in_the_documents():
    """But for what a metric has by layer and by update, whose names the documents tell once."""
    documented = [name for document in DOCS.glob("*.md") for name in names_in(document.read_text())]
    for metric in (*CHARTED, *STANDARD):
        plain = re.sub(
            r"routing/(later|update_\*)/|/layer_\*/", lambda m: "/" if m[0][0] == "/" else "routing/", metric
        )
        assert any(is_named(plain, name) or is_named(name, plain) for name in documented), f"no document has {metric}"


def filled(metric: str) -> str:
    return metric.replace("*", "7")


def test_each_metric_of_a_chart_can_be_drawn(tmp_path):
    """Each by itself, with a number that changes: it is on the page under its label, and nothing else is."""
    metrics = list(dict.fromkeys(filled(metric) for metric in (*CHARTED, *promised(), "new/of_a_hook")))
    lines: list[dict] = [{"step": step} for step in (1, 2, 3)]
    for number, metric in enumerate(metrics, 1):
        for line in lines:
            line[metric] = number * line["step"] / 1000
    for step, line in enumerate(lines, 1):
        for below in BELOW:
            line |= {f"mismatch/p<{below:g}/{name}": 0.1 * step for name in ("tokens", "abs", "bias", "abs_max")}
        line |= {"routing/deviation_0": 0.5, "routing/deviation_1": 0.5}
    page = Page(write_report(write_lines(tmp_path / "run", lines)))
    for chart in (chart for charts in charts_of(metrics).values() for chart in charts):
        for pattern, label in chart.series.items():
            if any(is_named(metric, pattern) for metric in metrics):
                assert page.series(chart.title)[label.replace("*", "7")], pattern
    assert {"Mismatch by probability", "Deviation tails", "new/of_a_hook"} <= page.charts.keys()


def test_a_metric_has_its_layers_and_its_other_statistics_beside_it():
    names = ["step", "vp2o/overlap", "vp2o/layer_01/overlap", "vp2o/layer_02/overlap", "pruning/coverage"]
    names += ["pruning/coverage_min", "time/step_s", "mismatch/p<0.1/abs", "mine", "advantage/mean", "advantage/std"]
    names += ["routing/agreement", "routing/layer_01/agreement", "routing/update_1/deviation_0"]
    declared = {heading: len(charts) for heading, charts in SECTIONS.items()}
    added = {(c.title, *c.series.items()) for h, charts in charts_of(names).items() for c in charts[declared[h] :]}
    assert added == {
        ("vp2o/overlap", ("vp2o/overlap", "overlap"), ("vp2o/layer_*/overlap", "layer *")),
        ("pruning/coverage", ("pruning/coverage", "coverage"), ("pruning/coverage_min", "min")),
        ("mine", ("mine", "mine")),
        ("advantage", ("advantage/mean", "mean"), ("advantage/std", "std")),
    }
