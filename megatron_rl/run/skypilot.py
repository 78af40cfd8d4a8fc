"""`megatron-rl launch skypilot`: write a config as a SkyPilot task, for `sky jobs launch`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.load import dump_yaml
from megatron_rl.errors import UserError
from megatron_rl.run.kubernetes import PORT, cluster_config, object_name, with_keys
from megatron_rl.run.nodes import checked_nodes

ROOT = Path(__file__).resolve().parents[2]
"""The checkout (source tree), which SkyPilot copies to each machine."""
CONFIG = "/tmp/megatron_rl.yaml"
"""Path of the config on each machine. The task's command writes the file."""


def task_of(config: Config, args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the SkyPilot task for a command line (parsed by `cli.make_parser`).

    Errors: UserError for problems that would otherwise show only on the cluster.
    """
    if args.gpus_per_node < 1:
        raise UserError(f"launch: --gpus-per-node {args.gpus_per_node}: a SkyPilot task needs at least 1")
    nodes = checked_nodes(config, args)
    missing = [flag for flag in ("accelerator", "volume") if not getattr(args, flag)]
    if missing:
        raise UserError(f"launch: skypilot needs --{missing[0]}; see megatron-rl launch --help")
    if args.run == "train" and args.nodes > 1:
        raise UserError(
            f"launch: --nodes {args.nodes}: a SkyPilot task trains by RL on one node, which its servers share; use launch"
            " kubernetes or slurm for several nodes, or --for sft, reward or dpo"
        )
    found = cluster_config(config, args, overrides, args.mount_path)
    if args.run == "train":
        own = {"rollout.server.tensor": nodes.server_gpus, "rollout.colocate": True, "sync.transport": "tensor"}
        found = with_keys(found, own)
        checked_nodes(found.config, args)
    words = [".venv/bin/python", "tools/start_ranks.py", args.run, CONFIG]
    words += ["--processes", str(nodes.per_node), "--machines", str(nodes.trainers)]
    words += ["--key-folder", f"{args.mount_path}/logs/{object_name(config.name)}"]
    # SkyPilot sets both variables. The first line of the second one is the address of machine 0.
    own = f' --machine-rank "$SKYPILOT_NODE_RANK" --meet "${{SKYPILOT_NODE_IPS%%$\'\\n\'*}}:{PORT}"'
    return {
        "name": object_name(config.name),
        "num_nodes": nodes.trainers,
        "resources": {"accelerators": f"{args.accelerator}:{nodes.gpus}"},
        "workdir": str(ROOT),
        "volumes": {args.mount_path: args.volume},
        "envs": {"MEGATRON_RL_CONFIG": found.text, "HF_HOME": f"{args.mount_path}/huggingface"},
        "setup": "tools/setup.sh --gpu",
        "run": f'printf "%s" "$MEGATRON_RL_CONFIG" > {CONFIG}\n{shlex.join(words)}{own}\n',
    }


def launch_command(config: Config, args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print a config as a SkyPilot task."""
    if not args.dry_run:
        raise UserError(
            "launch: skypilot only writes the task: add --dry-run > task.yaml, then call sky jobs launch task.yaml"
        )
    print(dump_yaml(task_of(config, args, overrides)), end="")
    return 0
