"""Secrets of a config: references are read where they are needed, and what is written out is shown nowhere."""

from __future__ import annotations

import json
import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

import pytest

from megatron_rl.config.load import build_config, load_config, parse_overrides, parse_yaml, to_yaml
from megatron_rl.credentials import HIDDEN, command_line, hidden, hide, key_of, key_of_folder, read
from megatron_rl.errors import UserError
from megatron_rl.report.page import write_report
from megatron_rl.report.status import status_of
from megatron_rl.run.run_lock import NAME, lock
from megatron_rl.servers.external import server_of
from megatron_rl.servers.scores import ask_all
from megatron_rl.tools.mcp import Server


@pytest.fixture
def secret() -> str:
    return f"SECRET{secrets.token_hex(4)}"


def test_references_are_read_and_kept(tmp_path, monkeypatch, secret):
    monkeypatch.setenv("OF_THIS_TEST", secret)
    (tmp_path / "key").write_text(f"{secret}\n")
    for reference in ("env:OF_THIS_TEST", f"file:{tmp_path}/key"):
        assert read(reference, "x") == key_of(reference, "x") == secret
        tree = {"env": {"KEY": reference}, "api_key": reference}
        assert hidden(tree) == tree and hide(f"--rollout.api_key={reference}").endswith(reference)
    assert key_of(None, "x") == "" and read("plain", "x") == "plain"
    for missing, why in (
        ("env:NOT_SET_HERE", "the environment variable NOT_SET_HERE is not set"),
        (f"file:{tmp_path}/none", "none cannot be read"),
        (f"file:{tmp_path}", "cannot be read"),
        ("file:a\0b", "cannot be read"),
    ):
        with pytest.raises(UserError, match=f"config: some.key: .*{why}"):
            read(missing, "some.key")


@pytest.mark.parametrize("text", ["", "-begins", "two words", "line\nbreak", "\u00fcmlaut", "\x1b[31m"])
def test_keys_that_no_header_or_command_line_holds_are_refused(tmp_path, text):
    (tmp_path / "key").write_text(text)
    with pytest.raises(UserError, match=r"config: rollout.api_key: the key must not be empty or begin with"):
        key_of(f"file:{tmp_path}/key", "rollout.api_key")


def test_a_secret_that_is_written_out_is_shown_nowhere(secret, tmp_path, monkeypatch):
    servers = {
        "a": {
            "command": "npx",
            "args": ["--api-key", f"sk-{secret}", f"--token={secret}"],
            "env": {"K": secret, "N": 5},
        },
        "b": {"url": f"https://user:{secret}@host/mcp?token={secret}"},
    }
    config = build_config(
        {
            "model": {"path": "x"},
            "agent": {"mcp_servers": servers},
            "rollout": {"addresses": [f"http://user:{secret}@host:1"]},
            "runs_dir": str(tmp_path),
        }
    )
    assert secret not in to_yaml(config) and to_yaml(config).count(HIDDEN) >= 6
    words = ["train", "c.yaml", "--agent.mcp_servers", str(servers), f"--agent.mcp_servers.a={servers}"]
    words += ["--rollout.api_key", secret, f"--rewards.models.x.api_key={secret}", "--steps", "3"]
    assert secret not in command_line(words) and command_line(words).endswith("--steps 3")
    monkeypatch.setattr(sys, "argv", ["megatron-rl", *words])
    with lock(tmp_path) or pytest.fail("another process writes there"):
        assert secret not in (tmp_path / NAME).read_text()


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("model", {"path": "/models/hf_checkpoints/sk-small"}),
        ("data", {"template": "Each token counts. The secret word: {prompt}, and the key: 5", "answer_key": "answer"}),
        ("agent", {"tool_options": {"x": {"eos_token": "</s>", "max_tokens": 5, "label_key": "a", "keys": ["b"]}}}),
        ("agent", {"mcp_servers": {"w": {"command": "npx", "args": ["--tokens", "5", "a/token/b", "--keyring"]}}}),
    ],
)
def test_what_is_no_secret_is_kept(section, values):
    config = build_config({"model": {"path": "x"}, "name": "secret run", section: values})
    assert build_config(parse_yaml(to_yaml(config))) == config
    assert command_line(["--data.answer_key=answer", "--rollout.max_new_tokens=5"]).endswith(
        "answer --rollout.max_new_tokens=5"
    )


@pytest.mark.parametrize(
    "found",
    [
        {"token": "S"},
        {"OPENAI_API_KEY": "S"},
        {"JUDGE_KEY": "S"},
        {"accessToken": "S"},
        {"db-password": "S"},
        {"client_secret": ["S"]},
        {"Authorization": "Bearer S"},
        {"credentials": {"user": "S"}},
        {"args": ["--api-key", "S"]},
        {"args": ["-e", "API_KEY=S"]},
        {"args": ["--header", "Authorization: Bearer S"]},
        {"args": "serve --token S --port 5"},
        {"url": "https://host/mcp?api_key=S&x=1"},
        {"url": "wss://user:S@host"},
    ],
)
def test_secrets_are_known_by_their_names(found, secret):
    tree = json.loads(json.dumps({"search": found}).replace('S"', f'{secret}"').replace("=S", f"={secret}"))
    tree = json.loads(json.dumps(tree).replace("token S", f"token {secret}").replace(":S@", f":{secret}@"))
    assert secret in str(tree)
    for config in ({"agent": {"tool_options": tree}}, {"data": {"options": tree}}, {"agent": {"mcp_servers": tree}}):
        shown = to_yaml(build_config({"model": {"path": "x"}, **config}))
        assert secret not in shown and HIDDEN in shown


@pytest.mark.slow
def test_a_run_of_before_shows_no_secrets(secret, tmp_path):
    (tmp_path / "config.yaml").write_text(f"agent: {{mcp_servers: {{w: {{env: {{K: {secret}}}}}}}}}\nsteps: 3\n")
    (tmp_path / NAME).write_text(f"process 1 on host: megatron-rl train c.yaml --w.api-key={secret}\n")
    report = write_report(tmp_path).read_text()
    assert secret not in report and "&lt;hidden&gt;" in report
    assert secret not in json.dumps(asdict(status_of(tmp_path)))


def test_errors_show_no_secrets(secret, tmp_path):
    def message(call) -> str:
        with pytest.raises(UserError) as error:
            call()
        return str(error.value)

    file = tmp_path / "c.yaml"
    file.write_text(f"- token: {secret}\n")
    broken = {
        "quote": f'agent: {{mcp_servers: {{w: {{env: {{K: "{secret}\n',
        "bracket": f"agent: {{mcp_servers: {{w: {{env: {{K: {secret}, L: [}}}}}}}}}}\n",
        "colon": f"a: {secret}: b\n",
        "object": f"a: !!python/object {secret}\n",
        "no mapping": secret,
    }
    for name, text in broken.items():
        (tmp_path / name).write_text(text)
    said = [
        *(message(partial(load_config, tmp_path / name)) for name in broken),
        message(lambda: server_of(f"http://user:{secret}@127.0.0.1")),
        message(lambda: server_of(f"user:{secret}@127.0.0.1:1")),
        message(
            lambda: ask_all(f"http://user:{secret}@127.0.0.1:1", "x", [{}], str, timeout_s=5, what="{url} {problem}")
        ),
        message(lambda: build_config({"model": {"path": "x"}, "rollout": {"api_key": secret}})),
        message(lambda: build_config({"model": {"path": "x"}, "distillation": {"api_key": [secret]}})),
        message(lambda: build_config({"model": {"path": "x"}, "agent": {"mcp_servers": [{"env": {"K": secret}}]}})),
        message(lambda: parse_overrides(["--agent.mcp_servers", f"{{w: {{env: {{K: {secret}}}}}}}"])),
        message(lambda: parse_overrides(["--agent.mcp_servers.w.env.K", secret])),
        message(lambda: parse_overrides(["--agent.mcp_servers.w.args", f"[--api-key, {secret}]"])),
        message(lambda: parse_overrides(["--agent.tool_options", f"{{search: {{token: {secret}}}}}"])),
        message(lambda: parse_overrides(["--data.options.url", f"http://user:{secret}@host"])),
        message(lambda: load_config(file)),
        message(lambda: Server("x", {"comand": "npx", "env": {"API_KEY": secret}})),
        message(lambda: Server("x", {"command": 5, "env": {"K": secret}})),
        message(lambda: server_of(f"http://user:{secret}@127.0.0.1:1")),
    ]
    assert not [text for text in said if secret in text]


def test_the_first_who_needs_a_key_makes_it_for_all(tmp_path):
    folder = tmp_path / "servers"
    with ThreadPoolExecutor(8) as threads:
        found = {*threads.map(key_of_folder, [folder] * 8)}
    [key] = found
    assert len(key) == 64 and int(key, 16) >= 0, "hexadecimal: no option of a command line begins so"
    assert (folder / "server.key").stat().st_mode & 0o077 == 0
    (folder / "server.key").chmod(0o640)
    with pytest.raises(UserError, match=r"server.key can be read by other users: stop its servers and remove the file"):
        key_of_folder(folder)
    (folder / "server.key").chmod(0o600)
    (folder / "server.key").rename(tmp_path / "elsewhere")
    (folder / "server.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"server.key: the servers' key cannot be stored there"):
        key_of_folder(folder)
    (tmp_path / "elsewhere").rename(folder / "server.key")
    if not os.geteuid():
        os.chown(folder / "server.key", 65534, 65534)
        with pytest.raises(UserError, match=r"server.key belongs to another user: choose another folder"):
            key_of_folder(folder)
