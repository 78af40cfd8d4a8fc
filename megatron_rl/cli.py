"""The command line: megatron-rl COMMAND. `COMMANDS` lists the commands."""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import os
import pkgutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl import __version__
from megatron_rl.credentials import hide
from megatron_rl.errors import UserError
from megatron_rl.run.setup import at_hand
from megatron_rl.run.torchrun import needs_torchrun, torchrun
from megatron_rl.servers.supervise import follow_parent

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.config.plan import Kind

BEFORE, LEARN, SEE, MAKE = "Prepare a run", "Train", "Look at a run or a model", "Convert or compress a model"
KEYS = (
    "Every config key is also a flag, --section.key VALUE, which overrides the file. If a flag occurs twice, the last"
    " one counts. `megatron-rl keys` lists all keys."
)

SIZES = ("tensor", "pipeline", "expert")
"""Parallel sizes that a checkpoint conversion accepts."""
Flag = tuple[str, dict[str, Any]]
"""A command-line argument: its name, and its settings for argparse's `add_argument`."""


def _flag(name: str, help: str, **settings: Any) -> Flag:
    return name, {"help": help, **settings}


def _number(name: str, help: str, default: int | None = None, metavar: str = "N", **settings: Any) -> Flag:
    return _flag(name, help, type=int, default=default, metavar=metavar, **settings)


def _switch(name: str, help: str) -> Flag:
    return _flag(name, help, action="store_true")


def _runs(name: str, help: str, **settings: Any) -> Flag:
    return _flag(name, help, type=Path, nargs="+", metavar="RUN", **settings)


def _for(help: str) -> Flag:
    return _flag("--for", help, dest="run", choices=("train", "sft", "reward", "dpo"), default="train")


CONFIG = _flag("config", "YAML file", metavar="CONFIG")
RUNS = _runs("run", "run folder(s): runs/NAME")
RANKS = _number(
    "--nproc", "number of trainer processes on this machine; starts torchrun (do not use it under srun or torchrun)", 1
)


@dataclass(frozen=True)
class Command:
    """One command of the command line."""

    group: str
    """Heading under which the overview lists the command."""
    help: str
    function: str
    """"module:function" that runs the command. The module is imported only when the command runs."""
    flags: tuple[Flag, ...] = (CONFIG, RANKS)
    passes: tuple[str, ...] = ()
    """Names of command-line arguments that the function gets by position, after the config if there is one."""
    more: str = ""
    """More sentences for the command's own help page."""
    overrides: bool = False
    """True if the command accepts config keys as flags."""
    kind: Kind | None = None
    """Kind of run, if the command runs a config on trainer processes; else None."""
    prepare: Callable[[Config, argparse.Namespace], Config] | None = None
    """Function that checks or changes the config before the checks that belong to `kind`."""
    failing: int | None = None
    """Exit status that is a regular result and not a crash, if the command runs on several processes."""
    mostly_imports: bool = False
    """True if the command spends most of its time on imports."""
    call: Callable[[Command, argparse.Namespace, list[str], list[str]], int | None] | None = None
    """Function that runs the command, if the command neither runs a config nor is a plain function call. Its arguments are the
    command, the parsed arguments, the config overrides, and all words of the command line."""


def _trains(group: str, help: str, function: str, kind: Kind, **settings: Any) -> Command:
    return Command(group, help, function, overrides=True, kind=kind, **settings)


def _call(command: Command, args: argparse.Namespace, *first: Any) -> int | None:
    return pkgutil.resolve_name(command.function)(*first, *(getattr(args, name) for name in command.passes))


def _plan(command: Command, args: argparse.Namespace, rest: list[str], _: list[str]) -> int | None:
    from megatron_rl.checks.model_folders import with_folders
    from megatron_rl.checks.preflight import check_config
    from megatron_rl.config.load import load_config

    config = load_config(args.config, rest)
    if args.gpus > 0:
        check_config(config, args.run, args.gpus)
    config = with_folders(config, args.run, config_alone=True)
    from megatron_rl.checks.fit import plan_command

    return plan_command(config, args.gpus, args.memory, run=args.run, as_json=args.json)


def _launch(command: Command, args: argparse.Namespace, rest: list[str], _: list[str]) -> int | None:
    from megatron_rl.config.load import load_config

    launch = pkgutil.resolve_name(f"megatron_rl.run.{args.scheduler}:launch_command")
    return launch(load_config(args.config, rest), args, rest)


def _report(command: Command, args: argparse.Namespace, rest: list[str], arguments: list[str]) -> int | None:
    if args.step is not None and not args.attribute:
        raise UserError("report: --step works only with --attribute; add --attribute")
    if args.attribute:
        if needs_torchrun(args.nproc):
            return torchrun(args.nproc, arguments)
        from rich.console import Console

        from megatron_rl.attribute import attribute_command
        from megatron_rl.metrics.attribution import table

        if len(args.run) > 1:
            runs = " ".join(map(str, args.run))
            raise UserError(f"report: --attribute takes one run, found {runs}; put config keys after --attribute")
        found = attribute_command(args.run[0], args.step, rest)
        if found is None:
            return None
        Console().print(table(found))
    return _call(command, args)


def _convert(command: Command, args: argparse.Namespace, _: list[str], arguments: list[str]) -> int | None:
    from megatron_rl.config.load import build_config
    from megatron_rl.data.hub import as_folder

    parallel = build_config({"parallel": {size: getattr(args, size) for size in SIZES}}).parallel
    source = as_folder(args.source, "convert: SOURCE")
    base = as_folder(args.base, "convert: --base") if args.base else None
    if needs_torchrun(args.nproc):
        words = [*arguments]
        for given, folder in ((args.source, source), (args.base, base)):
            if folder and given in words[1:]:  # the first match is SOURCE, also if OUT has the same name
                words[words.index(given, 1)] = folder
        return torchrun(args.nproc, words)
    convert = pkgutil.resolve_name(command.function)
    of_adapters = Path(base) if base else None
    out = convert(Path(source), Path(args.out), parallel, args.quantize, base=of_adapters, adapter=args.adapter)
    if os.environ.get("RANK", "0") == "0":
        print(f"wrote {out}")
    return None


def _demonstrations(config: Config, _: argparse.Namespace) -> Config:
    from megatron_rl.checks.preflight import check_demonstrations

    check_demonstrations(config)
    return config


def _certified(config: Config, args: argparse.Namespace) -> Config:
    from megatron_rl.certify.choice import certified

    return certified(config, args.prompts, args.tokens)


def _setup(command: Command, args: argparse.Namespace, _: list[str], words: list[str]) -> int | None:
    flags = [flag for flag, settings in command.flags if settings.get("action") == "store_true" and flag in words]
    return pkgutil.resolve_name(command.function)(args.into, flags)


# fmt: off
COMMANDS: dict[str, Command] = {
    "doctor": Command(
        BEFORE, "show what is installed, and which features each missing part disables", "megatron_rl.run.doctor:doctor",
        flags=(_switch("--json", "print JSON"),), passes=("json",), mostly_imports=True,
    ),
    "setup": Command(
        BEFORE, "make the environments that train and serve, with the packages and kernels that are missing here",
        "megatron_rl.run.setup:setup_command", more=" A second call finds nothing to do.",
        flags=(
            _flag("--into", "folder for them where megatron_rl was installed from a wheel (./megatron-rl-VERSION)",
                  type=Path, metavar="FOLDER"),
            _switch("--trainer-only", "leave out SGLang's environment"),
            _switch("--verifiers", "one for data.task: verifiers:NAME too"),
            _switch("--suites", "one with tests of others too, for a checkout"),
            _switch("--gpu", "packages for GPUs too (the default where there is one)"),
            _switch("--no-gpu", "leave them out, also where there is a GPU"),
            _switch("--force", "make the environments again"),
        ),
        call=_setup,
    ),
    "keys": Command(
        BEFORE, "list the config keys with their defaults and meanings", "megatron_rl.config.reference:print_keys",
        flags=(_flag("prefix", "only keys that begin with PREFIX, such as rollout.server", metavar="PREFIX", nargs="?",
                     default=""),),
        passes=("prefix",),
    ),
    "plan": Command(
        BEFORE, "estimate whether a config fits into GPU memory; needs no GPU and no weights",
        "megatron_rl.checks.fit:plan_command", more=" It reads only config.json of model.path.",
        flags=(
            CONFIG,
            _number("--gpus", "number of GPUs that train (default 8)", 8),
            _flag("--memory", "memory of one GPU in GB, 10^9 bytes (default 80)", type=float, default=80, metavar="GB"),
            _for("command to plan for (default train)"),
            _switch("--json", "print JSON, with sizes in bytes"),
        ),
        overrides=True, mostly_imports=True, call=_plan,
    ),
    "simulate": Command(
        BEFORE, "simulate how a step spends its time on a given number of GPUs, from stated or measured costs; needs no"
            " GPU",
        "megatron_rl.simulate.simulate:simulate_command",
        flags=(
            _flag("file", "YAML file with the modes to compare, the response lengths and the costs (see docs/simulation.md in"
                " the repository)", type=Path, metavar="FILE", nargs="?"),
            _runs("--from", "run folder(s) from which the costs are measured", dest="measured", default=[]),
            _runs("--compare", "run folder(s) whose step times are predicted and compared with the measured times", default=[]),
        ),
        passes=("file", "measured", "compare"),
    ),
    "sft": _trains(
        LEARN, "run supervised fine-tuning on demonstrations, or continued pretraining on texts", "megatron_rl.sft:sft", "sft",
    ),
    "reward": _trains(
        LEARN, "train a reward model or a process reward model on preferences",
        "megatron_rl.reward_model:reward", "reward",
    ),
    "dpo": _trains(
        LEARN, "train a policy on preferences without a reward model: DPO, IPO, KTO", "megatron_rl.dpo:dpo", "dpo",
    ),
    "train": _trains(
        LEARN, "train a policy by reinforcement learning; resumes from the run's newest checkpoint",
        "megatron_rl.train:train", "train",
    ),
    "launch": Command(
        LEARN, "run a config on a cluster: write the job for SLURM, Kubernetes or SkyPilot, and submit it",
        "megatron_rl.run.slurm:launch_command",
        flags=(
            _flag("scheduler", "scheduler of the cluster; skypilot only with --dry-run",
                  choices=("slurm", "kubernetes", "skypilot")),
            _flag("config", "YAML file; for slurm, all nodes must see it", metavar="CONFIG"),
            _for("command to run (default train)"),
            _number("--nodes", "number of nodes; on one node, trainer and SGLang servers share it", required=True),
            _number("--gpus-per-node", "number of GPUs per node (default 8); 0: none", 8),
            _number("--train-nodes", "number of nodes that train; the others run SGLang servers (default half)"),
            _number("--server-gpus", "number of GPUs per SGLang server (default rollout.server.tensor)"),
            _number("--grace", "seconds that the trainer gets to save and stop: before the time limit (slurm), or when its pod"
                    " is removed (kubernetes); default 600", 600, "S"),
            _switch("--dry-run", "print the job without submitting it"),
            _flag("--time", "slurm: time limit of the job, after which it is requeued (default 24:00:00)", default="24:00:00"),
            _flag("--account", "slurm: sbatch's --account"),
            _flag("--partition", "slurm: sbatch's --partition"),
            _flag("--container", "slurm: container image for pyxis", metavar="IMAGE"),
            _flag("--mounts", "slurm: container mounts for pyxis (default: the checkout)"),
            _flag("--option", "slurm: further sbatch option, repeatable: --option=--qos=high", action="append", default=[],
                  metavar="OPTION"),
            _flag("--mount-path", "kubernetes, skypilot: folder at which machines see the volume (default /shared)",
                  default="/shared", metavar="PATH"),
            _flag("--image", "kubernetes: container image with a checkout and its two environments"),
            _flag("--pvc", "kubernetes: PersistentVolumeClaim that all pods can write (ReadWriteMany)", metavar="NAME"),
            _flag("--namespace", "kubernetes: namespace (default: kubectl's)", metavar="NAME"),
            _flag("--secret", "kubernetes: Secret whose keys become environment variables, repeatable", action="append",
                  default=[], metavar="NAME"),
            _flag("--queue", "kubernetes: queue of Kueue", metavar="NAME"),
            _number("--max-restarts", "kubernetes: restarts after which the JobSet fails (default 20)", 20),
            _flag("--accelerator", "skypilot: name of the GPU, such as H100", metavar="NAME"),
            _flag("--volume", "skypilot: volume for models, data and runs", metavar="NAME"),
        ),
        overrides=True, call=_launch,
    ),
    "status": Command(
        SEE, "show the state of a run", "megatron_rl.report.status:status_command",
        flags=(RUNS, _switch("--json", "print JSON")), passes=("run", "json"),
    ),
    "report": Command(
        SEE, "write an HTML page about one or several runs: curves and sample rollouts",
        "megatron_rl.report.page:report_command",
        flags=(
            RUNS,
            _switch("--attribute", "attribute the mismatch to its sources: score a recorded batch again with one source removed"
                    " at a time, and print the shares. Keys of the run's config can be overridden (--parallel.expert 1)"),
            _switch("--upload", "attach the page to each run in those of its trackers (logging.trackers) that store files"),
            _number("--step", "recorded step to attribute, counted from 0 (default: the newest)"),
            _number("--nproc", "number of processes on this machine, for --attribute", 1),
        ),
        passes=("run", "upload"), call=_report,
    ),
    "eval": _trains(
        SEE, "score the model on held-out prompts, sampled and greedy; with eval.likelihood: true, measure the"
            " likelihood of held-out demonstrations or texts without SGLang", "megatron_rl.evaluate:evaluate_command", "sample",
    ),
    "rollout": _trains(
        SEE, "sample the prompts of one step and write the trajectories, without training",
        "megatron_rl.evaluate:rollout_command", "sample", prepare=_demonstrations,
    ),
    "serve-agent": _trains(
        SEE, "serve the model to agents that use the OpenAI API, and record their conversations, until interrupted",
        "megatron_rl.serve_agent:serve_agent", "sample",
    ),
    "certify": _trains(
        SEE, "check that trainer and SGLang compute the same log-probs to the last bit; if not, name the first"
            " operator that differs", "megatron_rl.certify.certify:certify_command", "sample",
        flags=(
            CONFIG,
            _number("--prompts", "number of the task's prompts to compare on (default 8)", 8),
            _number("--tokens", "number of tokens of the longest response (default 32)", 32),
            _number("--nproc", "number of trainer processes on this machine", 1),
        ),
        passes=("prompts", "tokens"), more=" The result is a page in the run's folder.", prepare=_certified, failing=1,
    ),
    "prune": _trains(
        MAKE, "make a smaller or sparser model: remove the parts that matter least on the task's demonstrations or"
            " texts",
        "megatron_rl.prune:prune", "prune",
    ),
    "quantize": _trains(
        MAKE, "quantize a model for SGLang: calibrate on data, and measure the difference from the original",
        "megatron_rl.quantize:quantize", "quantize",
    ),
    "convert": Command(
        MAKE, "convert between Hugging Face safetensors and Megatron checkpoints; merge or export adapters; export FP8"
            " weights",
        "megatron_rl.models.convert:convert",
        more=" A single process without a GPU needs memory for a few tensors only, whatever the model's size. The"
            " output is read again, and the checksum of every tensor is verified.",
        flags=(
            _flag("source", "Hugging Face folder or id (owner/name), folder of PEFT adapters, or checkpoint folder step_N",
                  metavar="SOURCE"),
            _flag("out", "output folder; it must not exist yet", metavar="OUT"),
            *(_number(f"--{way}", f"{way} parallel size of the conversion", 1) for way in SIZES),
            _flag("--quantize", "write a Hugging Face folder with block-quantized FP8 weights", choices=("fp8",)),
            _flag("--base", "folder or id of the adapters' base model, if it is not at its recorded place",
                  metavar="FOLDER"),
            _switch("--adapter", "for a checkpoint with adapters: write only the adapters, in PEFT's format"),
            _number("--nproc", "number of processes on this machine", 1),
        ),
        call=_convert,
    ),
}
# fmt: on
"""All commands by name, in the order of the overview."""


def _overview() -> str:
    lines = []
    for title in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{title}:"]
        for name, command in COMMANDS.items():
            if command.group == title:
                lines += textwrap.wrap(command.help, 100, initial_indent=f"  {name:<12} ", subsequent_indent=" " * 15)
    return "\n".join([*lines, "", "megatron-rl COMMAND --help describes a command and its flags."])


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        usage="megatron-rl [--help] [--version] COMMAND ...",
        description="megatron-rl trains language models by reinforcement learning, in particular\nMixture-of-Experts"
        " models: Megatron-Core trains, SGLang samples.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help="one of the commands below")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            prog=f"megatron-rl {name}",
            description=f"{command.help[0].upper()}{command.help[1:]}.{command.more}",
            epilog=KEYS if command.overrides else None,
            allow_abbrev=False,
        )
        for argument, settings in command.flags:
            own.add_argument(argument, **settings)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 for a failed certificate, 2 after a one-line error for the user."""
    is_program, arguments = arguments is None, sys.argv[1:] if arguments is None else arguments
    args, rest = make_parser().parse_known_args(arguments)
    # Run folders hold prompts, responses and weights, so only the user may read them; child processes inherit this mask. A
    # converted folder has the user's usual permissions, like a copy.
    umask = None if args.command == "convert" else os.umask(0o077)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a killed torchrun would leave its processes behind
        follow_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.WARNING, format="megatron-rl: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # its start-up notes hide this package's lines
    collects = gc.isenabled()
    if COMMANDS[args.command].mostly_imports:
        gc.disable()  # garbage collection takes a fifth of the time of imports
    try:
        if find_spec("megatron_rl_plugin") is None:
            raise UserError(
                f"megatron-rl-sglang is not installed: run tools/setup.sh, or {sys.executable} -m pip install"
                " --no-deps ./sglang_plugin"
            )
        if find_spec("torch") is None:  # or transformers says that it has none
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        return _dispatch(args, rest, arguments) or 0
    except UserError as error:
        _say_once(str(error))
        # Other ranks may wait in a collective for this rank: exit without the interpreter's orderly shutdown.
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            os._exit(2)
        return 2
    except ModuleNotFoundError as error:
        if find_spec("megatron") is not None:
            raise
        _say_once(
            f"{args.command} needs the trainer's environment, and this one has no {(error.name or '').partition('.')[0]}:"
            " tools/setup.sh makes it, with a megatron-rl of its own"
        )
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
        os._exit(1)  # the process groups are broken: destroying them would wait for the other ranks
    finally:
        if collects:
            gc.enable()
        if is_program and COMMANDS[args.command].mostly_imports:
            gc.freeze()  # else the interpreter scans all imported objects again at its exit
        if umask is not None:
            os.umask(umask)


def _say_once(problem: str) -> None:
    """Print an error of this process. If several processes of a machine have the same error, only one prints it.

    Any rank may print the error. Rank 0 alone is not enough: torchrun ends all ranks as soon as one of them ends.
    """
    rank = os.environ.get("RANK", "0")
    claims = None
    if error_file := os.environ.get(
        "TORCHELASTIC_ERROR_FILE"
    ):  # set by torchrun: FOLDER/RUN/attempt_N/LOCAL_RANK/error.json
        claims = Path(error_file).parents[1]
    elif job := os.environ.get("SLURM_JOB_ID"):
        claims = Path(tempfile.gettempdir()) / f"megatron-rl-{os.getuid()}-{job}.{os.environ.get('SLURM_STEP_ID', '0')}"
        claims /= os.environ.get("SLURM_RESTART_COUNT", "0")
    if claims is not None:
        try:
            claims.mkdir(parents=True, exist_ok=True)
            (claims / hashlib.sha256(problem.encode()).hexdigest()[:16]).open("x").close()
        except FileExistsError:
            if claims.is_dir() and claims.stat().st_uid == os.getuid():  # in /tmp it may belong to another user
                return
        except OSError:
            pass  # better printed twice than never
    of_rank = f" (rank {rank})" if rank != "0" else ""
    print(f"megatron-rl: error{of_rank}: {hide(at_hand(' '.join(problem.splitlines())))}", file=sys.stderr, flush=True)


def _dispatch(args: argparse.Namespace, rest: list[str], arguments: list[str]) -> int | None:
    command = COMMANDS[args.command]
    if rest and not command.overrides and not getattr(args, "attribute", False):
        raise UserError(f"unknown argument '{rest[0]}'; see megatron-rl {args.command} --help")
    if command.call:
        return command.call(command, args, rest, arguments)
    return _run_config(command, args, rest, arguments) if command.kind else _call(command, args)


def _run_config(command: Command, args: argparse.Namespace, rest: list[str], arguments: list[str]) -> int | None:
    """Run a config on trainer processes. Checks that need only the config come first, before the slow import of torch."""
    from megatron_rl.config.load import load_config

    config = load_config(args.config, rest)
    from megatron_rl.checks.model_folders import overrides_of, with_folders
    from megatron_rl.checks.preflight import check_config
    from megatron_rl.config.plan import OFFLINE
    from megatron_rl.tasks.from_config import check_data

    check_data(config.data)
    if args.command == "eval" and config.eval.likelihood:
        command = replace(command, kind="score", function="megatron_rl.likelihood:likelihood_command")
    if command.prepare:
        config = command.prepare(config, args)
    kind = command.kind or "sample"
    check_config(config, kind, int(os.environ.get("WORLD_SIZE") or args.nproc))
    found = with_folders(config, kind)
    arguments = [*arguments, *overrides_of(config, found)]
    config = found
    if args.command in ("train", *OFFLINE):
        from megatron_rl.sync.allocator import allocator_settings
        from megatron_rl.sync.transports import transport_class

        os.environ.update(allocator_settings(transport_class(config.sync.transport), os.environ))
    from megatron_rl.servers.orphans import compiled

    if own := compiled():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", own)
    if needs_torchrun(args.nproc):
        return torchrun(args.nproc, arguments, failing=command.failing)
    return _call(command, args, config)


if __name__ == "__main__":
    sys.exit(main())
