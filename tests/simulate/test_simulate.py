"""A step in simulation: closed forms, what is conserved, bounds, and costs that are found again in what they made."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.cli import main
from megatron_rl.data.trajectory import Trajectory, file_of, save_trajectories
from megatron_rl.errors import UserError
from megatron_rl.rollout.collect import TOKENS_PER_CALL, Collection
from megatron_rl.simulate import servers as simulated_servers
from megatron_rl.simulate.costs import Z90, Costs, Lengths, Setting
from megatron_rl.simulate.measured import UNLIMITED, calibrate, compare, nonnegative, read_measured
from megatron_rl.simulate.servers import Servers, calls_of
from megatron_rl.simulate.simulate import read_scenario
from megatron_rl.simulate.simulated_step import simulate
from megatron_rl.tasks import Prompt

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "simulate_qwen3_30b.yaml"
EXACT = 1e-9
"""Relative: sums of some thousand doubles."""


def setting_of(**changes) -> Setting:
    sizes = {"samples_per_prompt": 1, "max_new_tokens": 10_000, "prompt_tokens": 0, "servers": 1, "leaders": 1}
    limits = {"slots": UNLIMITED, "concurrency": UNLIMITED, "tokens_per_micro_batch": UNLIMITED}
    return Setting(**(sizes | limits | changes))


def decoding(rng, **more) -> Costs:
    names = ("decode_base_s", "decode_sequence_s", "decode_kv_token_s", "prefill_token_s", "train_token_s", "push_s")
    return Costs(**dict(zip(names, rng.uniform(0.01, 1, 6) * [1, 0.1, 1e-4, 1e-2, 1e-3, 10], strict=True)) | more)


def close(a, b) -> bool:
    return math.isclose(a, b, rel_tol=EXACT, abs_tol=1e-9)


def rollout_s(setting: Setting, costs: Costs, lengths) -> float:
    return simulate(setting, costs, [lengths]).steps[0].rollout_s


def test_one_slot_answers_one_after_the_other(rng):
    lengths, costs, prompt = rng.integers(1, 500, 30), decoding(rng), int(rng.integers(0, 50))
    cached = (prompt * lengths + lengths**2 / 2).sum() * costs.decode_kv_token_s
    iterations = lengths.sum() * (costs.decode_base_s + costs.decode_sequence_s)
    expected = iterations + cached + 30 * prompt * costs.prefill_token_s
    assert close(rollout_s(setting_of(slots=1, prompt_tokens=prompt), costs, lengths), expected)


def test_with_a_slot_for_each_the_longest_decides(rng):
    """Prompts of four samples are computed once."""
    lengths, costs, prompt = rng.integers(1, 500, 40), decoding(rng), int(rng.integers(0, 50))
    cached = (prompt * lengths + lengths**2 / 2).sum() * costs.decode_kv_token_s
    expected = lengths.max() * costs.decode_base_s + lengths.sum() * costs.decode_sequence_s + cached
    setting = setting_of(prompt_tokens=prompt, samples_per_prompt=4)
    assert close(rollout_s(setting, costs, lengths), expected + 10 * prompt * costs.prefill_token_s)


def test_experts_are_read_by_those_that_are_sent_there(rng):
    lengths, costs = [5, 9], Costs(decode_experts_s=2.0, expert_share=0.25)
    assert close(rollout_s(setting_of(), costs, lengths), 5 * 2 * (1 - 0.75**2) + 4 * 2 * 0.25)


def test_a_limit_of_the_client_is_as_one_of_the_server(rng):
    lengths, costs, limit = rng.integers(1, 500, 60), decoding(rng), int(rng.integers(1, 60))
    by_server = rollout_s(setting_of(slots=limit), costs, lengths)
    assert close(rollout_s(setting_of(concurrency=limit), costs, lengths), by_server)


def test_stages_of_a_pipeline_wait_for_one_another(rng):
    """Passes of m micro-batches take (m v + p - 1) / (m v) times as long; an update's other work as long as before."""
    stages, virtual = int(rng.integers(2, 6)), int(rng.integers(1, 4))
    lengths, costs = rng.integers(1, 500, 40), decoding(rng, micro_batch_s=0.3, update_s=0.7, train_pair_s=1e-3)
    sizes = {"tokens_per_micro_batch": 600, "updates_per_step": 2, "scoring_passes": 1}
    alone, staged = (
        simulate(setting_of(**sizes, **more), costs, [lengths]).steps[0]
        for more in ({}, {"pipeline": stages, "virtual_pipeline": virtual})
    )
    micro_batches = -(-max(lengths.sum() / 2, lengths.max()) // 600)
    if virtual > 1:
        micro_batches = -(-micro_batches // stages) * stages
    factor = (micro_batches * virtual + stages - 1) / (micro_batches * virtual)
    assert close(staged.train_s - 2 * 0.7, (alone.train_s - 2 * 0.7) * factor)
    assert close(staged.log_probs_s, alone.log_probs_s * factor) and close(staged.rollout_s, alone.rollout_s)


def random_run(rng, **changes):
    """A setting of several servers, leaders and limits, and lengths of eight steps."""
    samples = int(rng.integers(1, 5))
    setting = setting_of(
        samples_per_prompt=samples,
        max_new_tokens=int(rng.choice([400, 3000])),
        prompt_tokens=float(rng.integers(0, 40)),
        servers=int(rng.integers(1, 4)),
        slots=int(rng.integers(2, 30)),
        leaders=int(rng.integers(1, 4)),
        concurrency=int(rng.integers(1, 40)),
        max_staleness=int(rng.integers(0, 4)),
        partial_rollout=bool(rng.integers(2)),
        **changes,
    )
    return setting, [rng.integers(1, 400, 12 * samples) for _ in range(8)]


def test_epochs_repeat_the_updates_and_nothing_else(rng):
    """A step that waits for its servers has so many times the train seconds; scoring, rollout and push stay."""
    setting, lengths = random_run(rng, updates_per_step=2, scoring_passes=1)
    setting = replace(setting, max_staleness=0)
    costs = decoding(rng, log_probs_share=0.4, update_s=0.7, micro_batch_s=0.2, push_s=0.1)
    once, thrice = (simulate(replace(setting, epochs=n), costs, lengths).steps for n in (1, 3))
    for one, three in zip(once, thrice, strict=True):
        assert close(three.train_s, 3 * one.train_s) and close(three.log_probs_s, one.log_probs_s)
        assert close(three.step_s - one.step_s, 2 * one.train_s) and one.train_s > 1.4


def test_tokens_are_conserved_and_staleness_is_bounded(rng):
    for _ in range(5):
        setting, lengths = random_run(rng)
        found = simulate(setting, decoding(rng, request_s=0.1, other_s=0.3), lengths)
        assert close(sum(work.tokens for work in found.work), np.sum(lengths))
        assert [step.tokens for step in found.steps] == [n.sum() + setting.prompt_tokens * len(n) for n in lengths]
        ages = np.concatenate([step.staleness for step in found.steps])
        assert ages.min() >= 0 and ages.max() <= setting.max_staleness
        assert 0 <= found.idle <= 1 and 0 <= found.tail <= 1


def test_a_step_that_waits_is_the_sum_of_its_parts(rng):
    setting, lengths = random_run(rng, updates_per_step=2, scoring_passes=1)
    setting = replace(setting, max_staleness=0, tokens_per_micro_batch=700, colocated=True)
    more = rng.uniform(0.1, 1, 7)
    names = ("train_pair_s", "micro_batch_s", "update_s", "log_probs_s", "push_server_s", "turns_s", "other_s")
    costs = decoding(rng, log_probs_share=0.4, **dict(zip(names, more * [1e-6, 1, 1, 1, 1, 1, 1], strict=True)))
    for n, step in zip(lengths, simulate(setting, costs, lengths).steps, strict=True):
        whole = n + setting.prompt_tokens
        of_rank = max(whole.sum() / 2 / setting.leaders, whole.max())
        pairs = max((whole**2).sum() / 2 / setting.leaders, whole.max() ** 2) / 2
        passes = 2 * (
            of_rank * costs.train_token_s + pairs * costs.train_pair_s + math.ceil(of_rank / 700) * costs.micro_batch_s
        )
        push = costs.push_s + setting.servers * costs.push_server_s
        assert close(step.rollout_s, rollout_s(setting, costs, n))
        assert close(step.train_s, passes + 2 * costs.update_s) and close(step.sync_s, push)
        assert close(step.log_probs_s, 0.4 * passes + costs.log_probs_s)
        assert close(step.other_s, costs.other_s + costs.turns_s)
        expected = rollout_s(setting, costs, n) + 1.4 * passes + 2 * costs.update_s + costs.log_probs_s + push
        assert close(step.step_s, expected + costs.other_s + costs.turns_s)
        assert not step.staleness.any()


def test_one_step_off_takes_as_long_as_the_slower_side(rng):
    """With as many slots as a batch has, and responses of one length."""
    for _ in range(4):
        count, length = int(rng.integers(1, 9)), int(rng.integers(1, 300))
        decode, train, push = rng.uniform(0.1, 10, 3)
        costs = Costs(decode_base_s=decode / length, train_token_s=train / length / count, push_s=push)
        setting = setting_of(slots=count, max_staleness=1)
        steps = simulate(setting, costs, [np.full(count, length)] * 8).steps
        for step in steps[2:-1]:
            assert close(step.step_s, max(decode, train) + push)


def test_with_free_slots_batches_follow_a_recurrence_and_a_deeper_bound_is_never_slower(rng):
    """u(s + 1) = max(u(s), u(s - k) + R(s)) + T(s), where u counts seconds outside of pushes: it falls with k, term by term."""
    costs = Costs(decode_base_s=rng.uniform(0.1, 1), train_token_s=rng.uniform(0.001, 0.1), push_s=rng.uniform(0, 50))
    lengths, before = [rng.integers(1, 300, 20) for _ in range(12)], math.inf
    for k in range(5):
        u = [0.0]
        for s, n in enumerate(lengths):
            decoded = u[max(0, s - k)] + n.max() * costs.decode_base_s
            u.append(max(u[s], decoded) + n.sum() * costs.train_token_s)
        steps = simulate(setting_of(max_staleness=k), costs, lengths).steps
        total = sum(step.step_s for step in steps)
        assert close(total, u[-1] + 12 * costs.push_s)
        assert total <= before * (1 + EXACT)
        before = total


def test_a_push_that_waits_interrupts_nothing(rng):
    """A prompt is computed once on each server that has samples of it, and no response is."""
    setting, lengths = random_run(rng)
    found = simulate(replace(setting, max_staleness=2, partial_rollout=False), decoding(rng), lengths)
    places = {
        (batch, r // setting.samples_per_prompt, r * setting.servers // len(n))
        for batch, n in enumerate(lengths)
        for r in range(len(n))
    }
    assert sum(work.prefill_tokens for work in found.work) == len(places) * setting.prompt_tokens


def test_what_a_push_interrupts_is_computed_anew(rng):
    prompt, length = int(rng.integers(1, 50)), int(rng.integers(100, 200))
    costs = Costs(decode_base_s=rng.uniform(0.1, 1), prefill_token_s=rng.uniform(0.001, 0.01))
    servers = Servers(setting_of(prompt_tokens=prompt), costs)
    servers.ask(0, [length])
    done = rng.uniform(1, length - 1)
    servers.pass_time(costs.prefill_token_s * prompt + done * costs.decode_base_s)
    servers.pause()
    servers.pass_time(7.0)
    servers.resume(version=1)
    servers.pause()  # before a token is sampled
    servers.resume(version=2)
    (response,) = servers.finish(0)
    prefill = 2 * prompt + done
    assert close(servers.wall, length * costs.decode_base_s + prefill * costs.prefill_token_s + 7)
    assert close(servers.work[0].prefill_tokens, prefill + prompt + done)  # the second one was in vain
    assert response.version == 0


def test_a_response_is_of_the_weights_that_sampled_its_first_token(rng):
    costs = Costs(decode_base_s=1.0, prefill_token_s=1.0)
    servers = Servers(setting_of(prompt_tokens=10), costs)
    servers.ask(0, [5])
    servers.pass_time(rng.uniform(0, 9.9))  # in the middle of the prefill
    servers.pause()
    servers.resume(version=3)
    assert servers.finish(0)[0].version == 3


def test_processors_that_are_shared(rng):
    setting, lengths = random_run(rng)
    costs, factor = decoding(rng), rng.uniform(1, 3)
    alone, shared = (simulate(setting, replace(costs, overlap_slowdown=f), lengths).steps for f in (1.0, factor))
    for a, b in zip(alone, shared, strict=True):
        assert close(b.step_s, a.step_s + (factor - 1) * a.overlap_s)


def test_idle_and_tail(rng):
    length, costs = int(rng.integers(1, 100)), Costs(decode_base_s=0.5, push_s=rng.uniform(1, 9), other_s=2.0)
    found = simulate(setting_of(), costs, [np.asarray([length] * 20 + [2 * length])] * 3)
    step = length + costs.push_s + 2
    assert close(found.idle, (costs.push_s + 2) / step) and close(found.tail, length / 2 / step)


def test_calls_are_those_of_the_client(rng):
    """The same requests on the same servers in the same order."""
    for _ in range(20):
        prompts, samples, servers = (int(rng.integers(1, n)) for n in (9, 6, 5))
        limit, total = int(rng.integers(1, 6000)), prompts * samples
        first, last = sorted(rng.integers(0, total + 1, 2).tolist())
        asked = [Prompt(prompt_id=str(p), text="") for p in range(prompts)]
        collection = Collection(asked, SamplingSupport(), samples, limit, share=range(first, last))
        expected = [list(call.requests) for call in collection._calls(servers)]
        found = calls_of(first, last - first, total, servers, max(1, TOKENS_PER_CALL // limit))
        assert [list(numbers) for _, numbers in found] == expected
    assert simulated_servers.TOKENS_PER_CALL == TOKENS_PER_CALL


def test_lengths_have_the_stated_mean_and_percentile(rng):
    class Asked:
        def lognormal(self, mean, sigma, size):
            self.mean, self.sigma = mean, sigma
            return np.full(size, 7.4)

    asked, mean = Asked(), rng.uniform(10, 1000)
    lengths = Lengths(mean=mean, p90=mean * rng.uniform(1, 2.27))
    assert lengths.draw(asked, 3, 5).tolist() == [5, 5, 5] and lengths.draw(asked, 1, 50).tolist() == [7]
    assert close(math.exp(asked.mean + asked.sigma**2 / 2), lengths.mean)
    assert close(math.exp(asked.mean + Z90 * asked.sigma), lengths.p90)


def test_costs_that_follow_from_hardware():
    scenario, costs = read_scenario(EXAMPLE)
    h, m = scenario.hardware, scenario.model
    forward = 2 * 3.3e9
    assert close(costs.decode_experts_s, 29e9 * 2 / (2 * 3.35e12 * h.memory_efficiency))
    assert close(costs.decode_kv_token_s, m.kv_bytes_per_token / (2 * 3.35e12 * h.memory_efficiency))
    assert close(costs.train_token_s, 4 * forward / (989e12 * h.train_efficiency)) and costs.log_probs_share == 0.25
    assert close(costs.decode_sequence_s, forward / (2 * 989e12 * h.decode_efficiency))
    assert costs.update_s == scenario.costs["update_s"]
    assert {setting.servers for setting in (scenario.setting(mode, 64) for mode in scenario.modes.values())} == {24, 32}


def test_a_fit_finds_what_was_planted_and_no_more(rng):
    columns = rng.uniform(1, 2, (20, 4))
    planted = np.where(rng.permutation(4) < 2, rng.uniform(1, 5, 4), 0)
    assert np.allclose(nonnegative(columns, columns @ planted), planted, rtol=1e-6, atol=1e-9)
    falling = columns[:, :2] @ [3, -1]
    assert (nonnegative(columns[:, :2], np.abs(falling)) >= 0).all()


def write_run(folder: Path, rng, costs: Costs, prompts: int, *, recorded: bool = True, **changes) -> Path:
    """A run that took as long as the simulation says."""
    count, limit = prompts * 4, 300
    setting = setting_of(samples_per_prompt=4, max_new_tokens=limit, prompt_tokens=10, tokens_per_micro_batch=2000)
    setting = replace(setting, **changes)
    lengths = [np.clip(rng.lognormal(4, 1, count), 1, limit).astype(int) for _ in range(10)]
    lines = []
    for i, (step, n) in enumerate(zip(simulate(setting, costs, lengths).steps, lengths, strict=True)):
        line = {f"time/{name}_s": getattr(step, f"{name}_s") for name in ("rollout", "log_probs", "train", "sync")}
        line |= {"step": i + 1, "time/other_s": step.other_s, "time/eval_s": 3.0, "time/step_s": step.step_s + 3}
        line |= {"tokens": step.tokens, "response/length": float(n.mean())}
        found = np.quantile(n, (0.1, 0.5, 0.9, 1), method="inverted_cdf").tolist()
        line |= {f"response/length_quantile/{q}": v for q, v in zip(("p10", "p50", "p90", "max"), found, strict=True)}
        lines.append(line)
        if recorded:
            save_trajectories(file_of(folder / "rollouts", i, 0), [trajectory(length) for length in n])
    config = {
        "name": folder.name,
        "steps": 10,
        "batch": {"prompts_per_step": prompts, "samples_per_prompt": 4, "tokens_per_micro_batch": 2000},
        "rollout": {"max_new_tokens": limit, "max_staleness": setting.max_staleness, "concurrency": UNLIMITED},
    }
    config["batch"]["updates_per_step"] = setting.updates_per_step
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def trajectory(length: int) -> Trajectory:
    fields = {"loss_mask": np.ones(length, bool), "rollout_log_probs": np.zeros(length, np.float32)}
    tokens = np.zeros(10 + length, np.int32)
    support = SamplingSupport().sampled()
    return Trajectory(
        prompt_id="p", group_id=0, tokens=tokens, prompt_length=10, fields=fields, finish_reason="stop", support=support
    )


def planted(rng) -> Costs:
    names = ("decode_base_s", "decode_sequence_s", "train_token_s", "micro_batch_s", "push_s", "other_s", "log_probs_s")
    values = rng.uniform(0.5, 1, 7) * [1e-2, 1e-3, 1e-3, 0.1, 0.2, 0.1, 0.1]
    return Costs(**dict(zip(names, values, strict=True)), log_probs_share=rng.uniform(0.2, 0.5))


def test_planted_costs_are_found_and_predict_other_runs(tmp_path, rng):
    costs = planted(rng)
    runs = [write_run(tmp_path / f"from{n}", rng, costs, n, scoring_passes=1, updates_per_step=2) for n in (3, 6, 12)]
    found = calibrate([read_measured(run) for run in runs])
    for name, value in asdict(costs).items():
        assert math.isclose(getattr(found, name), value, rel_tol=1e-5, abs_tol=1e-7), name
    other = read_measured(write_run(tmp_path / "other", rng, costs, 9, max_staleness=1))
    rows = compare(other, found)
    assert [row.part for row in rows] == ["step", "rollout", "log_probs", "train", "sync", "other"]
    assert all(math.isclose(row.measured, row.predicted, rel_tol=1e-4, abs_tol=1e-6) for row in rows)
    wrong = compare(other, replace(found, push_s=found.push_s + rows[0].measured))[0]
    assert wrong.error > 0.99


def test_a_run_ahead_of_its_trainer_says_what_sharing_costs(tmp_path, rng):
    costs = replace(planted(rng), overlap_slowdown=rng.uniform(1.1, 2.5))
    runs = [write_run(tmp_path / f"from{n}", rng, costs, n) for n in (3, 12)]
    ahead = write_run(tmp_path / "ahead", rng, costs, 6, max_staleness=1)
    found = calibrate([read_measured(run) for run in [*runs, ahead]])
    assert math.isclose(found.overlap_slowdown, costs.overlap_slowdown, rel_tol=1e-4)


def test_lengths_of_a_run_without_records(tmp_path, rng):
    run = read_measured(write_run(tmp_path / "run", rng, planted(rng), 16, recorded=False))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line, lengths in zip(lines, run.lengths, strict=True):
        assert len(lengths) == 64 and lengths.max() == line["response/length_quantile/max"] and lengths.min() >= 1
        assert abs(lengths.mean() - line["response/length"]) <= 1


def test_servers_are_those_that_answered(tmp_path, rng):
    """Behind a router, which is one address."""
    folder = write_run(tmp_path / "run", rng, planted(rng), 4, recorded=False)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["rollout"]["addresses"] = ["http://router:30000"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert read_measured(folder).setting.servers == 1  # a run of an earlier version does not say how many there were
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for counts, found in (([4.0] * 10, 4), ([1.0, 3.0] + [2.0] * 8, 2), ([4.0] * 5 + [3.0] * 5, None)):
        of_steps = [line | {"rollout/servers": count} for line, count in zip(lines, counts, strict=True)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_steps))
        if found:
            assert read_measured(folder).setting.servers == found
        else:
            with pytest.raises(UserError, match="3, 4 servers in its steps; measure a run in which none comes or goes"):
                read_measured(folder)


def test_the_command_prints_tables(tmp_path, rng, capsys):
    values = yaml.safe_load(EXAMPLE.read_text()) | {"gpus": [8, 16]}
    (tmp_path / "file.yaml").write_text(json.dumps(values))
    assert main(["simulate", str(tmp_path / "file.yaml")]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("8", "16", "sync", "one-step-off", "async"))
    costs = planted(rng)
    runs = [str(write_run(tmp_path / f"run{n}", rng, costs, n, recorded=False)) for n in (4, 20, 8)]
    assert main(["simulate", "--from", *runs[:2], "--compare", runs[2]]) == 0
    printed = capsys.readouterr().out
    assert "decode_sequence_s: " in printed and "run8" in printed and "predicted" in printed
    assert main(["simulate", str(tmp_path / "file.yaml"), "--from", runs[0]]) == 0


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"gpu": [8]}, ["unknown key 'gpu'", "'gpus'"]),
        ({"costs": {"push": 1}}, ["unknown key 'costs.push'", "'push_s'"]),
        ({"costs": {"push_s": -1}}, ["'costs.push_s'", "greater than or equal to 0", "-1"]),
        ({"hardware": None}, ["hardware and model go together"]),
        ({"hardware": None, "model": None, "costs": {}}, ["decoding takes no time", "decode_base_s"]),
        ({"lengths": {"mean": 100, "p90": 1000}}, ["lengths", "no lognormal", "2.27"]),
        ({"lengths": {"mean": 100}}, ["'lengths.p90'", "missing"]),
        ({"modes": {"sync": {"max_stale": 1}}}, ["unknown key 'modes.sync.max_stale'", "max_staleness"]),
        ({"modes": {"sync": {"colocate": True, "max_staleness": 1}}}, ["modes.sync", "max_staleness to 0"]),
        ({"gpus": [9]}, ["of 9 GPUs", "server_gpus"]),
        ({"gpus": []}, ["nothing to simulate"]),
    ],
)
def test_errors_of_a_file(tmp_path, capsys, change, fragments):
    values = yaml.safe_load(EXAMPLE.read_text()) | change
    (tmp_path / "file.yaml").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    assert main(["simulate", str(tmp_path / "file.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for fragment in fragments:
        assert fragment in said


def test_errors_of_runs(tmp_path, rng, capsys):
    def said(*arguments) -> str:
        assert main(["simulate", *map(str, arguments)]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    run = write_run(tmp_path / "run", rng, planted(rng), 4, recorded=False)
    ahead = write_run(tmp_path / "ahead", rng, planted(rng), 4, recorded=False, max_staleness=1)
    assert "name a FILE" in said() and "--from" in said()
    assert "missing.yaml" in said(tmp_path / "missing.yaml")
    assert "holds no run" in said("--from", tmp_path)
    assert "max_staleness: 0" in said("--from", ahead)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    assert "2 steps" in said("--from", run)
    (run / "metrics.jsonl").write_text("\n".join(lines).replace("time/train_s", "time/other") + "\n")
    assert "has no time/train_s" in said("--from", run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["rollout"]["program"] = "agent"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "rollout.program: agent is not modeled" in said("--compare", run, "--from", run)
