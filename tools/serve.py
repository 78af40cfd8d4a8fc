"""Start an SGLang server for a trainer on another machine, with the flags that a trainer gives its own servers.

    tools/serve.py CONFIG --host ADDRESS --address-file FILE [--section.key VALUE ...]

This tool takes a free port, writes http://ADDRESS:PORT to FILE, and runs the server until it ends or gets SIGTERM. The server
answers only requests with its key: the key of rollout.api_key, or else of the file server.key beside FILE. A trainer whose
rollout.address_folder is that folder finds the key there. For one server on several machines (rollout.server.tensor above the
GPUs of one), start this tool on each machine, with --nodes, --node-rank and the same --meet; the first machine writes FILE.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_rl.checks.model_folders import with_folders
from megatron_rl.config.load import load_config
from megatron_rl.credentials import key_of, key_of_folder
from megatron_rl.errors import UserError
from megatron_rl.servers.own_environment import check_plugin, find_python
from megatron_rl.servers.server import STOP_GRACE_S, SUPERVISOR, RolloutServer, reserve_port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--host", required=True, help="address of this machine for the trainer and other servers")
    parser.add_argument("--address-file", required=True, type=Path)
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of machines of this server (default 1)"
    )
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="I", help="rank of this machine, from 0 (default 0)"
    )
    parser.add_argument(
        "--meet", metavar="HOST:PORT", help="address and free port of the first machine, where the machines connect"
    )
    args, overrides = parser.parse_known_args()
    os.umask(0o077)  # only the owner may access the server's sockets and files
    try:
        if not 0 <= args.node_rank < args.nodes or (args.nodes > 1 and not args.meet):
            raise UserError(
                f"--nodes {args.nodes} --node-rank {args.node_rank}: ranks must be below --nodes, and several nodes"
                " need --meet"
            )
        config = with_folders(load_config(args.config, overrides), "server")
        key = key_of(config.rollout.api_key, "rollout.api_key") or key_of_folder(args.address_file.parent)
        server = RolloutServer.from_config(config, key=key)
        if config.rollout.server.tensor % args.nodes:
            raise UserError(
                f"--nodes {args.nodes} does not divide rollout.server.tensor = {config.rollout.server.tensor}: each"
                " machine must have the same number of the server's GPUs"
            )
        check_plugin(find_python(config.rollout.server.python))
        command, environment = server.command(), server.environment()
    except UserError as error:
        print(f"serve: error: {error}", file=sys.stderr)
        return 2
    reserved = reserve_port(args.host)
    reserved.set_inheritable(True)  # keep the port reserved across the exec below
    port = reserved.getsockname()[1]
    if args.node_rank == 0:
        write_address(args.address_file, f"http://{args.host}:{port}")
    if args.nodes > 1:
        command += ["--nnodes", str(args.nodes), "--node-rank", str(args.node_rank), "--dist-init-addr", args.meet]
    command += ["--host", args.host, "--port", str(port)]  # if a flag occurs twice, the last one counts
    supervisor = [sys.executable, "-E", "-S", str(SUPERVISOR), "--alone", str(STOP_GRACE_S)]
    return os.execvpe(sys.executable, supervisor + command, environment)


def write_address(file: Path, address: str) -> None:
    """Write a server's address atomically, and not through a link that another user created."""
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with partial.open("x") as opened:
        opened.write(f"{address}\n")
    partial.rename(file)


if __name__ == "__main__":
    sys.exit(main())
