from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from megatron_rl.config import Config, LoggingConfig
from megatron_rl.errors import UserError
from megatron_rl.metrics.logger import STANDARD, RunLogger, read_json_lines
from megatron_rl.servers.server import reserve_port

CONFIG = Config(steps=10, logging=LoggingConfig(trackers=[]))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_a_step_with_the_promised_names(tmp_path, capsys):
    with RunLogger(tmp_path, CONFIG) as logger:
        logger.log_eval(0, {"eval/score": 0.25})
        logger.log_step(1, {"reward/mean": torch.tensor(0.5), "mismatch/kl": 2e-4, "time/step_s": 60.0, "extra": 3})
        assert len(lines_of(tmp_path)) == 2  # on disk before the logger is closed
        logger.log_eval(2, {"eval/score": 0.75})
        logger.log_step(2, {"reward/mean": 0.75})
    first, second, third = lines_of(tmp_path)
    promised = (
        "reward/mean eval/score loss/policy entropy mismatch/kl mismatch/ess mismatch/ratio_max routing/agreement"
    )
    promised += " time/rollout_s time/train_s time/sync_s throughput/tokens_per_s"
    for line in (first, second, third):
        assert set(promised.split()) <= set(STANDARD) <= set(line)
    assert (first["step"], first["eval/score"], first["reward/mean"]) == (0, 0.25, None)
    assert (second["step"], second["eval/score"], second["reward/mean"], second["extra"]) == (1, None, 0.5, 3)
    assert (third["step"], third["eval/score"]) == (2, 0.75)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("eval at step 0: score 0.25")
    assert out[1].startswith("step 1/10  reward 0.500  mismatch KL 2.0e-04  60.0 s/step  left ")


def test_what_is_not_finite_becomes_null_and_is_counted(tmp_path, capsys):
    with RunLogger(tmp_path, CONFIG) as logger:
        for step in (1, 2):
            logger.log_step(
                step, {"entropy": float("nan"), "mismatch/ratio_max": torch.tensor(torch.inf), "reward/mean": 0.0}
            )
        logger.log_step(3, {"entropy": 1.0})
    lines = lines_of(tmp_path)
    assert [line["entropy"] for line in lines] == [None, None, 1.0]
    assert [line["log/not_finite"] for line in lines] == [2, 2, 0]
    assert capsys.readouterr().out.count("warning: entropy is nan") == 1


def test_a_resumed_run_cuts_later_steps_and_a_broken_last_line(tmp_path):
    with RunLogger(tmp_path, CONFIG) as logger:
        for step in range(1, 6):
            logger.log_step(step, {"reward/mean": step})
            logger.log_samples(step, [{"prompt": "p", "response": "r", "reward": step}] * 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')
    with RunLogger(tmp_path, CONFIG, resume_step=3) as logger:
        assert (
            len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
        )  # nothing is touched before the first write
        logger.log_step(4, {"reward/mean": 40})
        logger.log_samples(4, [{"prompt": "q", "response": "s", "reward": float("nan")}])
    assert [(line["step"], line["reward/mean"]) for line in lines_of(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    samples = read_json_lines(tmp_path / "samples.jsonl")
    assert [s["step"] for s in samples] == [1, 1, 2, 2, 3, 3, 4]
    assert samples[-1]["reward"] is None


def test_a_fresh_run_starts_a_fresh_log_and_an_evaluation_alone_leaves_it(tmp_path):
    with RunLogger(tmp_path, CONFIG) as logger:
        logger.log_step(1, {"reward/mean": 1})
    with RunLogger(tmp_path, CONFIG) as logger:
        logger.say("only asking")
    assert len(lines_of(tmp_path)) == 1
    with RunLogger(tmp_path, CONFIG) as logger:
        logger.log_eval(0, {"eval/score": 0.5})
    assert [line["step"] for line in lines_of(tmp_path)] == [0]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2"):
        read_json_lines(tmp_path / "metrics.jsonl")


def test_a_full_disk_is_one_clear_error():
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full on this system")
    from megatron_rl.metrics.logger import JsonLines

    log = JsonLines.__new__(JsonLines)
    log.path, log._file = "/dev/full", open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(UserError, match="/dev/full: No space left on device"):
        log.write({"step": 1})


def test_inactive_ranks_write_nothing(tmp_path, capsys):
    with RunLogger(tmp_path / "run", CONFIG, active=False) as logger:
        logger.say("hello")
        logger.log_eval(0, {"eval/score": 1.0})
        logger.log_step(1, {"reward/mean": 1.0})
        logger.log_samples(1, [{"prompt": "p"}])
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read by their number in the process, as text: 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    config = replace(CONFIG, logging=LoggingConfig(trackers=["tensorboard"], progress=False))
    with RunLogger(tmp_path, config) as logger:
        for step in (1, 2, 3):
            logger.log_step(step, {"reward/mean": step / 4, "entropy": float("nan")})
    with RunLogger(tmp_path, config, resume_step=2) as logger:
        logger.log_step(3, {"reward/mean": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 9.0)]
    assert "entropy" not in events.Tags()["scalars"]


def test_prometheus_gets_the_newest_numbers(tmp_path):
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    reserved = reserve_port("")  # a port that was only looked up may be another process's by now
    port = reserved.getsockname()[1]
    config = replace(CONFIG, name="a/b", logging=LoggingConfig(trackers=[], prometheus_port=port))

    def exported() -> dict[tuple[str, str | None], float]:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert all(sample.labels["run"] == "a/b" for sample in samples)
        return {(sample.name, sample.labels.get("metric")): sample.value for sample in samples}

    before = time.time()
    with RunLogger(tmp_path, config) as logger:
        assert exported() == {}
        listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in listening if c.laddr.port == port} == {"127.0.0.1"}, (
            "not on all addresses, unless asked"
        )
        for step in (1, 2):
            logger.log_step(step, {"mismatch/p<0.1/abs": step / 4, "entropy": float("nan")})
        with pytest.raises(UserError, match=rf"logging.prometheus_port: {port}: .*; set it to a free one"):
            RunLogger(tmp_path / "other", config)
        RunLogger(tmp_path / "other", config, active=False)
        found = exported()
    assert found["megatron_rl_metric", "mismatch/p<0.1/abs"] == 0.5 and found["megatron_rl_step", None] == 2
    assert ("megatron_rl_metric", "entropy") not in found
    assert before <= found["megatron_rl_last_step_timestamp_seconds", None] <= time.time()
    with pytest.raises(httpx.TransportError):
        exported()
    reserved.close()


def test_beyond_this_machine_prometheus_needs_a_key(tmp_path, monkeypatch):
    import httpx

    open_to_all = LoggingConfig(trackers=[], prometheus_port=1, prometheus_address="0.0.0.0")
    with pytest.raises(UserError, match=r"logging.prometheus_api_key: everybody who reaches 0.0.0.0 would see"):
        RunLogger(tmp_path, replace(CONFIG, logging=open_to_all))
    reserved = reserve_port("")
    port = reserved.getsockname()[1]
    monkeypatch.setenv("OF_THIS_TEST", "k\N{LATIN SMALL LETTER E WITH ACUTE}y")
    keyed = replace(open_to_all, prometheus_port=port, prometheus_api_key="env:OF_THIS_TEST")
    with pytest.raises(UserError, match=r"logging.prometheus_api_key: the key must not be empty"):
        RunLogger(tmp_path, replace(CONFIG, logging=keyed))
    monkeypatch.setenv("OF_THIS_TEST", "right")
    with RunLogger(tmp_path, replace(CONFIG, logging=keyed)):
        for sent, status in ((None, 401), ("Bearer wrong", 401), ("right", 401), ("Bearer right", 200)):
            headers = {"Authorization": sent} if sent else {}
            for path in ("/metrics", "/"):
                reply = httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, timeout=30)
                assert reply.status_code == status and (status == 200 or not reply.content)
    reserved.close()


def test_progress_within_a_step_is_said_seldom_without_a_terminal(tmp_path, capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("megatron_rl.metrics.logger.time.monotonic", lambda: now[0])
    with RunLogger(tmp_path, CONFIG) as logger:
        for arrived in range(1, 101):
            now[0] += 1.0
            logger.progress(arrived, 100)
    assert capsys.readouterr().out.splitlines() == [f"responses {n}/100" for n in (30, 60, 90)]
    with RunLogger(tmp_path, CONFIG, active=False) as logger:
        logger.progress(1, 2)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_one_live_line(tmp_path):
    program = f"""
from megatron_rl.config import Config, LoggingConfig
from megatron_rl.metrics.logger import RunLogger
with RunLogger({str(tmp_path)!r}, Config(steps=4, logging=LoggingConfig(trackers=[]))) as logger:
    for step in range(1, 5):
        logger.log_step(step, {{"reward/mean": step / 10, "throughput/tokens_per_s": 1234.0}})
        logger.progress(3, 8)
"""
    reader, writer = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.run([sys.executable, "-c", program], stdout=writer, env=environment, timeout=120, check=True)
    os.close(writer)
    text = b""
    while chunk := _read(reader):
        text += chunk
    assert process.returncode == 0
    last = [line for line in text.decode().replace("\r", "\n").splitlines() if "/4" in line][-1]
    assert "4/4" in last and "reward 0.400" in last and "1,234 tok/s" in last and "left 0:00" in last
    assert "left 0:00  responses 3/8" in last


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed and everything is read
        return b""
