"""A training run on this process. It builds all objects that the training loops share, in an order that finds errors early."""

from __future__ import annotations

import gc
import random
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig

from megatron_rl.agents.programs import rollout_program
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.eval_sets import eval_sets, held_out_questions, question
from megatron_rl.checks.model_folders import check_alike, model_places, with_ids
from megatron_rl.checks.preflight import preflight
from megatron_rl.checks.rl_rules import loss_hints
from megatron_rl.config import Config, LoRAConfig
from megatron_rl.config.conditions import unread
from megatron_rl.config.load import changed_keys, to_yaml
from megatron_rl.config.plan import OFFLINE, READ_ONLY, Kind, critic_config, reference_of, total_updates
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.distributed import parallel
from megatron_rl.distributed.parallel import Interrupt
from megatron_rl.errors import StopRequested, UserError
from megatron_rl.metrics.logger import RunLogger
from megatron_rl.models.hf_folder import read_tokenizer
from megatron_rl.models.precision import slow_bf16, this_machine
from megatron_rl.rewards.rewards import Rewards, names_of
from megatron_rl.rewards.shaping import set_outcome_rewards
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.rollout.sample_journal import PENDING, delete_journal
from megatron_rl.run.run_lock import lock, make_private
from megatron_rl.run.update_hooks import data_hooks, update_hooks
from megatron_rl.tasks import Prompt, PromptStream, build_task
from megatron_rl.tasks.stream import check_forms
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.critic import Critic
from megatron_rl.trainer.kl_control import KLControl
from megatron_rl.trainer.trainer import TEACHER, Trainer, build_trainer

T = TypeVar("T")
_MANY_OBJECTS = 300_000
"""If `build` leaves more old objects than this, garbage collection no longer scans them. Imports alone make half a million."""


class Stateful(Protocol):
    """An object of the loop whose state is saved in checkpoints, under its own keys (like torch's Stateful)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as {key: value}."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. The keys are missing in a new run, and may be missing in a checkpoint of an earlier version."""
        ...


class Clock:
    """Measures how long each part of one training step takes, in seconds, and can record a profiler trace of the step."""

    def __init__(self, trace: Path | None = None) -> None:
        """Start the clock. trace: profiler trace file in Chrome's format (chrome://tracing, Perfetto), which `times` writes."""
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}
        self._inside = 0.0
        """Seconds spent in parts that ran inside the current part and have finished."""
        self._trace, self._profiler = trace, None
        if trace:
            self._profiler = torch.profiler.profile()  # of the CPU, and of the GPU if there is one
            self._profiler.start()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure a part of the step. The time of a nested part counts for the nested part only."""
        start, before, self._inside = time.perf_counter(), self._inside, 0.0
        with torch.profiler.record_function(part) if self._profiler else nullcontext():
            yield
        seconds = time.perf_counter() - start
        self._parts[part] = self._parts.get(part, 0.0) + seconds - self._inside
        self._inside = before + seconds

    def times(self) -> dict[str, float]:
        """Return time/PART_s for each part, time/other_s for the time outside all parts, and time/step_s for the whole step."""
        total = time.perf_counter() - self._start
        if self._profiler and self._trace:
            self._profiler.stop()
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._trace))
            self._profiler = None
        times = {f"time/{part}_s": seconds for part, seconds in self._parts.items()}
        return {**times, "time/other_s": max(0.0, total - sum(self._parts.values())), "time/step_s": total}


class Run:
    """Model, trainer, data and log of one run: a context manager that writes the checkpoint that is due and closes everything.

    The constructor checks the user's input, and `build` creates the trainer, which takes long. A rollout engine starts its
    servers between these two calls.

    Public fields: config, plan, ranks, hf_config, tokenizer, task, program, stream, eval_sets, trainer, logger, step,
    current_clock.
    """

    trainer: Trainer
    """The trainer. Set by `build`."""
    stream: PromptStream
    """Training prompts. Not set for a run that only scores."""

    def __init__(self, config: Config, *, kind: Kind) -> None:
        self.config = config
        self.kind: Kind = kind
        self.hf_config, self.plan, self.support = preflight(config, kind)
        self.ranks = parallel.initialize(config.parallel, config.seed)
        first = self.ranks.main_does(lambda: model_places(with_ids(config)))
        self.ranks.all_do(lambda: check_alike(model_places(with_ids(config)), first))
        self.tokenizer = read_tokenizer(config.model.path)
        program = rollout_program(config.rollout.program)
        self.task = build_task(
            config.data,
            demonstrations=kind in ("sft", "prune", "score", "quantize"),
            preferences=kind in ("reward", "dpo"),
            more_parts=program.parts,
            later_parts=[] if kind in OFFLINE else names_of(config.rewards),
        )
        self.program = program(config, self.tokenizer, self.task, self.ranks)
        lengths = (config.rollout.context_length, config.rollout.max_new_tokens)
        if kind != "score":
            self.stream = PromptStream(self.task, self.program, *lengths, seed=config.data.seed)
            check_forms(self.stream.prompts, self.program, _learned(self.program, kind))
        self.eval_sets = eval_sets(config.data, config.eval, config.rollout, config.rewards, kind, self.program)
        if kind != "score" and (unseen := held_out_questions(self.eval_sets)):
            self.stream.leave_out(lambda prompt: question(prompt, config.data.template) in unseen)
        if kind not in OFFLINE:
            self.stream.check_room()
        if kind == "sft":
            self.stream.check_demonstrations(taught=config.distillation.recorded)
        for one in self.eval_sets:
            check_forms(one.held_out, one.program, _learned(one.program, kind))
        self.folder = config.run_dir
        self.checkpoints = self.folder / "checkpoints"
        self._lock: TextIO | None = None
        self._changes: list[str] = []
        self.id = self.ranks.main_does(self._open_folder)
        """Random id of the run, the same on all its processes and after a resume; empty for a read-only kind of run."""
        found = (
            [] if kind in READ_ONLY else self.ranks.main_does(lambda: checkpoint.complete_checkpoints(self.checkpoints))
        )
        self._found = found[-1] if found else None
        self._frozen = False
        self.step = checkpoint.step_of(self._found) if self._found else 0
        self.scores: dict[int, float] = {}
        """{evaluated step: its eval/score}. For runs that learn from data alone: -eval/loss."""
        self.idle_steps = 0
        """Number of consecutive steps, up to the latest, in which all updates were skipped."""
        self.kl = KLControl(config.algorithm.kl)
        self.rewards = Rewards(
            config.rewards,
            self.ranks,
            self.task,
            max_new_tokens=config.rollout.max_new_tokens,
            tokenizer=None if config.rollout.load else self.tokenizer,
            zero_truncated=config.zero_truncated,
            shape=partial(
                set_outcome_rewards,
                config.rewards,
                config.data.rewards,
                self.ranks,
                process=config.process_rewards,
                bootstraps=config.bootstraps_truncated,
            ),
            folder=self.folder / "judgments" if kind == "train" else None,
        )
        if kind in ("train", "sample"):
            self.rewards.check([self.stream.prompts[0], *(one.prompts[0] for one in self.eval_sets if one.prompts)])
        self.critic: Critic | None = None
        """The critic of PPO. Set by `build`; None if the advantages need no critic."""
        self.current_clock = Clock()
        self._loaded: dict[str, Any] = {}
        """State that the loaded checkpoint holds for the objects of the training loop."""
        self._stateful: list[Stateful] = []
        """Objects of the training loop whose state is saved in checkpoints."""
        self._saved_at = self.step if self._found or kind in READ_ONLY else -1
        self._saving: checkpoint.Save | None = None
        """The checkpoint that is being written in the background."""
        writes = {"active": self.ranks.rank == 0, "exports": kind not in READ_ONLY}
        self.logger = RunLogger(self.folder, config, resume_step=self.step, **writes)
        self._stop = False
        self._before_step: tuple[dict[str, Any], dict[str, Any]] | None = None
        """Random states, and running statistics of the rewards, at the start of the current step."""
        self.interrupt = Interrupt(self.ranks, self.asked_to_stop, deep=config.parallel.pipeline == 1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def build(self) -> Trainer:
        """Build the trainer, and load the newest checkpoint if there is one (all ranks)."""
        config, training = self.config, self.kind == "train"
        self.trainer = build_trainer(
            config,
            self.ranks,
            total_updates=total_updates(
                config.steps, config.batch, config.algorithm.advantage, config.critic, self.kind
            ),
            support=self.support if training else SamplingSupport(),
            hooks=update_hooks(config) if training else data_hooks(config.model),
            value_head=self.kind == "reward",
            reference=reference_of(config.model.path, config.dpo, config.policy_reference, self.kind),
        )
        if training and config.algorithm.advantage == "gae":
            self._build_critic()
        if training:
            self.build_scorers()
            self.trainer.add_companions(self.rewards.models)
            self.trainer.watch(self.interrupt)
        if config.distillation.teacher and self.kind in ("train", "sft"):
            self.trainer.add_companions({TEACHER: self.scorer(config.distillation.teacher)})
        if self._found:
            state = checkpoint.load(self._found, self.trainer, self.ranks)
            self.stream.load_state_dict(state["extra"]["stream"])
            self.scores = state["extra"].get("scores", {})
            self.kl.load_state_dict(state["extra"].get("kl", self.kl.state_dict()))
            self.rewards.load_state_dict(state["extra"].get("rewards", {}))
            self._loaded = state["extra"]
        elif config.checkpoint.load:
            checkpoint.load_weights(Path(config.checkpoint.load), self.trainer)
        # Most objects belong to modules, and each garbage collection would scan them on every rank. A parent process that
        # forks may have frozen them already.
        if len(gc.get_objects(generation=2)) > _MANY_OBJECTS:
            gc.collect()
            gc.freeze()
            self._frozen = True
        return self.trainer

    def _build_critic(self) -> None:
        own = critic_config(self.config)
        trainer = build_trainer(
            own,
            self.ranks,
            total_updates=own.steps * own.batch.updates,
            support=SamplingSupport(),
            value_head=True,
        )
        self.trainer.add_companions({"critic": trainer})
        self.critic = Critic(trainer, own.critic.clip)

    def build_scorers(self) -> None:
        """Load the reward models that run on the trainer's processes (all ranks)."""
        self.rewards.build(lambda folder: self.scorer(folder, value_head=True))

    @property
    def trains_policy(self) -> bool:
        """True if the current step trains the policy. The first critic.warmup_steps steps train only the critic."""
        return self.critic is None or self.step >= self.config.critic.warmup_steps

    def scorer(self, folder: str, *, value_head: bool = False, plain: bool = False) -> Trainer:
        """Build a frozen model from another folder with the policy's parallel layout, for forward passes only (all ranks).

        plain: see `build_trainer`.
        """
        model = replace(self.config.model, path=folder, freeze=[], keep_zeros=False, attention_sinks="exact")
        config = replace(self.config, model=model, lora=LoRAConfig())
        support = SamplingSupport()
        return build_trainer(
            config, self.ranks, total_updates=None, support=support, value_head=value_head, plain=plain
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        if self.ranks.rank == 0:
            for line in self.plan.lines(self.kind):
                self.logger.say(line)
            sides = {
                "trains": self.kind not in READ_ONLY,
                "rolls_out": self.kind not in OFFLINE and not self.config.rollout.external,
            }
            if hint := slow_bf16(self.config.precision, this_machine(), **sides):
                self.logger.say(hint)
            if ignored := unread(self.config, self.kind):
                self.logger.say(f"warning: {self.kind} ignores these config keys: {', '.join(ignored)}")
            for hint in loss_hints(self.config.algorithm) if self.kind == "train" else ():
                self.logger.say(hint)
            if self.step:
                self.logger.say(f"resumed at step {self.step}")
                if self._changes:
                    self.logger.say(f"config keys that changed since the run's last start: {', '.join(self._changes)}")
        return self

    def __exit__(self, kind: type | None, *_: object) -> bool:
        stopped = kind is not None and issubclass(kind, StopRequested)
        if stopped:
            self.logger.say(f"stop requested in step {self.step + 1}; the step starts again when the run is resumed")
            self._undo_step()
            kind = None
        try:
            if kind is KeyboardInterrupt and self.kind not in READ_ONLY:
                self._say_what_is_lost()
            if kind is None:
                if self._saved_at != self.step:
                    self.save()
                self.finish_save()
        finally:
            if self._frozen:
                gc.unfreeze()
            self.logger.close()
            self.program.close()
            for task in {self.task, *(one.program.task for one in self.eval_sets)}:
                task.close()
            if self._lock:
                self._lock.close()
            if kind is None:
                parallel.shutdown()
        return stopped

    def _say_what_is_lost(self) -> None:
        found = checkpoint.complete_checkpoints(self.checkpoints)
        if found:
            saved = checkpoint.step_of(found[-1])
            going_on = (
                f"the newest checkpoint is of step {saved}; later steps are lost. The same command resumes from it"
            )
        else:
            going_on = "there is no checkpoint, and the same command starts again from the beginning"
        self.logger.say(f"interrupted in step {self.step + 1}: {going_on} (to save before stopping, send SIGTERM)")

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True

    def begin_step(self) -> None:
        """Mark the start of a step. The step can be abandoned until it changes something (all ranks)."""
        self._before_step = checkpoint.random_states(), self.rewards.state_dict()
        self.interrupt.arm()

    def _undo_step(self) -> None:
        if self.interrupt.armed and self._before_step is not None:
            random, rewards = self._before_step
            checkpoint.set_random_states(random)
            self.rewards.load_state_dict(rewards)
        self.interrupt.disarm()

    @property
    def evaluates(self) -> bool:
        """True if at least one evaluation set has prompts."""
        return any(one.prompts for one in self.eval_sets)

    def asked_to_stop(self) -> bool:
        """Return whether this process was asked to stop (SIGTERM, SIGUSR1)."""
        return self._stop

    def stop_requested(self) -> bool:
        """Return whether any process was asked to stop, so that the run must save and end (all ranks)."""
        return bool(self.ranks.maximum(int(self._stop)))

    def _open_folder(self) -> str:
        """Lock the run's folder for writing, store the config there, and return the run's id.

        Read-only kinds of runs do not lock the folder and keep an existing config.
        """
        file, text = self.folder / "config.yaml", to_yaml(with_ids(self.config))
        try:
            make_private(self.folder)
            if self.kind in READ_ONLY and self.kind != "prune":
                if not file.exists():
                    file.write_text(text)
                return ""
            self._lock = lock(self.folder)
            self._changes = changed_keys(file, text)
            file.write_text(text)
            identity = self.folder / "run_id"
            known = identity.read_text(errors="replace").strip() if identity.exists() else ""
            if not re.fullmatch(r"[0-9a-f]{16}", known):  # a new run, or a file damaged by a power cut
                known = secrets.token_hex(8)
                identity.write_text(known)
            return known
        except OSError as error:
            raise UserError(
                f"run folder {self.folder}: {error.strerror}; set runs_dir to a folder where you can write files"
            ) from None

    def clock(self) -> Clock:
        """Return the clock of a new step. Rank 0 also records a profiler trace in the steps of logging.profile_steps."""
        traced = self.ranks.rank == 0 and self.step + 1 in self.config.logging.profile_steps
        self.current_clock = Clock(self.folder / "profile" / f"step_{self.step + 1}.json.gz" if traced else None)
        return self.current_clock

    def end_step(self) -> None:
        """Increase the step number after the updates of a step."""
        self.step += 1

    def record_idle(self, steps: int) -> None:
        """Store the number of consecutive steps, up to the latest, in which all updates were skipped."""
        self.idle_steps = steps

    def record_score(self, score: float) -> None:
        """Store the score of the current weights. The scores decide which checkpoints are kept as the best."""
        self.scores[self.step] = score

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def due(self, every: int) -> bool:
        """Return whether an action that runs every `every` steps is due now. 0: only after the last step."""
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def keep_state_of(self, *objects: Stateful) -> None:
        """Restore the state of these objects from the loaded checkpoint, and save their state in each checkpoint."""
        for stateful in objects:
            stateful.load_state_dict(self._loaded)
        self._stateful += objects

    def checkpoint(self, prepare: Callable[[], None] = lambda: None) -> None:
        """After a step, finish a background save whose files are written, and save if a checkpoint is due (all ranks).

        prepare: called before a save. If an engine shares the trainer's GPUs, `prepare` brings the whole trainer back onto
        them.
        """
        if self._saving is not None and self._saving.written():
            self.finish_save()
        if self.due(self.config.checkpoint.every):
            prepare()
            self.save()

    def save(self) -> None:
        """Write a complete checkpoint of the current step, or start to write it. A save in progress is finished first."""
        self.finish_save()
        extra = {
            "stream": self.stream.state_dict(),
            "kind": self.kind,
            "scores": self.scores,
            "kl": self.kl.state_dict(),
            "rewards": self.rewards.state_dict(),
        }
        for stateful in self._stateful:
            extra |= stateful.state_dict()
        settings = self.config.checkpoint
        arguments = (self.checkpoints, self.step, self.trainer, self.ranks, extra, settings.keep)
        self._saving = checkpoint.Save(*arguments, best=self._best(), background=settings.async_save)
        self._saved_at = self.step
        if not settings.async_save:
            self.finish_save()

    def _best(self) -> list[int]:
        """Return the steps of the best-scored checkpoints, including the current step. Of equal scores, later steps win."""
        saved = self.ranks.main_does(
            lambda: [checkpoint.step_of(p) for p in checkpoint.complete_checkpoints(self.checkpoints)]
        )
        scored = [step for step in {*saved, self.step} if step in self.scores]
        best = sorted(scored, key=lambda step: (self.scores[step], step))[-self.config.checkpoint.keep_best :]
        if not self.config.checkpoint.keep_best or not best:
            return []
        if self.step in self.scores:
            score = self.scores[best[-1]]
            of = f"eval/loss {-score:.4g}" if self.kind in OFFLINE else f"eval/score {score:.4g}"
            self.logger.say(f"best checkpoint: step {best[-1]}, {of}")
        return best

    def finish_save(self) -> None:
        """Wait until a save in progress is complete (all ranks)."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish(self.config.checkpoint.timeout_s)
            if self.ranks.rank == 0:
                delete_journal(self.folder / PENDING, checkpoint.step_of(saving.path))

    def save_hf(self) -> Path:
        """Write the current weights to the run's folder in Hugging Face format (`hf`), and LoRA adapters also to `adapter`."""
        out = self.folder / "hf"
        self.trainer.save_hf(out)
        if self.config.lora.rank:
            self.trainer.save_adapter(self.folder / "adapter")
        return out

    def stop_tokens(self) -> list[int]:
        """Return the ids of the tokens that end a response.

        They come from the model's generation config, from the tokenizer, and from the end of a turn in the chat template.
        """
        generation = GenerationConfig.from_pretrained(self.config.model.path) if self._has_generation_config() else None
        stop = getattr(generation, "eos_token_id", None)
        stop = stop if isinstance(stop, list) else [stop]
        return sorted({t for t in [*stop, self.tokenizer.eos_token_id, *self.program.stop_token_ids] if t is not None})

    def _has_generation_config(self) -> bool:
        return (Path(self.config.model.path) / "generation_config.json").is_file()

    # -- data over ranks ----------------------------------------------------------------------------------------------

    def gather_from_leaders(self, items: list[T]) -> list[T]:
        """Return the leaders' lists, concatenated in the order of data-parallel ranks (all ranks)."""
        return [x for part in self.ranks.gather_from_leaders(items) for x in part]

    def gather_groups(self, trajectories: list[Trajectory], what: Callable[[Trajectory], T]) -> list[list[T]]:
        """Return `what(trajectory)` for the trajectories of all ranks, as one list per prompt (all ranks)."""
        groups: dict[int, list[T]] = {}
        for group, value in self.gather_from_leaders([(t.group_id, what(t)) for t in trajectories]):
            groups.setdefault(group, []).append(value)
        return list(groups.values())

    def mean(self, values: list[float]) -> float:
        """Return the mean over the values of all copies of the model; NaN if there are none (all ranks)."""
        everything = self.gather_from_leaders(values)
        return float(np.mean(everything)) if everything else float("nan")


def _learned(program: SingleTurn, kind: Kind) -> Callable[[Prompt, random.Random], object] | None:
    """Return the function that makes a training example from a prompt; None for kinds of runs that sample responses."""
    if kind not in OFFLINE:
        return None
    return program.comparison if kind in ("reward", "dpo") else program.demonstration
