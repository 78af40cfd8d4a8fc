"""`megatron-rl launch kubernetes`: write a config as a JobSet and the objects that it needs, and submit them with kubectl.

The JobSet (jobset.x-k8s.io/v1alpha2) has one job for the trainer, with one pod per node, and one job for each SGLang server.
All pods share a volume, which holds models, data, checkpoints and the addresses of the servers. See docs/kubernetes.md.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.checks.model_folders import model_places
from megatron_rl.config import Config
from megatron_rl.config.load import build_config, dump_yaml, parse_overrides, parse_yaml
from megatron_rl.credentials import hidden
from megatron_rl.data.hub import hub_id
from megatron_rl.errors import UserError
from megatron_rl.run.nodes import Nodes, checked_nodes, data_paths

TIMEOUT_S = 120.0
"""Longest time in seconds to wait for kubectl."""
BRING_UP_S = 1800
"""Longest time in seconds for a server to start."""
SILENCE_S = 120
"""Seconds without an answer after which a server's container is restarted."""
SERVER_RESTARTS = 100
"""Number of restarts of a server's container before its job fails."""
PORT = 29500
"""Port on the first pod of the trainer, at which the trainer's processes find each other."""
CONFIG_FOLDER = "/etc/megatron_rl"
NAME_LENGTH = 40
"""Longest name of a JobSet. Kubernetes derives longer pod names from it, which may have at most 63 characters."""
PROBE = """import os, urllib.error, urllib.request
try:
    urllib.request.urlopen(open(os.environ['ADDRESS_FILE']).read().strip() + '/ready', timeout=20)
except urllib.error.HTTPError:
    pass"""
"""Program that fails if a server does not answer. It accepts error statuses, which a server returns while it loads weights."""
LABEL = "jobset.sigs.k8s.io"


@dataclass(frozen=True)
class PodConfig:
    """A config in the form that the pods of a cluster read."""

    config: Config
    text: str
    """The config in YAML."""


def cluster_config(config: Config, args: argparse.Namespace, overrides: Sequence[str], mount: str) -> PodConfig:
    """Return the config with overrides, for machines that mount the volume at `mount` but have none of this machine's files.

    Errors: UserError for a secret in the config, and for a path that only this machine has.
    """
    values = parse_overrides([*overrides], parse_yaml(Path(args.config).read_text(encoding="utf-8")))
    if hidden(values) != values:
        raise UserError(
            f"launch: {args.config} contains a password or key in plain text; write env:NAME instead, and give it with --secret"
        )
    here = data_paths(config) | {".".join(map(str, place)): text for place, text in model_places(config).items()}
    for key, path in here.items():
        if key == "runs_dir" or not path or Path(path).is_absolute():
            continue
        if Path(path).exists() or (key == "model.path" and hub_id(path) is None):
            raise UserError(
                f"config: {key} = {path}: the cluster's machines do not have this file; copy it to the volume, and give its"
                f" absolute path below {mount}"
            )
    if not config.model.path:
        raise UserError("config: model.path is empty; set it to a folder on the volume, or to an id (owner/name)")
    runs = Path(mount, config.runs_dir)
    if Path(mount) not in (runs, *runs.parents) or ".." in runs.parts:
        raise UserError(
            f"config: runs_dir = {config.runs_dir} is not on the volume at {mount}, so checkpoints would be lost"
        )
    values["runs_dir"] = str(runs)
    return PodConfig(build_config(values, args.config), dump_yaml(values))


def with_keys(found: PodConfig, changes: Mapping[str, object]) -> PodConfig:
    """Return the config with new values for some keys, given as {dotted key: value}."""
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()]
    values = parse_overrides(words, parse_yaml(found.text))
    return PodConfig(build_config(values), dump_yaml(values))


def object_name(name: str) -> str:
    """Return a run's name in Kubernetes's form (a-z, 0-9, -). A changed name ends with part of the old name's hash."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if plain == name and name[0].isalpha() and len(name) <= NAME_LENGTH:
        return name
    short = (plain if plain[:1].isalpha() else f"run-{plain}")[: NAME_LENGTH - 7].strip("-")
    return f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def manifests(found: PodConfig, nodes: Nodes, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of a run: config, JobSet, and, if logging.prometheus_port is set, a service for metrics."""
    config, name = found.config, object_name(found.config.name)
    meta = {"namespace": args.namespace} if args.namespace else {}
    labels = {"kueue.x-k8s.io/queue-name": args.queue} if args.queue else {}
    jobs = [_job("trainer", 1, _trainer(name, config, nodes, args))]
    if nodes.servers:
        jobs.append(_job("servers", nodes.servers, _server(name, config, nodes, args)))
    rules = [
        {
            "name": "mistake",  # exit status 2: another attempt would fail too
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "targetReplicatedJobs": ["trainer"],
        }
    ]
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
        # The trainer of an attempt saves while it ends, so the next attempt waits for it.
        "failurePolicy": {"maxRestarts": args.max_restarts, "restartStrategy": "BlockingRecreate", "rules": rules},
        "replicatedJobs": jobs,
    }
    objects = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-config", **meta},
            "data": {"config.yaml": found.text},
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, **meta, **({"labels": labels} if labels else {})},
            "spec": spec,
        },
    ]
    if port := config.logging.prometheus_port:
        first = {
            f"{LABEL}/jobset-name": name,
            f"{LABEL}/replicatedjob-name": "trainer",
            "batch.kubernetes.io/job-completion-index": "0",
        }
        service = {"selector": first, "ports": [{"name": "metrics", "port": port}]}
        metadata = {"name": f"{name}-metrics", **meta}
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service})
    return objects


def _job(name: str, replicas: int, spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "replicas": replicas, "template": {"spec": spec}}


def _folder(name: str, args: argparse.Namespace) -> str:
    """Return the volume's log folder for one attempt of a job. Kubernetes replaces $(ATTEMPT) by the attempt's number."""
    return f"{args.mount_path}/logs/{name}/attempt-$(ATTEMPT)"


def _trainer(name: str, config: Config, nodes: Nodes, args: argparse.Namespace) -> dict[str, Any]:
    words = ["python", "tools/start_ranks.py", args.run, f"{CONFIG_FOLDER}/config.yaml"]
    words += ["--processes", str(nodes.per_node), "--machines", str(nodes.trainers)]
    words += ["--machine-rank", "$(JOB_COMPLETION_INDEX)", "--meet", f"{name}-trainer-0-0.{name}:{PORT}"]
    words += ["--key-folder", f"{_folder(name, args)}/trainer"]
    if nodes.servers:
        words += ["--rollout.address_folder", _folder(name, args)]
    container = _container(words, nodes.gpus, args)
    if config.logging.prometheus_port:
        container["ports"] = [{"name": "metrics", "containerPort": config.logging.prometheus_port, "protocol": "TCP"}]
    mistake = {"containerName": "main", "operator": "In", "values": [2]}
    return {
        "completionMode": "Indexed",
        "parallelism": nodes.trainers,
        "completions": nodes.trainers,
        "backoffLimit": 0,  # one lost pod ends the attempt, and the JobSet starts the next one
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistake}]},
        "template": _pod(name, container, args, restart="Never", grace_s=args.grace),
    }


def _server(name: str, config: Config, nodes: Nodes, args: argparse.Namespace) -> dict[str, Any]:
    several = nodes.nodes_per_server
    file = f"{_folder(name, args)}/server-$(SERVER).address"
    words = ["python", "tools/serve.py", f"{CONFIG_FOLDER}/config.yaml"]
    words += ["--host", "$(POD_IP)", "--address-file", "$(ADDRESS_FILE)"]
    if several > 1:
        words += ["--nodes", str(several), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        words += ["--meet", f"{name}-servers-$(SERVER)-0.{name}:{PORT}"]
    container = _container(words, min(nodes.server_gpus, nodes.gpus), args)
    # A variable, as Kubernetes does not expand $(NAME) in the command of a probe.
    container["env"].append({"name": "ADDRESS_FILE", "value": file})
    if several == 1:
        probe = {"exec": {"command": ["python", "-c", PROBE]}, "periodSeconds": 10, "timeoutSeconds": 30}
        container["startupProbe"] = {**probe, "failureThreshold": BRING_UP_S // 10}
        container["livenessProbe"] = {**probe, "failureThreshold": SILENCE_S // 10}
    return {
        "completionMode": "Indexed",
        "parallelism": several,
        "completions": several,
        # A server on one node restarts alone. The pods of a larger one only work together, so the whole JobSet restarts.
        "backoffLimit": SERVER_RESTARTS if several == 1 else 0,
        "template": _pod(name, container, args, restart="OnFailure" if several == 1 else "Never", grace_s=60),
    }


def _container(words: list[str], gpus: int, args: argparse.Namespace) -> dict[str, Any]:
    labels = {"ATTEMPT": "restart-attempt", "SERVER": "job-index"}
    fields = {name: f"metadata.labels['{LABEL}/{label}']" for name, label in labels.items()}
    fields["POD_IP"] = "status.podIP"
    variables = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    variables.append({"name": "HF_HOME", "value": f"{args.mount_path}/huggingface"})
    return {
        "name": "main",
        "image": args.image,
        "command": words,
        "env": variables,
        **({"envFrom": [{"secretRef": {"name": secret}} for secret in args.secret]} if args.secret else {}),
        **({"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}),
        "volumeMounts": [
            {"name": "shared", "mountPath": args.mount_path},
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }


def _pod(
    name: str, container: dict[str, Any], args: argparse.Namespace, *, restart: str, grace_s: int
) -> dict[str, Any]:
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": args.pvc}},
        {"name": "config", "configMap": {"name": f"{name}-config"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # the default of 64 MiB is too small for NCCL and SGLang
    ]
    spec = {"restartPolicy": restart, "terminationGracePeriodSeconds": grace_s}
    return {"spec": {**spec, "containers": [container], "volumes": volumes}}


def objects_of(config: Config, args: argparse.Namespace, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the Kubernetes objects for a command line (parsed by `cli.make_parser`).

    Errors: UserError for problems that would otherwise show only on the cluster.
    """
    nodes = checked_nodes(config, args)
    missing = [flag for flag in ("image", "pvc") if not getattr(args, flag)]
    if missing:
        raise UserError(f"launch: kubernetes needs --{missing[0]}; see megatron-rl launch --help")
    if not args.mount_path.startswith("/") or args.mount_path == "/":
        raise UserError(f"launch: --mount-path {args.mount_path} is not an absolute path such as /shared")
    if args.max_restarts < 0 or args.grace < 1:
        raise UserError(
            f"launch: --max-restarts {args.max_restarts} --grace {args.grace}: --max-restarts must be at least 0,"
            " --grace at least 1"
        )
    found = cluster_config(config, args, overrides, args.mount_path)
    changes: dict[str, object] = {}
    if args.run == "train":
        changes["rollout.server.tensor"] = nodes.server_gpus
        if nodes.servers:
            changes["rollout.server.count"] = nodes.servers
            changes["rollout.server.start_timeout_s"] = BRING_UP_S
        else:
            changes |= {"rollout.colocate": True, "sync.transport": "tensor"}
    found = with_keys(found, changes)
    checked_nodes(found.config, args)
    return manifests(found, nodes, args)


def launch_command(config: Config, args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Submit a config to the cluster with kubectl; with --dry-run, only print the Kubernetes objects."""
    text = dump_yaml(*objects_of(config, args, overrides))
    if args.dry_run:
        print(text, end="")
        return 0
    if shutil.which("kubectl") is None:
        raise UserError(
            "launch: kubectl is not installed here: run this on a machine that can reach the cluster, or add --dry-run"
        )
    try:
        done = subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"launch: kubectl did not answer within {TIMEOUT_S:g} s: check the address of the cluster"
        ) from None
    if done.returncode:
        raise UserError(f"launch: kubectl apply: {' '.join(done.stderr.split())}")
    space = f" -n {args.namespace}" if args.namespace else ""
    name = object_name(config.name)
    print(done.stdout, end="")
    print(f"follow it: kubectl{space} logs -f -l {LABEL}/jobset-name={name},{LABEL}/replicatedjob-name=trainer")
    return 0
