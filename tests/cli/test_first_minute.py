"""The first minute: help that says what there is, and errors of a config that are told before torch is imported."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.agents.programs import PROGRAMS
from megatron_rl.algorithms.advantages import ADVANTAGES
from megatron_rl.algorithms.losses import POLICY_LOSSES
from megatron_rl.checks import preflight
from megatron_rl.config.load import key_paths


def parsers() -> dict[str, argparse.ArgumentParser]:
    actions = cli.make_parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


@pytest.mark.parametrize("name", [None, *parsers()])
def test_every_command_and_argument_says_what_it_is(name):
    parser = parsers()[name] if name else cli.make_parser()
    assert (
        parser.description and parser.description.rstrip().endswith(".") and "make_parser" not in parser.format_help()
    )
    for action in parser._actions:
        assert action.help and action.help.strip(), action
    for word in parser.format_help().split():  # documents are in no installed package
        assert not word.startswith(("docs/", "tools/")) or name == "simulate"


def test_the_overview_begins_with_what_the_program_is_and_has_all_commands_once():
    text = cli.make_parser().format_help()
    first = text.split("\n\n")[1]
    assert first.startswith("megatron-rl trains language models by reinforcement learning")
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2:3].isalpha()]
    assert sorted(listed) == sorted(["COMMAND", *parsers()]) and set(parsers()) == set(cli.COMMANDS)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", parsers())
def test_the_function_of_every_command_is_there_and_gets_arguments_that_it_has(name):
    """Read and not imported: most would import torch."""
    command = cli.COMMANDS[name]
    module, _, function = command.function.partition(":")
    spec = importlib.util.find_spec(module)
    defined = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.FunctionDef)]
    [found] = [node for node in defined if node.name == function]
    assert set(command.passes) <= {action.dest for action in parsers()[name]._actions}
    if command.call is None:
        first = ["config"] if command.kind else []
        assert len(first) + len(command.passes) == len(found.args.args)
        assert [argument.arg for argument in found.args.args][: len(first)] == first


def test_the_help_of_eval_names_the_key_of_likelihoods():
    assert "eval.likelihood: true" in " ".join(parsers()["eval"].format_help().split())
    assert "eval.likelihood" in key_paths()


def test_the_program_lists_its_keys(capsys):
    assert cli.main(["keys"]) == 0
    listed = [line.split(":")[0].split("   ")[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert sorted(key for key in listed if ".NAME." not in key) == sorted(key_paths())
    assert cli.main(["keys", "checkpoint.keep"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("checkpoint.keep: 2") and "newest complete checkpoints" in lines[1]
    assert [line for line in lines if line.startswith("checkpoint.keep_best")]
    assert cli.main(["keys", "checkpoint.kep"]) == 2
    assert "no key begins with 'checkpoint.kep'; did you mean 'checkpoint.keep'?" in capsys.readouterr().err


def test_the_names_that_are_looked_at_without_torch_are_those_that_are_built_in():
    assert {*preflight.LOSSES} == {*POLICY_LOSSES} and {*preflight.PROGRAMS} == {*PROGRAMS}
    assert {*preflight.ADVANTAGES} == {*ADVANTAGES, "tilt", *preflight.OF_TOKENS}


RUNS = [name for name, command in cli.COMMANDS.items() if command.overrides]
MORE = {
    "launch": ["--nodes", "1", "--gpus-per-node", "1", "--dry-run"],
    "plan": ["--gpus", "1"],
    "prune": ["--prune.sparsity", "2:4"],
}
WRONG = {
    "a folder that is missing": (["--model.path", "./nowhere"], "model.path = ./nowhere: does not exist"),
    "no model": (["--model.path", ""], "model.path is empty"),
    "a folder without config.json": (["--model.path", "empty"], "has no config.json"),
    "an id that cannot be had": (["--model.path", "some/model"], "some/model is not, or not wholly, in the cache"),
    "a key that there is not": (["--model.paht", "x"], "unknown key 'model.paht'; did you mean 'model.path'"),
    "a value of another type": (["--steps", "many"], "'steps' = 'many'"),
    "a value that is none of the choices": (["--precision.train", "fp16"], "'precision.train' = 'fp16'"),
    "a number out of range": (["--optimizer.lr", "-1"], "'optimizer.lr' = -1"),
    "an old name": (["--rollout.replay", "x"], "it is called 'rollout.load' now"),
    "sizes that do not divide": (
        ["--parallel.tensor", "3"],
        "parallel.tensor x pipeline x context = 3 does not divide",
    ),
    "experts of a server": (
        ["--rollout.server.tensor", "4", "--rollout.server.expert", "3"],
        "does not divide rollout.server",
    ),
    "sequences that do not fit": (
        ["--batch.tokens_per_micro_batch", "64"],
        "does not fit into batch.tokens_per_micro_batch",
    ),
    "pass@k of too few": (["--eval.pass_at", "[9]", "--eval.samples", "4"], "eval.pass_at: pass@9 needs"),
    "unpruned without pruning": (["--eval.unpruned", "true"], "eval.unpruned without pruning.enabled"),
    "a truncation that nobody names": (["--rollout.sampling.top_p", "0.9"], "top_p = 0.9 with top_k = -1"),
    "expert parallelism by gathering": (
        ["--model.moe_dispatcher", "allgather", "--parallel.expert", "2", "--nproc", "2"],
        "model.moe_dispatcher = allgather",
    ),
}
"""Wrong words for any command."""
OF_COMMANDS = {
    "train": {
        "a truncation without a bound": (
            ["--correction.mode", "truncate"],
            "mode 'truncate' needs high; set correction.high",
        ),
        "bounds that cross": (
            ["--correction.mode", "mask", "--correction.low", "2", "--correction.high", "0.5"],
            "low = 2 is above high = 0.5",
        ),
        "a level of nothing": (["--correction.level", "sequence"], "correction.level = sequence does nothing"),
        "a misspelled loss": (["--algorithm.loss", "gsop"], "there is no loss 'gsop'; did you mean 'gspo'"),
        "a misspelled advantage": (["--algorithm.advantage", "grop"], "no advantage 'grop'; did you mean 'grpo'"),
        "a group of one": (["--batch.samples_per_prompt", "1"], "leaves no other response to compare with"),
        "gae's key": (["--algorithm.lam", "0.5"], "algorithm.lam = 0.5 does nothing"),
        "staleness without correction": (["--rollout.max_staleness", "1"], "without a correction"),
        "a program that there is not": (
            ["--rollout.program", "agnet"],
            "no rollout program 'agnet'; did you mean 'agent'",
        ),
        "a hook that there is not": (["--hooks", "nowhere:Hook"], "there is no module 'nowhere'"),
        "on-policy of several": (
            ["--algorithm.on_policy", "true", "--batch.updates_per_step", "2"],
            "algorithm.on_policy:",
        ),
        "a teacher's key": (["--distillation.mix", "0.3"], "distillation.mix = 0.3 does nothing"),
        "an adapter's key": (["--lora.alpha", "8"], "lora.alpha = 8 does nothing without lora.rank"),
        "VP2O's key": (["--vp2o.repulsion", "0.2"], "vp2o.repulsion = 0.2 does nothing without vp2o.enabled"),
        "a reward model without a folder": (["--rewards.models.liked.scale", "2"], "has neither a path nor an address"),
        "a reward model that is missing": (
            ["--model.path", "there", "--rewards.models.liked.path", "./no"],
            "rewards.models.liked.path = ./no: does not",
        ),
        "a critic that is missing": (
            ["--model.path", "there", "--algorithm.advantage", "gae", "--critic.path", "./no"],
            "critic.path = ./no: does not exist",
        ),
    },
    "dpo": {"kto's key": (["--dpo.desirable_weight", "2"], "dpo.desirable_weight = 2 does nothing")},
    "reward": {"a list's key": (["--reward_model.top", "2"], "reward_model.top = 2 does nothing")},
    "prune": {"nothing": (["--prune.sparsity", "none"], "prune removes nothing")},
    "rollout": {
        "no demonstrations": (
            ["--rollout.demonstrations.min_tokens", "3"],
            "does nothing without rollout.demonstrations.min_reward",
        )
    },
    "certify": {"of nothing": (["--prompts", "0"], "certify: --prompts 0")},
    "launch": {"no time": (["--time", "00:01:00"], "launch: --time 00:01:00 leaves less time to train")},
}
DATA = {
    "a file that is missing": (
        ["--data.task", "file", "--data.path", "no.jsonl"],
        "data.path: there is no file no.jsonl",
    ),
    "a data set's id": (
        ["--data.task", "file", "--data.path", "openai/gsm8k"],
        "for a data set of the Hugging Face hub",
    ),
    "no data": (["--data.task", "file"], "data.task: file needs data.path"),
    "a misspelled task": (["--data.task", "gsm8"], "there is no task 'gsm8'; did you mean 'gsm8k'"),
}
"""Wrong words for commands that read data: all but plan and launch."""
ASK = """
import contextlib, io, json, sys
from megatron_rl.cli import main
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try: status = main(arguments)
        except SystemExit as error: status = f"exit {error.code}"
    print(json.dumps([status, said.getvalue(), "torch" in sys.modules]), flush=True)
"""


def test_wrong_configs_are_told_in_one_line_and_without_torch(tmp_path):
    """Every command with a config tells them, one after the other in a process that has imported nothing before."""
    for folder in ("empty", "there"):
        (tmp_path / folder).mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("data: {task: number_sorting}\nmodel: {path: ./nowhere}\n")
    cases = []
    for command in RUNS:
        scheduler = ["slurm"] if command == "launch" else []
        more = DATA if command not in ("plan", "launch") else {}
        for changes, said in (WRONG | more | OF_COMMANDS.get(command, {})).values():
            if "--nproc" in changes and command in ("plan", "launch"):
                continue
            given = [command, *scheduler, "config.yaml", *MORE.get(command, []), *changes]
            cases.append((given, said))
        cases.append(([command, *scheduler, "none.yaml", *MORE.get(command, [])], "config none.yaml: No such file"))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    for name in ("WORLD_SIZE", "RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps([given for given, _ in cases]),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env=environment,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases), done.stderr[-2000:]
    assert len(cases) > 10 * len(RUNS)
    wrong = [
        (given, status, said)
        for (given, wanted), (status, said, torch) in zip(cases, found, strict=True)
        if status != 2 or torch or wanted not in said or len(said.splitlines()) != 1
    ]
    assert not wrong


def test_the_overview_needs_no_config_and_a_plan_no_megatron():
    """Whose imports would be most of the seconds until their first answer."""
    code = (
        "import sys, megatron_rl.cli; print(*{'pydantic', 'megatron_rl.config'} & {*sys.modules})\n"
        "import megatron_rl.checks.fit; print(*{'megatron.core', 'megatron.bridge'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "\n\n", done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "/", "a/", "/a", "a//b", "a/../b", "a ", " a", "a/ b", "a\tb", "-a", "a\n"]
)
def test_names_that_are_no_folder_are_refused(name, tmp_path, capsys):
    """On the command line and in the file: a run whose name is empty would be the folder of all runs."""
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: ./nowhere}\n")
    assert cli.main(["plan", str(file), f"--name={name}"]) == 2
    said = capsys.readouterr().err
    assert "'name' = " in said and "a run's name has" in said and len(said.splitlines()) == 1
    file.write_text(json.dumps({"name": name, "model": {"path": "./nowhere"}}))
    assert cli.main(["plan", str(file)]) == 2
    assert "'name' = " in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["config.yaml"]


def test_a_plan_needs_no_keys_of_servers(tiny_model, tmp_path, capsys):
    """It is made where the run is not; the run itself asks for a key before anything is started."""
    file = tmp_path / "config.yaml"
    scorer = {"address": "http://127.0.0.1:1", "path": str(tiny_model("qwen3")), "api_key": "env:NOT_SET_HERE"}
    tree = {"model": {"path": str(tiny_model("qwen3"))}, "rewards": {"models": {"liked": scorer}}}
    tree |= {"data": {"task": "number_sorting"}, "runs_dir": str(tmp_path / "runs")}
    file.write_text(json.dumps(tree))
    assert cli.main(["plan", str(file), "--gpus", "1"]) == 0, capsys.readouterr().err
    assert cli.main(["train", str(file)]) == 2
    assert "rewards.models.liked.api_key: " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_plan_counts_a_teacher(tiny_model, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    model = str(tiny_model("qwen3"))
    tree = {"model": {"path": model}, "data": {"task": "number_sorting"}, "distillation": {"teacher": model}}
    file.write_text(json.dumps(tree))
    assert cli.main(["plan", str(file), "--gpus", "1", "--memory", "80"]) == 0, capsys.readouterr().err
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("teacher ")]
    assert "GB" in said and "teacher of distillation.teacher" in said


@pytest.mark.parametrize("name", ["convert", "same", "2", "a b"])
def test_the_processes_of_a_conversion_get_folders_and_keep_their_other_words(name, tmp_path, monkeypatch):
    """SOURCE may be called as the command, an argument's value or OUT is; a folder for it stands in its place alone."""
    started = []
    monkeypatch.setattr(cli, "torchrun", lambda nproc, words: started.append((nproc, words)) or 0)
    monkeypatch.setattr("megatron_rl.data.hub.as_folder", lambda text, key, wanted=(): f"/cache/{text}")
    for base in ([], ["--base", "own/base"]):
        assert cli.main(["convert", name, name, *base, "--nproc", "2"]) == 0
        source, out, *rest = started.pop()[1][1:]
        assert (source, out) == (f"/cache/{name}", name)
        assert rest == [*(["--base", "/cache/own/base"] if base else []), "--nproc", "2"]
