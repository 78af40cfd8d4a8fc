"""The client that MCP's scenarios look at: a toolbox with their server, whose tools are called, each once.

mcp_conformance_client.py URL
"""

from __future__ import annotations

import sys

from megatron_rl.config import AgentConfig
from megatron_rl.tools.toolbox import Toolbox

VALUES = {"number": 2.5, "integer": 2, "string": "x", "boolean": True}

if __name__ == "__main__":
    box = Toolbox(AgentConfig(mcp_servers={"scenario": {"url": sys.argv[1]}}, tool_timeout_s=60))
    box.open()
    try:
        for name, tool in box.tools.items():
            arguments = {key: VALUES[field["type"]] for key, field in tool.parameters.get("properties", {}).items()}
            print(name, box.loop.run(box.call(name, arguments, {})))
    finally:
        box.close()
