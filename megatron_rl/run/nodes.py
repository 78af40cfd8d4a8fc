"""Nodes of a cluster job: which nodes train, which run SGLang servers, and the checks that all schedulers share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron_rl.checks.preflight import check_config
from megatron_rl.config import Config
from megatron_rl.errors import UserError

OWN_FLAGS: dict[str, dict[str, object]] = {
    "slurm": {"time": "24:00:00", "account": None, "partition": None, "container": None, "mounts": None, "option": []},
    "kubernetes": {"image": None, "pvc": None, "namespace": None, "secret": [], "queue": None, "max_restarts": 20},
    "skypilot": {"accelerator": None, "volume": None},
}
"""Flags of `launch` that only one scheduler supports, with their defaults."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and the GPUs of its trainer processes and servers."""

    total: int
    gpus: int
    """Number of GPUs per node. 0: none, with one trainer process per node."""
    trainers: int
    """Number of nodes that train."""
    server_gpus: int

    @property
    def per_node(self) -> int:
        """Number of trainer processes per node."""
        return max(1, self.gpus)

    @property
    def processes(self) -> int:
        """Number of trainer processes."""
        return self.trainers * self.per_node

    @property
    def serving(self) -> int:
        """Number of nodes that only run SGLang servers."""
        return self.total - self.trainers

    @property
    def nodes_per_server(self) -> int:
        """Number of nodes that one server spans."""
        return max(1, self.server_gpus // self.per_node)

    @property
    def servers(self) -> int:
        """Number of SGLang servers on the serving nodes."""
        return self.serving * self.per_node // self.server_gpus


def nodes_of(config: Config, args: argparse.Namespace) -> Nodes:
    """Return how a command line (parsed by `cli.make_parser`) divides the job's nodes between trainer and servers.

    Errors: UserError for sizes that do not fit together, and for flags of another scheduler.
    """
    for scheduler, flags in OWN_FLAGS.items():
        for name, default in flags.items():
            if scheduler != args.scheduler and getattr(args, name) != default:
                raise UserError(
                    f"launch: --{name.replace('_', '-')} works only with launch {scheduler}; remove it, or use {scheduler}"
                )
    if args.nodes < 1 or args.gpus_per_node < 0:
        raise UserError(
            f"launch: --nodes {args.nodes} --gpus-per-node {args.gpus_per_node}: --nodes must be at least 1,"
            " --gpus-per-node at least 0"
        )
    if args.train_nodes is not None and not (1 <= args.train_nodes < args.nodes or args.nodes == args.train_nodes == 1):
        raise UserError(
            f"launch: --train-nodes {args.train_nodes} of --nodes {args.nodes} leaves no node for SGLang servers; use"
            " fewer --train-nodes"
        )
    server_gpus = args.server_gpus or config.rollout.server.tensor
    gpus, serving = max(1, args.gpus_per_node), args.nodes - (args.train_nodes or args.nodes // 2)
    several = server_gpus // gpus if server_gpus > gpus else 1
    if max(server_gpus, gpus) % min(server_gpus, gpus) or (args.nodes > 1 and serving % several):
        raise UserError(
            f"launch: --server-gpus {server_gpus} does not split the {gpus} GPUs of a node or the {serving} serving"
            " nodes into whole servers"
        )
    trainers = args.nodes if args.nodes == 1 or args.run != "train" else args.train_nodes or args.nodes // 2
    return Nodes(args.nodes, args.gpus_per_node, trainers, server_gpus)


def checked_nodes(config: Config, args: argparse.Namespace) -> Nodes:
    """Return the result of `nodes_of`, after checking the config for this number of trainer processes. Errors: UserError."""
    nodes = nodes_of(config, args)
    check_config(config, args.run, nodes.processes)
    return nodes


def data_paths(config: Config) -> dict[str, str | None]:
    """Return {config key: value} for the keys that name files and folders of data."""
    paths = {"runs_dir": config.runs_dir, "model.path": config.model.path}
    paths |= {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    return paths | {f"eval.sets.{name}.path": one.path for name, one in config.eval.sets.items()}
