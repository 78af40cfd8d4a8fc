"""`megatron-rl certify CONFIG`: compares every operator of trainer and engine bit for bit, on the same tokens.

The proof has three parts. The values of a token do not depend on other tokens in the batch (batch invariance); decode equals
prefill; and prefill equals the trainer. It follows that the trainer equals decode, which is measured too. Engine and trainer
use the weights of model.path; nothing is trained, and no weights are synchronized. The engine runs first and ends before the
trainer is built, because both may share GPUs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.certify.certificate import Step, facts_of, outcome, verdict, write
from megatron_rl.certify.choice import certified
from megatron_rl.certify.compare import Recorded, compare, without_log_probs
from megatron_rl.certify.engine_side import EngineRecorder, Sides
from megatron_rl.certify.record import TrainerRecorder
from megatron_rl.config import Config
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.models.hf_folder import check_served
from megatron_rl.run.run import Run
from megatron_rl.servers.local import place_here, visible_names
from megatron_rl.servers.server import RolloutServer
from megatron_rl.tasks import Prompt
from megatron_rl.trainer.trainer import build_trainer

LOG = "certificate.sglang.log"
Side = Mapping[int, Recorded]


def certify_command(config: Config, prompts: int, tokens: int) -> int:
    """Compare engine and trainer, and write the certificate into the run's folder. Every process calls it.

    prompts: number of prompts of the task. tokens: length of the longest response. Returns the exit status: 1 if
    `precision.identical` is on and any step is unequal, else 0. Errors: UserError that names the key, if the config cannot be
    certified.
    """
    config = certified(config, prompts, tokens)
    with Run(config, kind="sample") as run:
        check_served(config.model.path, config.precision.rollout, config.rollout.server, run.hf_config, pushes=False)
        asked = run.stream.next(prompts)
        of_engine: list[Sides] = []  # only on rank 0, because they are large

        def ask() -> list[Trajectory]:
            of_engine.append(_ask(run, asked, tokens))
            return of_engine[0].trajectories

        trajectories = run.ranks.main_does(ask, patient=True)
        run.logger.say("trainer: scoring all sequences together, then each alone")
        recorder = TrainerRecorder(build_trainer(config, run.ranks, total_updates=None, support=run.support))
        trained = recorder.together(trajectories, run.support)
        alone = recorder.alone(trajectories, run.support)
        # The log-probs of a prefill are over the whole vocabulary.
        plain = SamplingSupport()
        as_sampled = run.support == plain
        read = trained if as_sampled else recorder.together(trajectories, plain, operators=False)

        def judge() -> int:
            steps = _steps(of_engine[0], trained, alone, read, as_sampled=as_sampled)
            for step in steps:
                remark = f" ({step.remark})" if step.remark else ""
                run.logger.say(f"{step.name}: {outcome(step.found)}{remark}")
            run.logger.say(verdict(config.precision.identical, steps))
            versions = {name: version(name) for name in ("torch", "megatron-core", "megatron-rl")}
            facts = facts_of(config.model, config.precision, config.parallel, config.rollout.server, versions)
            file = write(run.folder, config.name, facts, config.precision.identical, steps)
            run.logger.say(f"certificate: {file}")
            return int(config.precision.identical and not all(step.found.equal for step in steps))

        return run.ranks.main_does(judge, patient=True)
    return 0  # reached only if the run was asked to stop


def _steps(sides: Sides, trained: Side, alone: Side, read: Side, *, as_sampled: bool) -> list[Step]:
    """Return the steps of the proof, in order.

    read: the trainer's recording with log-probs over the whole vocabulary, as in a prefill. as_sampled: True if sampling was
    over the whole vocabulary too.
    """
    decoded = sides.decode if as_sampled else {n: without_log_probs(one) for n, one in sides.decode.items()}
    as_read = {n: replace(one, log_probs=read[n].log_probs) for n, one in trained.items()}
    return [
        Step(
            "engine: prefill alone = among others",
            "each sequence as a single prompt; all sequences in one batch",
            compare(sides.prefill_alone, sides.prefill),
        ),
        Step(
            "engine: decode alone = among others",
            "each response sampled alone; all in one batch, with the same seeds",
            compare(sides.decode_alone, sides.decode),
        ),
        Step(
            "engine: decode = prefill",
            "responses as they were sampled; the same read as prompts",
            compare(decoded, sides.prefill),
        ),
        Step(
            "engine: prefix cache",
            "sequences whose beginning is in the prefix cache; the same without cache",
            compare(sides.cached, sides.prefill),
            f"{sides.from_cache} tokens from the cache",
        ),
        Step(
            "engine: retracted requests",
            "responses whose cache was released during sampling; the same without interruption",
            compare(sides.retracted, sides.decode),
            f"{sides.computed_again} of {len(sides.retracted)} were computed again",
        ),
        Step(
            "trainer: alone = among others",
            "each sequence in its own micro-batch; all sequences packed together",
            compare(alone, trained),
        ),
        Step("trainer = prefill", "the trainer; the engine's prefill", compare(as_read, sides.prefill)),
        Step("trainer = decode", "the trainer; the engine while it sampled", compare(trained, sides.decode)),
    ]


def _ask(run: Run, prompts: list[Prompt], tokens: int) -> Sides:
    config = run.config
    room = config.rollout.context_length - max(len(prompt.tokens) for prompt in prompts) - 1
    longest = max(2, min(tokens, room))
    # Mixed lengths, so that some requests end while others continue.
    lengths = [longest - (longest // 2) * n // max(1, len(prompts)) for n in range(len(prompts))]
    with tempfile.TemporaryDirectory(prefix="certify-", dir=run.folder) as folder:
        trace = Path(folder) / "trace"
        trace.mkdir()
        [gpus, *_] = place_here(config.rollout, trains=False)
        run.logger.say(f"engine: loading {config.model.path}")
        server = RolloutServer.from_config(
            config,
            log_path=run.folder / LOG,
            devices=visible_names(gpus),
            trace=trace,
        )
        with server:
            recorder = EngineRecorder(
                server, trace, run.support, timeout_s=config.rollout.request_timeout_s, say=run.logger.say
            )
            return recorder.run(prompts, lengths, config.seed)
