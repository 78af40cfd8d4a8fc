"""Ids of the Hugging Face hub where a model's folder is wanted: what is one, what is downloaded, what a run keeps to."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import constants

from megatron_rl.checks.model_folders import _replaced as replaced
from megatron_rl.checks.model_folders import (
    check_alike,
    model_places,
    overrides_of,
    read_places,
    with_folders,
    with_ids,
)
from megatron_rl.config import Config
from megatron_rl.config.load import build_config, load_config, parse_overrides, to_yaml
from megatron_rl.config.reference import all_keys
from megatron_rl.data import hub as ids
from megatron_rl.errors import UserError
from tests.hub import Repo, cache_of, hub
from tests.program import _main as program
from tests.ranks import fork

FIRST, SECOND = "a" * 40, "b" * 40


def outside(home: Path, *, url: str = "http://127.0.0.1:9", offline: bool = False) -> dict[str, str]:
    """The environment of a process with its own cache. Port 9 of this machine answers nobody."""
    own = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": str(int(offline)), "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own


def folders(home: Path, *texts: str, wanted: str = "MODEL", **where) -> list[str]:
    """Folders or errors that `as_folder` makes of the texts in a new process. It imports no torch."""
    code = (
        "import json, sys\nfrom megatron_rl.data import hub\nfrom megatron_rl.errors import UserError\n"
        "def of(text):\n    try: return hub.as_folder(text, 'key', getattr(hub, sys.argv[1]))\n"
        "    except UserError as error: return str(error)\n"
        "found = [of(text) for text in sys.argv[2:]]\nassert 'torch' not in sys.modules\nprint(json.dumps(found))"
    )
    command = [sys.executable, "-c", code, wanted, *texts]
    done = subprocess.run(command, capture_output=True, text=True, env=outside(home, **where), timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None),
        ("a/b@main", "a/b", "main"),
        ("a/b@refs/pr/3", "a/b", "refs/pr/3"),
        (f"a-b/c_d.e@{FIRST}", "a-b/c_d.e", FIRST),
    ],
)
def test_what_is_an_id(text, repo, revision):
    found = ids.hub_id(text)
    assert found is not None and (found.repo, found.revision) == (repo, revision)
    assert str(found) == text and found.pinned == (revision == FIRST)


@pytest.mark.parametrize(
    "text",
    ["", ".", "x", "./x", "../x", "/x", "/x/y", "~/x", "x/", "a/b/c", "runs/x/hf", "a//b", "a/b@", "a/b@ c", "-a/b", "a/b.git",
     "a/--b", "a b/c", "a/b@/c", "a/" + "x" * 97, "a@b/c", "http://a/b"],
)  # fmt: skip
def test_what_is_a_folder_that_is_missing(text, monkeypatch):
    """It is told at once: nobody is asked."""
    monkeypatch.setattr(ids, "_snapshot", lambda *_: pytest.fail("looked up"))
    if text not in ("", "."):
        with pytest.raises(UserError, match=r"config: key = .*does not exist; give a Hugging Face folder, or an id"):
            ids.as_folder(text, "config: key")
    assert ids.hub_id(text) is None


def test_a_folder_goes_before_an_id_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert ids.hub_id("some/model") is None and ids.as_folder("some/model", "key") == "some/model"
    (tmp_path / "some" / "file").write_text("")
    with pytest.raises(UserError, match="key = some/file: is not a folder"):
        ids.as_folder("some/file", "key")


def test_a_cache_gives_revisions_without_a_network(tiny_model, tmp_path):
    """It is laid out as huggingface_hub has it: branches are files in refs, and a commit is its own name."""
    cache, model = tmp_path / "hub", tiny_model("qwen3")
    other = tiny_model("qwen3", "--seed", "1")
    first = cache_of(cache, "some/model", model, FIRST, refs=("main", "v1"))
    second = cache_of(cache, "some/model", other, SECOND, refs=("v2",))
    asked = ("some/model", "some/model@v1", "some/model@v2", f"some/model@{SECOND}")
    wanted = [str(first), str(first), str(second), str(second)]
    assert folders(tmp_path, *asked, offline=True) == wanted
    assert folders(tmp_path, *asked) == wanted  # no answer: they are taken from the cache
    (second / "model.safetensors").unlink()
    lost = folders(tmp_path, "some/model@v3", "some/other", f"some/model@{SECOND}", offline=True)
    for line in lost:
        assert "is not, or not wholly, in the cache" in line and "HF_HUB_OFFLINE" in line and "\n" not in line
    assert folders(tmp_path, f"some/model@{SECOND}", wanted="CONFIG", offline=True) == [str(second)]
    [line] = folders(tmp_path, f"some/model@{SECOND}")
    assert "http://127.0.0.1:9 cannot be reached" in line and "not wholly, in the cache" in line


REFUSED = {
    "some/gated": r"some/gated is gated: accept its terms at http.*/some/gated, and log in .* or set HF_TOKEN",
    "some/none": r"there is no some/none on http.*, or it is private: compare the name; .* HF_TOKEN",
    "some/model@v9": r"some/model has no revision 'v9'",
    "some/ill": r"answers with status 500 for some/ill, and some/ill is not, or not wholly, in the cache",
    "some/pickles": r"some/pickles has no \.safetensors files, and other formats of weights \(pickles\) are never read",
}


def test_what_the_hub_refuses_is_one_line(tiny_model, tmp_path):
    """From the program, without torch: the key, both things that the text may mean, and the remedy."""
    model, pickles = tiny_model("qwen3"), tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "pytorch_model.bin").write_bytes(b"never read")
    (pickles / "config.json").write_text("{}")
    repos = {"some/model": Repo(model), "some/gated": Repo(model, gated=True), "some/ill": Repo(model, broken=500)}
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{task: number_sorting}}\nruns_dir: {tmp_path}\n")
    code = (
        "import sys\nfrom megatron_rl.cli import main\nfor repo in sys.argv[2:]:\n"
        "    print(main(['train', sys.argv[1], '--model.path', repo]), 'torch' in sys.modules)"
    )
    with hub(repos | {"some/pickles": Repo(pickles)}) as served:
        command = [sys.executable, "-c", code, str(config), *REFUSED]
        environment = outside(tmp_path / "home", url=served.url)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.stdout == "2 False\n" * len(REFUSED), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    for line, (repo, said) in zip(lines, REFUSED.items(), strict=True):
        start = f"megatron-rl: error: config: model.path = {repo}: "
        assert line.startswith(start) and line.endswith(f"(there is no folder {repo} here either)")
        assert re.search(said, line), line


def test_weights_config_and_tokenizer_are_downloaded_once_and_nothing_else(tiny_model, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model("qwen3").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "training_args.pt", "README.md"):
        (model / name).write_text("not wanted")
    commits = {"main": FIRST}
    with hub({"some/model": Repo(model, commits)}) as served:

        def got(*texts: str, **more) -> tuple[list[str], list[str]]:
            served.asked.clear()
            return folders(tmp_path, *texts, url=served.url, **more), [a for a in served.asked if "harness" not in a]

        def files(asked: list[str]) -> list[str]:
            return sorted(a.rpartition("/")[2] for a in asked if a.startswith("GET") and "/resolve/" in a)

        [config_alone], asked = got("some/model", wanted="CONFIG")
        assert files(asked) == ["config.json"] and os.listdir(config_alone) == ["config.json"]
        [line], _ = got(f"some/model@{FIRST}", offline=True)
        assert "not wholly, in the cache" in line  # of a plan there is config.json alone
        [folder], asked = got("some/model")
        wanted = sorted(file.name for file in tiny_model("qwen3").iterdir())
        assert files(asked) == sorted({*wanted} - {"config.json"}) and sorted(os.listdir(folder)) == wanted
        assert all((Path(folder) / name).read_bytes() == (model / name).read_bytes() for name in wanted)
        [again], asked = got("some/model")
        assert again == folder and asked and not files(asked)
        [pinned], asked = got(f"some/model@{FIRST}")
        assert pinned == folder and not asked  # a commit is what it is
        commits["main"] = SECOND
        [moved], asked = got("some/model")
        assert moved == folder.replace(FIRST, SECOND) and files(asked) == []  # the blobs of the same files are there


def test_processes_of_a_machine_download_each_file_once(tiny_model, tmp_path):
    model = tiny_model("qwen3")
    with hub({"some/model": Repo(model)}) as served:
        code = "from megatron_rl.data.hub import as_folder; print(as_folder('some/model', 'key'))"
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=outside(tmp_path, url=served.url) | {"LOCAL_RANK": str(rank)},
            )
            for rank in range(3)
        ]
        outs = [process.communicate(timeout=120) for process in started]
        assert len({out.splitlines()[-1] for out, _ in outs}) == 1
        bodies = [a for a in served.asked if a.startswith("GET") and "/resolve/" in a]
        assert len(bodies) == len({*bodies}) == len(list(model.iterdir()))
        assert [bool(errors.strip()) for _, errors in outs][1:] == [False, False]  # the first says what it does


FREE = 10**9


@pytest.mark.parametrize(
    ("size", "begun", "fits"), [(FREE - 1, False, True), (FREE + 1, False, False), (FREE + 1, True, True)]
)
def test_a_model_that_is_larger_than_the_disk_is_refused_before_its_download(size, begun, fits, tmp_path, monkeypatch):
    """But for one of which a part is there: how much is missing is not known."""
    monkeypatch.setattr(ids.shutil, "disk_usage", lambda _: SimpleNamespace(free=FREE))
    sizes = {"1.safetensors": size // 2, "2.safetensors": size - size // 2, "there.safetensors": 10 * FREE}
    files = [
        SimpleNamespace(filename=name, file_size=part, will_download=name != "there.safetensors")
        for name, part in sizes.items()
    ]
    blobs = tmp_path / "hub" / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    if begun:
        (blobs / "x.incomplete").touch()
    refusal = pytest.raises(UserError, match=r"needs 1\.0 GB more, and the disk of .* has 1\.0 GB: .* set HF_HOME")
    with nullcontext() if fits else refusal:
        ids._announce(ids.HubId("some/model"), files, ids.MODEL, tmp_path / "hub")


@pytest.mark.parametrize(
    ("error", "said", "unreachable"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the disk of /cache is full: make room, or set HF_HOME",
            False,
        ),
        (PermissionError(errno.EACCES, "denied", "/cache/x"), "/cache/x cannot be written: set HF_HOME", False),
        (httpx.ConnectTimeout("timed out"), "cannot be reached (timed out)", True),
        (httpx.ReadError("peer closed\nconnection"), "cannot be reached (peer closed connection)", True),
        (RuntimeError("bad data"), "some/model cannot be downloaded (bad data)", False),
    ],
)
def test_other_errors_of_a_download(error, said, unreachable):
    problem, found = ids._problem(error, ids.HubId("some/model"), Path("/cache"))
    assert said in problem and found == unreachable and "\n" not in problem


# -- configs -----------------------------------------------------------------------------------------------------------


def everywhere(text) -> Config:
    """A config with a model in all places that may have one: text(number) gives each."""
    numbers = iter(range(99))
    models = {name: {"path": text(next(numbers))} for name in ("liked", "a.b")}
    flags = ["--speculative-draft-model-path", text(next(numbers)), "--log-level", "info"]
    return build_config(
        {
            "model": {"path": text(next(numbers))},
            "lora": {"rank": 1, "path": text(next(numbers))},
            "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.1, "reference": text(next(numbers))}},
            "critic": {"path": text(next(numbers))},
            "dpo": {"reference": text(next(numbers))},
            "distillation": {"teacher": text(next(numbers))},
            "rewards": {"models": models},
            "rollout": {"server": {"extra_args": flags}},
        }
    )


def test_every_key_that_names_a_folder_of_a_model_takes_an_id():
    named = {
        key for key, _, _, meaning in all_keys() if meaning.startswith(("Hugging Face folder", "Folder in PEFT's"))
    }
    places = model_places(everywhere(lambda number: f"some/model{number}"))
    found = {".".join(map(str, place)) for place in places}
    assert named - {"rewards.models.NAME.path"} <= found
    assert {"rewards.models.liked.path", "rewards.models.a.b.path", "rollout.server.extra_args.1"} <= found
    assert len({*places.values()}) == len(places) == len(named) + 2


@pytest.mark.parametrize(
    ("reader", "sections"),
    [
        ("train", {"model", "lora", "algorithm", "critic", "distillation", "rewards", "rollout"}),
        ("sft", {"model", "lora", "distillation"}),
        ("reward", {"model", "lora"}),
        ("dpo", {"model", "lora", "dpo"}),
        ("sample", {"model", "rewards", "rollout"}),
        ("prune", {"model"}),
        ("score", {"model"}),
        ("quantize", {"model"}),
        ("attribution", {"model", "lora"}),
        ("server", {"model", "lora", "rollout"}),
    ],
)
def test_what_is_not_read_is_not_looked_for(reader, sections):
    config = everywhere(lambda number: f"/nowhere/{number}")
    assert {place[0] for place in read_places(config, reader)} == sections
    idle = build_config(
        {"model": {"path": "a/b"}, "critic": {"path": "a/c"}, "algorithm": {"kl": {"reference": "a/d"}}}
    )
    assert {place[0] for place in read_places(idle, "train")} == {"model"}


def test_a_scorer_behind_an_address_is_known_here_by_its_texts_alone(tiny_model, tmp_path):
    """The model itself lies where its server is: here its tokenizer is read, to say what is scored."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "tokenizer.json").write_text("{}")
    tree = {"model": {"path": str(tiny_model("qwen3"))}, "rewards": {"models": {"a": {"path": str(texts)}}}}
    with pytest.raises(UserError, match=r"has no config.json \(config: rewards.models.a.path\)"):
        with_folders(build_config(tree), "train")
    tree["rewards"]["models"]["a"]["address"] = "http://127.0.0.1:1"
    assert with_folders(build_config(tree), "train").rewards.models["a"].path == str(texts)


def test_what_the_command_line_says_of_models_gives_the_same_models(tmp_path):
    """So the processes that --nproc starts, and a job's, look nothing up."""
    file = tmp_path / "config.yaml"
    for drawn in range(5):
        chance = random.Random(drawn)
        before = everywhere(lambda number: f"some/model{number}")
        changed = {number for number in range(9) if chance.random() < 0.5}
        after = everywhere(lambda number: f"/cache/{number} ü" if number in changed else f"some/model{number}")  # noqa: B023
        file.write_text(to_yaml(before))
        assert load_config(file, overrides_of(before, after)) == after
    assert overrides_of(before, before) == [] and parse_overrides([]) == {}


def test_a_runs_config_has_ids_and_commits(tiny_model, tmp_path, monkeypatch):
    """And what is read again is the commit, wherever the branch is by then; another revision that is named is taken."""
    cache, model = tmp_path / "hub", tiny_model("qwen3")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache_of(cache, "some/model", model, FIRST)
    plain = {"runs_dir": str(tmp_path), "name": "run", "model": {"path": "some/model"}}
    found = with_folders(build_config(plain), "sft")
    assert found.model.path == str(cache / "models--some--model" / "snapshots" / FIRST)
    kept = with_ids(found)
    assert kept.model.path == f"some/model@{FIRST}" and with_folders(kept, "sft") == found
    cache_of(cache, "some/model", model, SECOND)  # main is another commit now
    other = build_config(plain | {"name": "other"})
    assert with_folders(other, "sft").model.path.endswith(SECOND)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(kept))
    assert with_folders(build_config(plain), "sft") == found
    moved = with_folders(build_config(plain | {"model": {"path": "some/model@main"}}), "sft")
    assert moved.model.path.endswith(SECOND)
    for file in (cache / "models--some--model" / "snapshots" / FIRST).iterdir():
        file.unlink()
    with pytest.raises(UserError, match=rf"some/model@{FIRST}: .*run has used that commit so far: .* some/model@main"):
        with_folders(build_config(plain), "sft")
    (tmp_path / "run" / "config.yaml").write_text("model: [")  # as a full disk leaves it
    assert with_folders(build_config(plain), "sft").model.path.endswith(SECOND)
    elsewhere = str(tmp_path / "copy" / "models--some--model" / "snapshots" / FIRST)
    assert with_ids(build_config({"model": {"path": elsewhere}})).model.path == elsewhere


def test_processes_that_found_different_commits_are_told():
    """As on two machines whose caches were filled at different times."""
    first = everywhere(lambda number: f"some/model{number}@{FIRST}")
    check_alike(model_places(first), model_places(first))
    for place in model_places(first):
        text = model_places(first)[place]
        other = replaced(first, place, text.replace(FIRST, SECOND))
        with pytest.raises(UserError, match=f"{SECOND}, and the first process {text}; name one of the two commits"):
            check_alike(model_places(other), model_places(first))


def in_cache(cache: str, arguments: tuple[str, ...], log: Path) -> None:
    """The program in a forked process, whose huggingface_hub was imported with another cache."""
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = cache, True
    program(arguments, {**os.environ, "OMP_NUM_THREADS": "1"}, log, log, refuse_ties=False)


@pytest.mark.slow
def test_a_run_learns_from_what_was_downloaded_and_goes_on_with_the_same_commit(tiny_model, tmp_path):
    rows = [{"prompt": f"{n} + 1 =", "response": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{path: some/model}}\ndata: {{path: {tmp_path / 'rows.jsonl'}}}\nruns_dir: {tmp_path}\nname: run\n"
        "batch: {prompts_per_step: 2, tokens_per_micro_batch: 64}\nrollout: {context_length: 64, max_new_tokens: 8}\n"
        "precision: {train: fp32, rollout: fp32}\neval: {prompts: 0}\nlogging: {trackers: []}\n"
    )
    commits = {"main": FIRST}
    with hub({"some/model": Repo(tiny_model("qwen3"), commits)}) as served:
        folders(tmp_path, "some/model", url=served.url)
        for steps in (1, 2):
            log = tmp_path / f"log{steps}"
            process = fork(in_cache, str(tmp_path / "hub"), ("sft", str(config), "--steps", str(steps)), log)
            process.join(200)
            assert process.exitcode == 0, log.read_text()[-3000:]
            assert f"path: some/model@{FIRST}" in (tmp_path / "run" / "config.yaml").read_text()
            commits["main"] = SECOND
            folders(tmp_path, "some/model", url=served.url)  # somebody else gets the newer one
    assert "resumed at step 1" in log.read_text() and "config keys that changed" not in log.read_text()
