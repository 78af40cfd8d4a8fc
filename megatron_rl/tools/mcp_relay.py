"""Relay for an MCP server: `python mcp_relay.py BYTES COMMAND...` runs the server and forwards its messages (lines).

The package mcp assembles a message in the event loop of all conversations, and copies the whole message for each part that
arrives. Therefore the relay stops a server that sends a message of more than BYTES bytes. The package also logs a traceback for
each line that is not JSON. The relay drops such lines and warns once. It uses only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys


def main() -> int:
    """Run the relay. Returns the server's exit status."""
    most, command = int(sys.argv[1]), sys.argv[2:]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    said = False
    while line := server.stdout.readline(most + 1):
        if len(line) > most:
            _say(f"{command[0]}: a message of more than {most} bytes; this MCP server is ended")
            os.killpg(0, signal.SIGKILL)  # the package mcp gives each server a process group
        if not _is_object(line):
            if not said:
                _say(
                    f"{command[0]}: this MCP server writes lines that are no messages; they are ignored: {line[:200]!r}"
                )
            said = True
            continue
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    return server.wait()


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
