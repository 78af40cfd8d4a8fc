"""Start an SGLang server for a trainer on another machine, with the flags that the trainer would give its own child.

    tools/serve.py CONFIG --host ADDRESS --address-file FILE [--section.key VALUE ...]

Takes a free port, writes http://ADDRESS:PORT to FILE, and becomes the server.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_rl.config_file import load_config
from megatron_rl.errors import UserError
from megatron_rl.rollout.server import RolloutServer, reserve_port
from megatron_rl.sync.weight_sync import SERVER_PYTHONPATH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--host", required=True, help="address of this machine at which trainer and servers reach it")
    parser.add_argument("--address-file", required=True, type=Path)
    args, overrides = parser.parse_known_args()
    try:
        config = load_config(args.config, overrides)
        server = RolloutServer.from_config(config, pythonpath=[SERVER_PYTHONPATH])
        command, environment = server.command(), server.environment()
    except UserError as error:
        print(f"serve: error: {error}", file=sys.stderr)
        return 2
    reserved = reserve_port(args.host)
    reserved.set_inheritable(True)  # outlives the exec below
    port = reserved.getsockname()[1]
    partial = args.address_file.with_suffix(".partial")
    partial.write_text(f"http://{args.host}:{port}\n")
    partial.rename(args.address_file)  # whole or not there
    command += ["--host", args.host, "--port", str(port)]  # of a flag given twice the last counts
    return os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(main())
