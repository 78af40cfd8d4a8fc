"""Secrets of a config: where they are stored, and how they stay out of files, messages and the list of processes.

A config refers to a secret as `env:NAME` or `file:PATH`. The secret is read only when it is needed. A secret that is written in
the config itself is hidden wherever the config is shown.
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
"""Environment variable through which a launcher passes the run's secret key to the run's processes."""
MOST_BYTES = 4096
"""Largest size in bytes of a key file."""
WRITTEN_S = 10.0
"""Longest time in seconds to wait until another process has written a new key file."""
WRONG_KEY = "it asks for another key; set {setting} to the place of that key (env:NAME or file:PATH)"
_REFERENCE = re.compile(r"(env|file):(.+)", re.DOTALL)
_NAME = (
    r"(?:(?:api|access|secret|private|auth)[_-]?key|(?<!(?:eos|bos|pad|unk|sep|end)_)token|secret|passw(?:or)?d"
    r"|authorization|credentials?)"
)
"""Pattern for the ends of secret names. It does not match data.answer_key, max_tokens and eos_token."""
_IS_NAME = re.compile(rf"(?i:(?:.*[\W_])?{_NAME})|\w*[a-z](?:Key|Token|Secret|Password)|[A-Z0-9_]*_KEY")
_IS_FLAG = re.compile(rf"(?i)--?(?:[\w.-]*{_NAME}|key)")
_VALUE = r"(?!env:|file:|<hidden>)(?:(?:bearer|basic)\s+)?[^\s\"',;&}\]]+"
_GIVEN = re.compile(
    rf"(?i)(\b[\w.-]*(?:{_NAME}|\bkey|_key)=[\"']?|-[\w.-]*(?:{_NAME}|-key)\s+[\"']?|\bauthorization[\"']?\s*:\s*[\"']?){_VALUE}"
)
"""Pattern for secrets in any text of a config, also in prose: NAME=VALUE, --NAME VALUE, Authorization: VALUE."""
_NAMED = re.compile(rf"(?i)(\b[\w.-]*(?:{_NAME}|\bkey)[\"']?\s*[=:]\s*[\"']?){_VALUE}")
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_LOOKS_LIKE = re.compile(r"(?<![\w/.-])(?:sk-[\w-]{4,}|(?:hf|gh[a-z])_[A-Za-z0-9]{16,}|xox[a-z]-[\w-]{4,})")


def read(value: str, key: str) -> str:
    """Return the secret that `env:NAME` or `file:PATH` refers to. Any other text is returned unchanged.

    key: config key, for the error message.

    Errors: UserError for a variable that is not set, or a file that cannot be read.
    """
    match = _REFERENCE.fullmatch(value)
    if not match:
        return value
    kind, name = match.groups()
    if kind == "env":
        if name not in os.environ:
            raise UserError(f"config: {key}: the environment variable {name} is not set")
        return os.environ[name]
    try:
        return Path(name).expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"config: {key}: {name} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def key_of(reference: str | None, setting: str) -> str:
    """Return the API key that a config refers to; an empty text without a reference.

    Errors: UserError like `read`, and for a key that SGLang's command line or an HTTP header cannot hold.
    """
    key = read(reference, setting) if reference else ""
    if reference and (key.startswith("-") or not re.fullmatch(r"[!-~]+", key)):
        raise UserError(
            f"config: {setting}: the key must not be empty or begin with '-', and may contain only visible ASCII"
            " characters"
        )
    return key


def key_of_folder(folder: Path) -> str:
    """Return the API key of the servers in an address folder, from the folder's file server.key. The first caller creates it.

    Errors: UserError if the file cannot be created or read, belongs to another user, or is readable by others.
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
            # Do not follow links: another user's link could point to any secret of this user.
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as opened:
                found, text = os.fstat(opened.fileno()), opened.read(MOST_BYTES)
            if text.endswith("\n") or time.monotonic() >= deadline:
                break
            time.sleep(0.1)  # another process is writing it
        if found.st_uid != os.geteuid():
            raise UserError(f"{file} belongs to another user: choose another folder")
        if found.st_mode & 0o077:
            raise UserError(
                f"{file} can be read by other users: stop its servers and remove the file; a new key is then created"
            )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file}: the servers' key cannot be stored there ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not text.endswith("\n"):
        raise UserError(
            f"{file} is incomplete: stop the servers whose addresses are in its folder, and remove the file"
        )
    return text.strip()


def bearer(key: str) -> dict[str, str]:
    """Return the HTTP headers that authorize a request to a server. key: empty if the server needs none."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_secret(key: str) -> bool:
    """Return whether the values of a config key are secrets or may contain secrets."""
    return key in ("env", "headers") or bool(_IS_NAME.fullmatch(key))


def hide(text: str) -> str:
    """Hide the secrets in a message: passwords in URLs, values of keys with secret names, texts that look like secrets."""
    return _NAMED.sub(rf"\1{HIDDEN}", _without_secrets(text))


def _without_secrets(text: str) -> str:
    return _LOOKS_LIKE.sub(HIDDEN, _GIVEN.sub(rf"\1{HIDDEN}", _IN_URL.sub(f"{HIDDEN}@", text)))


def hidden(tree: Any, *, secret: bool = False) -> Any:
    """Return a config as plain values, with its literal secrets hidden. References to secrets and prose stay unchanged."""
    if isinstance(tree, Mapping):
        return {key: hidden(value, secret=secret or is_secret(str(key))) for key, value in tree.items()}
    if isinstance(tree, str):
        return HIDDEN if secret and not _REFERENCE.fullmatch(tree) else _without_secrets(tree)
    if isinstance(tree, Sequence):
        flags = [isinstance(value, str) and bool(_IS_FLAG.fullmatch(value)) for value in tree]
        return [hidden(value, secret=secret or flag) for value, flag in zip(tree, [False, *flags], strict=False)]
    return HIDDEN if secret and tree is not None else tree


def command_line(arguments: Sequence[str]) -> str:
    """Return command-line arguments as one line, without the values of arguments that may contain secrets."""
    words, secret = [], False
    for word in arguments:
        name, equals, value = word.partition("=")
        shown = HIDDEN if _has_secrets(name) else hide(value)
        words.append(HIDDEN if secret else f"{name}={shown}" if equals and name.startswith("--") else hide(word))
        secret = _has_secrets(name) and not equals
    return " ".join(words)


def _has_secrets(name: str) -> bool:
    return name.startswith("--agent.mcp_servers") or is_secret(name)
