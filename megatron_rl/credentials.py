"""Secrets of a config: where they come from, and how they stay out of files, messages and the list of processes.

A secret is written as a reference, `env:NAME` or `file:PATH`, and read where it is needed. One that is written out is hidden
wherever a config is shown.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

HIDDEN = "<hidden>"
RUN_KEY = "MEGATRON_RL_RUN_KEY"
"""Variable of the environment by which a launcher gives the processes of a run a secret of their own."""
MOST_BYTES = 4096
"""Most bytes of a file with a key."""
WRITTEN_S = 10.0
"""Longest wait for a file that another process has just made."""
WRONG_KEY = "it asks for another key; set {setting} to where that one is (env:NAME or file:PATH)"
_REFERENCE = re.compile(r"(env|file):(.+)", re.DOTALL)
_NAME = (
    r"(?:(?:api|access|secret|private|auth)[_-]?key|(?<!(?:eos|bos|pad|unk|sep|end)_)token|secret|passw(?:or)?d"
    r"|authorization|credentials?)"
)
"""How names of secrets end; data.answer_key, max_tokens and eos_token are none."""
_IS_NAME = re.compile(rf"(?i:(?:.*[\W_])?{_NAME})|\w*[a-z](?:Key|Token|Secret|Password)|[A-Z0-9_]*_KEY")
_IS_FLAG = re.compile(rf"(?i)--?(?:[\w.-]*{_NAME}|key)")
_VALUE = r"(?!env:|file:|<hidden>)(?:(?:bearer|basic)\s+)?[^\s\"',;&}\]]+"
_GIVEN = re.compile(
    rf"(?i)(\b[\w.-]*(?:{_NAME}|\bkey|_key)=[\"']?|-[\w.-]*(?:{_NAME}|-key)\s+[\"']?|\bauthorization[\"']?\s*:\s*[\"']?){_VALUE}"
)
"""In any text of a config, which may be prose: NAME=VALUE, --NAME VALUE, Authorization: VALUE."""
_NAMED = re.compile(rf"(?i)(\b[\w.-]*(?:{_NAME}|\bkey)[\"']?\s*[=:]\s*[\"']?){_VALUE}")
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_LOOKS_LIKE = re.compile(r"(?<![\w/.-])(?:sk-[\w-]{4,}|(?:hf|gh[a-z])_[A-Za-z0-9]{16,}|xox[a-z]-[\w-]{4,})")


def read(value: str, key: str) -> str:
    """The value that a reference stands for; any other text is itself. key: for the error.

    Errors: UserError for a variable that is not set, or a file that cannot be read.
    """
    match = _REFERENCE.fullmatch(value)
    if not match:
        return value
    kind, name = match.groups()
    if kind == "env":
        if name not in os.environ:
            raise UserError(f"config: {key}: the environment has no {name}")
        return os.environ[name]
    try:
        return Path(name).expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"config: {key}: {name} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def key_of(reference: str | None, setting: str) -> str:
    """The key that a config refers to, empty where it names none.

    Errors: UserError as of `read`, and for a key that SGLang's command line or a request's header could not hold.
    """
    key = read(reference, setting) if reference else ""
    if reference and (key.startswith("-") or not re.fullmatch(r"[!-~]+", key)):
        raise UserError(
            f"config: {setting}: the key there is empty, begins with '-', or has more than visible ASCII signs in it"
        )
    return key


def key_of_folder(folder: Path) -> str:
    """The key of the servers whose addresses are in a folder, in its file server.key: made by the first who needs it.

    Errors: UserError where it cannot be made or read, is another user's, or one that others can read.
    """
    file = folder / "server.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
                new.write(f"{secrets.token_hex(32)}\n")
        except FileExistsError:
            pass
        deadline = time.monotonic() + WRITTEN_S
        while True:
            # A link that another user has put there may lead to any secret of this user.
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as opened:
                found, text = os.fstat(opened.fileno()), opened.read(MOST_BYTES)
            if text.endswith("\n") or time.monotonic() >= deadline:
                break
            time.sleep(0.1)  # another process writes it
        if found.st_uid != os.geteuid():
            raise UserError(f"{file} is another user's: choose another folder")
        if found.st_mode & 0o077:
            raise UserError(f"{file} can be read by others: end its servers and remove it, and a new key is made")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file}: the key of the servers cannot be kept there ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not text.endswith("\n"):
        raise UserError(f"{file} is not whole: end the servers whose addresses are in its folder, and remove it")
    return text.strip()


def bearer(key: str) -> dict[str, str]:
    """The HTTP headers by which a server knows who may ask it. key: empty where it asks for none."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_secret(key: str) -> bool:
    """Tell if the values of a key are secrets or hold some, wherever it is in a config."""
    return key in ("env", "headers") or bool(_IS_NAME.fullmatch(key))


def hide(text: str) -> str:
    """A text of a message without passwords of URLs, values of what is named a key, and what looks like one."""
    return _NAMED.sub(rf"\1{HIDDEN}", _without_secrets(text))


def _without_secrets(text: str) -> str:
    return _LOOKS_LIKE.sub(HIDDEN, _GIVEN.sub(rf"\1{HIDDEN}", _IN_URL.sub(f"{HIDDEN}@", text)))


def hidden(tree: Any, *, secret: bool = False) -> Any:
    """A config as plain values, with each secret that is written out hidden; references, and prose, stay."""
    if isinstance(tree, Mapping):
        return {key: hidden(value, secret=secret or is_secret(str(key))) for key, value in tree.items()}
    if isinstance(tree, str):
        return HIDDEN if secret and not _REFERENCE.fullmatch(tree) else _without_secrets(tree)
    if isinstance(tree, Sequence):
        flags = [isinstance(value, str) and bool(_IS_FLAG.fullmatch(value)) for value in tree]
        return [hidden(value, secret=secret or flag) for value, flag in zip(tree, [False, *flags], strict=False)]
    return HIDDEN if secret and tree is not None else tree


def command_line(arguments: Sequence[str]) -> str:
    """Arguments as one line, without the values of what may have secrets in it."""
    words, secret = [], False
    for word in arguments:
        name, equals, value = word.partition("=")
        shown = HIDDEN if _has_secrets(name) else hide(value)
        words.append(HIDDEN if secret else f"{name}={shown}" if equals and name.startswith("--") else hide(word))
        secret = _has_secrets(name) and not equals
    return " ".join(words)


def _has_secrets(name: str) -> bool:
    return name.startswith("--agent.mcp_servers") or is_secret(name)
