"""The command line: megatron-rl COMMAND, of those in `GROUPS`."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl import __version__
from megatron_rl.config.credentials import hide
from megatron_rl.errors import UserError
from megatron_rl.run.torchrun import needs_torchrun, torchrun
from megatron_rl.servers.supervise import follow_parent

if TYPE_CHECKING:
    from megatron_rl.config.plan import Kind

GROUPS = {
    "Before a run": {
        "doctor": "what is installed here, and what each missing part costs",
        "keys": "the keys of the config, with their defaults and meanings",
        "plan": "whether a config fits into the memory of so many GPUs, by arithmetic; needs no GPU and no weights",
        "simulate": "where a step's time goes on so many GPUs, in simulation, on stated or measured costs; needs no GPU",
    },
    "Learn": {
        "sft": "supervised fine-tuning on the task's demonstrations, or continued pretraining on texts, with the same trainer",
        "reward": "a reward model, or a process reward model, learned from preferences",
        "dpo": "a policy learned from preferences, without a reward model: DPO, IPO, KTO",
        "train": "reinforcement learning from a config; goes on from the run's newest checkpoint",
        "launch": "run a config on a cluster: writes the batch script and submits it",
    },
    "See what comes of it": {
        "status": "where a run stands, read from its folder",
        "report": "one HTML page of a run: curves and sample rollouts",
        "eval": "score the model on held-out prompts, sampled and greedy; with eval.likelihood: true by the likelihood of"
        " held-out demonstrations or texts, without an engine",
        "rollout": "sample the training prompts once and write the trajectories, without training",
        "serve-agent": "serve the model to agents that speak the OpenAI API, and record what they say, until interrupted",
        "certify": "whether trainer and engine compute the same to the last bit, and which operator of which layer is the first"
        " that does not",
    },
    "Make another model of it": {
        "prune": "a smaller or sparser model, by what its parts do on the task's demonstrations or texts",
        "quantize": "calibrate a quantized model on data, write it for SGLang, and measure how far it is from the original",
        "convert": "Hugging Face safetensors <-> Megatron distributed checkpoint; adapters into a model; FP8 export",
    },
}
"""Commands and what each does, by the occasion for it."""
HELP = {name: text for group in GROUPS.values() for name, text in group.items()}
KINDS: dict[str, Kind] = {
    "train": "train",
    "sft": "sft",
    "reward": "reward",
    "dpo": "dpo",
    "prune": "prune",
    "quantize": "quantize",
    "eval": "sample",
    "rollout": "sample",
    "serve-agent": "sample",
}
"""Commands that run a config on trainer processes."""
KEYS = (
    "Every key of the config can be given as --section.key VALUE, in the place of the file's; the last one counts."
    " megatron-rl keys lists them."
)


def _overview() -> str:
    lines = []
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, text in group.items():
            lines += textwrap.wrap(text, 100, initial_indent=f"  {name:<12} ", subsequent_indent=" " * 15)
    return "\n".join([*lines, "", "megatron-rl COMMAND --help says more of each."])


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        usage="megatron-rl [--help] [--version] COMMAND ...",
        description="megatron-rl trains language models by reinforcement learning, Mixture-of-Experts models above all:\n"
        "Megatron-Core learns, SGLang samples.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__, help="show the version, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help="one of those below")

    def add(name: str, more: str = "", epilog: str | None = None) -> argparse.ArgumentParser:
        text = HELP[name]
        description = f"{text[0].upper()}{text[1:]}.{more}"
        return commands.add_parser(
            name, prog=f"megatron-rl {name}", description=description, epilog=epilog, allow_abbrev=False
        )

    for name in KINDS:
        command = add(name, epilog=KEYS)
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument(
            "--nproc", type=int, default=1, metavar="N",
            help="trainer processes on this machine (starts torchrun; leave it out under srun or torchrun)",
        )  # fmt: skip
    certify = add("certify", " It writes one page into the run's folder.", epilog=KEYS)
    certify.add_argument("config", metavar="CONFIG", help="YAML file")
    certify.add_argument(
        "--prompts", type=int, default=8, metavar="N", help="of the task, on which both are compared (8)"
    )
    certify.add_argument("--tokens", type=int, default=32, metavar="N", help="of the longest response (32)")
    certify.add_argument("--nproc", type=int, default=1, metavar="N", help="trainer processes on this machine")
    plan = add("plan", " Of model.path it reads config.json alone.", epilog=KEYS)
    plan.add_argument("config", metavar="CONFIG", help="YAML file")
    plan.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of the trainer, all of which train (8)")
    plan.add_argument("--memory", type=float, default=80, metavar="GB", help="of one GPU, in 10^9 bytes (80)")
    plan.add_argument(
        "--for",
        dest="run",
        choices=("train", "sft", "reward", "dpo"),
        default="train",
        help="the command that is to fit",
    )
    plan.add_argument("--json", action="store_true", help="machine-readable, in bytes")
    launch = add("launch", " The script is kept in the run's folder; --dry-run prints it.", epilog=KEYS)
    launch.add_argument("scheduler", choices=("slurm",), help="of the cluster")
    launch.add_argument("config", metavar="CONFIG", help="YAML file, which all nodes see")
    launch.add_argument(
        "--for",
        dest="run",
        choices=("train", "sft", "reward", "dpo"),
        default="train",
        help="the command to run (train)",
    )
    launch.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the job; on one all share it")
    launch.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (8); 0: none")
    launch.add_argument("--train-nodes", type=int, metavar="N", help="nodes that train; the others serve (half)")
    launch.add_argument("--server-gpus", type=int, metavar="N", help="GPUs of one server (rollout.server.tensor)")
    launch.add_argument("--time", default="24:00:00", help="time limit, behind which the job is requeued (24:00:00)")
    launch.add_argument(
        "--grace",
        type=int,
        default=600,
        metavar="S",
        help="seconds before it at which the trainer saves and ends (600)",
    )
    launch.add_argument("--account", help="as sbatch's option")
    launch.add_argument("--partition", help="as sbatch's option")
    launch.add_argument("--container", metavar="IMAGE", help="image for pyxis")
    launch.add_argument("--mounts", help="mounts for pyxis (the checkout)")
    launch.add_argument(
        "--option", action="append", default=[], metavar="OPTION", help="one more of sbatch's: --option=--qos=high"
    )
    launch.add_argument("--dry-run", action="store_true", help="print the script, and submit nothing")
    convert = add(
        "convert",
        " One process without a GPU holds some tensors at a time, whatever the model's size. What was written is read again,"
        " and the checksum of every tensor compared with that of what was to be written.",
    )
    convert.add_argument(
        "source",
        metavar="SOURCE",
        help="Hugging Face folder or id (owner/name), adapters (PEFT), or a checkpoint folder step_N",
    )
    convert.add_argument("out", metavar="OUT", help="folder to write; it must not exist")
    for size in ("tensor", "pipeline", "expert"):
        convert.add_argument(
            f"--{size}", type=int, default=1, metavar="N", help=f"{size} parallel size of this conversion"
        )
    convert.add_argument("--quantize", choices=("fp8",), help="write a Hugging Face folder of FP8 weights in blocks")
    convert.add_argument(
        "--base", metavar="FOLDER", help="folder or id of the model that adapters go with, where it is not where it was"
    )
    convert.add_argument(
        "--adapter", action="store_true", help="of a checkpoint of adapters: write them alone, in PEFT's format"
    )
    convert.add_argument("--nproc", type=int, default=1, metavar="N", help="processes on this machine")
    report = add("report")
    report.add_argument("run", metavar="RUN", nargs="+", help="run folder(s): runs/NAME")
    report.add_argument(
        "--attribute", action="store_true",
        help="score a recorded batch again with one source of the mismatch removed at a time, and show the shares;"
        " keys of the run's config can be overridden (--parallel.expert 1)",
    )  # fmt: skip
    report.add_argument(
        "--step", type=int, metavar="N", help="recorded step to attribute, from 0; by default the newest"
    )
    report.add_argument("--nproc", type=int, default=1, metavar="N", help="processes on this machine, for --attribute")
    status = add("status")
    status.add_argument("run", metavar="RUN", nargs="+", help="run folder(s): runs/NAME")
    status.add_argument("--json", action="store_true", help="machine-readable")
    simulated = add("simulate")
    simulated.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="YAML file of the modes to compare, lengths of responses, and costs (docs/simulation.md of the repository)",
    )
    simulated.add_argument(
        "--from", dest="measured", metavar="RUN", nargs="+", default=[], help="run folder(s) to measure the costs from"
    )
    simulated.add_argument(
        "--compare", metavar="RUN", nargs="+", default=[], help="run folder(s) to predict, beside what was measured"
    )
    doctor = add("doctor")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    keys = add("keys")
    keys.add_argument(
        "prefix", metavar="PREFIX", nargs="?", default="", help="those that begin so, such as rollout.server"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 of a certificate that fails, or 2 after a one-line error for the user."""
    is_program, arguments = arguments is None, sys.argv[1:] if arguments is None else arguments
    args, rest = make_parser().parse_known_args(arguments)
    # Runs have prompts, responses and weights, and what they start inherits it; a converted folder is as open as a copy.
    umask = None if args.command == "convert" else os.umask(0o077)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun that is killed leaves its processes behind
        follow_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.WARNING, format="megatron-rl: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # its start-up notes drown ours
    collects = gc.isenabled()
    if args.command in ("plan", "doctor"):
        gc.disable()  # most of what these do is to import, of which looking for garbage is a fifth
    try:
        return _dispatch(args, rest, arguments) or 0
    except UserError as error:
        _say_once(str(error))
        # Other ranks may wait in a collective for this one: leave without the interpreter's orderly shutdown.
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            os._exit(2)
        return 2
    except KeyboardInterrupt:
        print("megatron-rl: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise
        from megatron_rl.distributed.collective_errors import lost_contact

        problem = lost_contact(error)
        if problem is None:
            raise
        _say_once(problem)
        os._exit(1)  # the groups are broken: taking them down would wait for the others
    finally:
        if collects:
            gc.enable()
        if is_program and args.command in ("plan", "doctor"):
            gc.freeze()  # or the interpreter looks through all that was imported once more as it ends
        if umask is not None:
            os.umask(umask)


def _say_once(problem: str) -> None:
    """An error of this process on the console, whatever its rank; one that all processes of a machine have is said once.

    torchrun ends the others as soon as one ends: rank 0 alone may never come to say it.
    """
    rank = os.environ.get("RANK", "0")
    claims = None
    if error_file := os.environ.get(
        "TORCHELASTIC_ERROR_FILE"
    ):  # torchrun's: FOLDER/RUN/attempt_N/LOCAL_RANK/error.json
        claims = Path(error_file).parents[1]
    elif job := os.environ.get("SLURM_JOB_ID"):
        claims = Path(tempfile.gettempdir()) / f"megatron-rl-{os.getuid()}-{job}.{os.environ.get('SLURM_STEP_ID', '0')}"
        claims /= os.environ.get("SLURM_RESTART_COUNT", "0")
    if claims is not None:
        try:
            claims.mkdir(parents=True, exist_ok=True)
            (claims / hashlib.sha256(problem.encode()).hexdigest()[:16]).open("x").close()
        except FileExistsError:
            if claims.is_dir() and claims.stat().st_uid == os.getuid():  # in /tmp it may be somebody else's
                return
        except OSError:
            pass  # rather twice than never
    of_rank = f" (rank {rank})" if rank != "0" else ""
    print(f"megatron-rl: error{of_rank}: {hide(' '.join(problem.splitlines()))}", file=sys.stderr, flush=True)


def _dispatch(args: argparse.Namespace, rest: list[str], arguments: list[str]) -> int | None:
    attributes = args.command == "report" and args.attribute
    if rest and args.command not in (*KINDS, "certify", "plan", "launch") and not attributes:
        raise UserError(f"unknown argument '{rest[0]}'; see megatron-rl {args.command} --help")
    if args.command == "doctor":
        from megatron_rl.run.doctor import doctor

        return doctor(as_json=args.json)
    if args.command == "keys":
        from megatron_rl.config.reference import print_keys

        return print_keys(args.prefix)
    if args.command == "status":
        from rich.console import Console

        from megatron_rl.report.status import as_json, as_table, status_of

        found = [status_of(Path(run)) for run in args.run]
        if args.json:
            print(json.dumps([as_json(one) for one in found], indent=2))
        else:
            for one in found:
                Console().print(as_table(one))
        return None
    if args.command == "report":
        from rich.console import Console

        if args.step is not None and not attributes:
            raise UserError("report: --step goes with --attribute")
        if attributes and needs_torchrun(args.nproc):
            return torchrun(args.nproc, arguments)
        if attributes:
            from megatron_rl.attribute import attribute_command
            from megatron_rl.metrics.attribution import table

            if len(args.run) > 1:
                raise UserError(f"report: --attribute takes one run, found {' '.join(args.run)}; keys go behind it")
            found = attribute_command(Path(args.run[0]), args.step, rest)
            if found is None:
                return None
            Console().print(table(found))
        from megatron_rl.report.page import write_report
        from megatron_rl.report.run_folder import before_after, compared

        folders = [Path(run) for run in args.run]
        page = write_report(folders)
        for table in filter(None, [*map(before_after, folders), compared(folders)]):
            Console().print(table)
        print(f"report: {page}")
        return None
    if args.command == "simulate":
        from megatron_rl.simulate.simulate import simulate_command

        file = Path(args.file) if args.file else None
        return simulate_command(file, [Path(run) for run in args.measured], [Path(run) for run in args.compare])
    if args.command == "convert":
        from megatron_rl.config.load import build_config
        from megatron_rl.data.hub import as_folder

        sizes = {"tensor": args.tensor, "pipeline": args.pipeline, "expert": args.expert}
        parallel = build_config({"parallel": sizes}).parallel
        source = as_folder(args.source, "convert: SOURCE")
        base = as_folder(args.base, "convert: --base") if args.base else None
        if needs_torchrun(args.nproc):
            words = [*arguments]
            for given, folder in ((args.source, source), (args.base, base)):
                if folder and given in words[1:]:  # SOURCE stands before an OUT of the same name
                    words[words.index(given, 1)] = folder
            return torchrun(args.nproc, words)
        from megatron_rl.models.convert import convert

        of_adapters = Path(base) if base else None
        out = convert(Path(source), Path(args.out), parallel, args.quantize, base=of_adapters, adapter=args.adapter)
        if os.environ.get("RANK", "0") == "0":
            print(f"wrote {out}")
        return None

    from megatron_rl.config.load import load_config

    config = load_config(args.config, rest)
    # All that the config says by itself is told before torch and its neighbors are imported, which takes long.
    from megatron_rl.checks.model_folders import overrides_of, with_folders
    from megatron_rl.checks.preflight import check_config
    from megatron_rl.config.plan import OFFLINE

    if args.command == "plan":
        if args.gpus > 0:
            check_config(config, args.run, args.gpus)
        config = with_folders(config, args.run, config_alone=True)
        from megatron_rl.checks.fit import plan_command

        return plan_command(config, args.gpus, args.memory, run=args.run, as_json=args.json)
    if args.command == "launch":
        from megatron_rl.run.slurm import launch_command

        return launch_command(config, args, rest)
    from megatron_rl.tasks.from_config import check_data

    check_data(config.data)
    processes = int(os.environ.get("WORLD_SIZE") or args.nproc)
    if args.command == "certify":
        from megatron_rl.certify.choice import certified

        config = certified(config, args.prompts, args.tokens)
    kind = KINDS.get(args.command, "sample")
    kind = "score" if args.command == "eval" and config.eval.likelihood else kind
    if args.command == "rollout":
        from megatron_rl.checks.keys import check_demonstrations

        check_demonstrations(config)
    check_config(config, kind, processes)
    found = with_folders(config, kind)
    arguments = [*arguments, *overrides_of(config, found)]
    config = found
    if args.command in ("train", *OFFLINE):
        from megatron_rl.sync.allocator import allocator_settings

        os.environ.update(allocator_settings(config, os.environ))
    from megatron_rl.servers.orphans import compiled

    if own := compiled():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", own)
    if needs_torchrun(args.nproc):
        return torchrun(args.nproc, arguments, failing=1 if args.command == "certify" else None)
    if args.command == "certify":
        from megatron_rl.certify.certify import certify_command

        return certify_command(config, args.prompts, args.tokens)
    if args.command == "train":
        from megatron_rl.train import train as command
    elif args.command == "sft":
        from megatron_rl.sft import sft as command
    elif args.command == "reward":
        from megatron_rl.reward_model import reward as command
    elif args.command == "dpo":
        from megatron_rl.dpo import dpo as command
    elif args.command == "prune":
        from megatron_rl.prune import prune as command
    elif args.command == "quantize":
        from megatron_rl.quantize import quantize as command
    elif args.command == "eval" and config.eval.likelihood:
        from megatron_rl.likelihood import likelihood_command as command
    elif args.command == "eval":
        from megatron_rl.evaluate import evaluate_command as command
    elif args.command == "serve-agent":
        from megatron_rl.serve_agent import serve_agent as command
    else:
        from megatron_rl.evaluate import rollout_command as command
    return command(config)


if __name__ == "__main__":
    sys.exit(main())
