from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_rl.config import Config, to_yaml
from megatron_rl.errors import UserError
from megatron_rl.metrics.logger import RunLogger
from megatron_rl.metrics.report import MOST_POINTS, write_report

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
                    "mismatch/kl": float("nan") if step == 2 else 1e-4,
                    "time/rollout_s": 2.0,
                    "time/train_s": 1.0,
                    "time/step_s": 3.0,
                },
            )
            logger.log_samples(step, [{"prompt": NASTY, "response": f"answer {step} {NASTY}", "reward": 1.0} | PARTS])
    return folder


class Page(HTMLParser):
    """Tags, attributes and the embedded data of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open = ""
        self.scripts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(self.scripts[1])
        self.charts = {chart["title"]: chart for chart in self.data["charts"]}

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open = tag
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, text):
        if self._open == "script":
            self.scripts[-1] += text
        elif self._open != "style":
            self.text += text


def test_a_run_as_one_page(tmp_path):
    run = make_run(tmp_path / "sorting", 20)
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path)
    assert "20 steps" in page.text
    evaluation = page.charts["Evaluation"]["series"]
    assert [s["label"] for s in evaluation] == ["score", "pass@4"]
    assert evaluation[0]["points"] == [[0, 0.25], [10, 0.5], [20, 0.75]]
    assert [p[0] for p in page.charts["Mismatch"]["series"][0]["points"]] == [1, *range(3, 21)]  # the null is left out
    assert [s["label"] for s in page.charts["Where a step's time goes"]["series"]] == ["rollout", "train"]
    assert "Routing agreement" not in page.charts
    row = re.search(r"<tr><td>score</td>.*?</tr>", path.read_text()).group()
    assert re.findall(r">([^<>]+)</td>", row) == ["score", "0.250", "0.750", "+0.500", "0 → 20"]


def test_numbers_of_gpus_have_charts_where_there_are_any(tmp_path):
    numbers = {"memory/peak_gb": 61.5, "memory/reserved_gb": 70.0, "throughput/mfu": 0.31, "time/sleep_s": 2.0}
    config = Config(name="gpu", steps=2)
    with RunLogger(tmp_path, config) as logger:
        for step in (1, 2):
            logger.log_step(step, {"time/step_s": 3.0, "time/train_s": 1.0, **numbers})
    charts = Page(write_report(tmp_path)).charts
    assert [s["points"][0] for s in charts["GPU memory"]["series"]] == [[1, 61.5], [1, 70.0]]
    assert charts["GPU utilization"]["series"][0]["points"] == [[1, 0.31], [2, 0.31]]
    assert [s["label"] for s in charts["Where a step's time goes"]["series"]] == ["sleep", "train"]
    assert not {"GPU memory", "GPU utilization"} & set(Page(write_report(make_run(tmp_path / "cpu", 2))).charts)


def test_the_page_needs_nothing_from_outside_and_rollouts_stay_text(tmp_path):
    path = write_report(make_run(tmp_path / "run", 3, total=3))
    text, page = path.read_text(encoding="utf-8"), Page(path)
    assert not page.links and "@import" not in text
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert page.tags.count("script") == 3  # the theme, the data, the program: none of a rollout's own
    assert page.data["samples"][0]["prompt"] == NASTY
    assert page.data["samples"][-1]["more"] == "stop\nexact 1\nformat 0.5"
    assert page.data["samples"][-1]["response"] == f"answer 3 {NASTY}"


def test_names_and_config_are_escaped(tmp_path):
    run = make_run(tmp_path / "run", 1, total=1)
    (run / "config.yaml").write_text("name: '<script>alert(1)</script>'\nsteps: 1\ndata: {task: '<img src=x>'}\n")
    page = Page(write_report(run))
    assert page.tags.count("script") == 3 and "img" not in page.tags
    assert "<script>alert(1)</script>" in page.text


def test_a_run_in_progress_and_one_that_never_began(tmp_path):
    run = make_run(tmp_path / "half", 7)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "reward/me')
    assert "step 7 of 20" in Page(write_report(run)).text
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text(to_yaml(Config(name="empty")))
    page = Page(write_report(empty))
    assert "No step has been logged yet" in page.text and not page.data["charts"]
    with pytest.raises(UserError, match="holds no run"):
        write_report(tmp_path / "nothing")


def test_two_runs_side_by_side(tmp_path):
    runs = [make_run(tmp_path / "a", 5), make_run(tmp_path / "b", 9, seed=7)]
    path = write_report(runs)
    assert path == tmp_path / "report.html"
    page = Page(path)
    assert [(s["label"], len(s["points"])) for s in page.charts["Reward"]["series"]] == [("a", 5), ("b", 9)]
    assert re.findall(r"<tr><td>(\w+)</td><td>0</td><td>7</td></tr>", path.read_text()) == ["seed"]


def test_long_series_are_averaged(tmp_path):
    folder = tmp_path / "long"
    folder.mkdir()
    lines = [json.dumps({"step": step, "reward/mean": step % 4}) for step in range(1, 4 * MOST_POINTS + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    points = Page(write_report(folder)).charts["Reward"]["series"][0]["points"]
    assert len(points) == MOST_POINTS and points[-1] == [4 * MOST_POINTS, 1.5]


def test_a_browser_draws_it(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    path = write_report(make_run(tmp_path / "run", 20))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    charts = Page(path).charts
    assert dom.count("<svg") == len(charts)
    assert dom.count("<path") >= len(charts) and "NaN" not in dom.split("</script>")[-1]
    assert "owned" not in re.search(r"<title>(.*?)</title>", dom).group(1)
    assert dom.count('class="badge"') == 1
