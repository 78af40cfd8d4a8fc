"""SGLang as the training loop sees it: push the weights, ask for trajectories; a server that dies is started again.

Where servers share the trainer's GPUs (rollout.colocate), these belong to one side at a time, and every verb leaves them
to the side whose turn is next. A step:

    ask      the servers generate                                   the trainer sleeps
    sleep    they give up cache and weights                         then the trainer wakes, scores and updates
    push     they take back their weights, are sent the new ones    the trainer keeps its weights alone, until they are sent
             and take back the cache                                and sleeps

`push`, `wake` and `ask` end with the engine awake, `sleep` and `collect` with the trainer awake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedConfig

from megatron_rl.config import Config, RoutingConfig
from megatron_rl.data.record import file_of, load_trajectories, save_trajectories
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.environments import Prompt, combine, score
from megatron_rl.errors import UserError
from megatron_rl.launch.plan import share_of
from megatron_rl.launch.preflight import Kind, preflight
from megatron_rl.launch.run import Run
from megatron_rl.models import fp8
from megatron_rl.models.parallel_check import architecture
from megatron_rl.models.precision import ROLLOUT_DTYPES
from megatron_rl.rollout.children import ChildServers, place_here
from megatron_rl.rollout.client import EngineLost, SGLangClient
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.external import check_servers
from megatron_rl.rollout.routes import FeatureLayout, RouteLayout, drop_stale_routes, sampled_by
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.rollout.server import DEATH_S, asks_routes, feature_stride
from megatron_rl.sync.checksums import WeightsDigest
from megatron_rl.sync.weight_sync import SERVER_PYTHONPATH, WeightSync
from megatron_rl.trainer.trainer import Trainer

T = TypeVar("T")

TIED_IN_SGLANG = ("DeepseekV3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures for which SGLang 0.5.23 heeds tie_word_embeddings."""
RESTARTS = 3
"""Times that a dead server is started again for one batch of requests, or for one push."""
OF_THE_FOLDERS_DTYPE = ("GptOssForCausalLM",)
"""Architectures whose layers SGLang 0.5.23 makes in the dtype of config.json, whatever --dtype says."""


@dataclass
class EngineStats:
    """Counts since the start of the run."""

    restarts: int = 0
    retries: int = 0
    sync_bytes: int = 0
    """Of the last push."""


class Engine:
    """Servers (children of rank 0, or external), client (of each data-parallel leader) and weight sync (of all ranks).

    Children start on entering, before the trainer is built, so that both load at the same time; `join` connects them. Those
    that share the trainer's GPUs are asleep again before it is built: SGLang sizes its cache by the memory that it finds.
    """

    def __init__(self, config: Config, kind: Kind) -> None:
        # One that only answers has no trainer that would replay its routes, or push predictors to it.
        self.config = config if kind == "train" else replace(config, routing=RoutingConfig())
        self.kind = kind
        self.stats = EngineStats()
        self._stack = ExitStack()
        self._servers: ChildServers | None = None
        self._colocated = config.rollout.colocate and kind == "train" and not config.rollout.load
        self._asleep = self._colocated
        """Whether the servers have left the GPUs to the trainer (the same on every process)."""
        self._trainer: Trainer | None = None
        self.version = 0
        """Step of the weights that the engine has."""
        self._now = 0
        """Step of the trainer's weights, which a restarted server gets."""
        self._weights = ""
        """Digest of the trainer's weights, where recorded routes are written or read."""

    def __enter__(self) -> Engine:
        # What the trainer would refuse should not start a server first.
        hf_config, *_ = preflight(self.config, self.kind)
        rollout = self.config.rollout
        if rollout.load or rollout.addresses:
            return self
        _check_served(self.config, hf_config, pushes=self.kind == "train")
        if int(os.environ.get("RANK", 0)) == 0:
            places = place_here(self.config, trains=self.kind == "train")
            self._servers = ChildServers(self.config, places, pythonpath=[SERVER_PYTHONPATH], sleeps=self._colocated)
            self._stack.push(self._servers)
            try:
                self._servers.start()
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def join(self, run: Run) -> None:
        """Wait until the server answers; make client and weight sync. Every process calls it."""
        self.run = run
        model = run.hf_config.to_dict()
        self._routes = RouteLayout.from_config(model) if asks_routes(self.config) else None
        self._dtype = ROLLOUT_DTYPES[self.config.precision.rollout]
        self._features = FeatureLayout.from_config(model, self._dtype) if feature_stride(self.config) else None
        self._stop_tokens = run.stop_tokens()
        if self.config.rollout.load:
            return
        work = partial(check_servers, self.config, run.hf_config, pushes=self.kind == "train")
        if self._servers:
            work = self._servers.wait_ready
        self._together(work if run.ranks.rank == 0 and not self._colocated else None)
        own = self._servers.addresses if self._servers else None
        addresses = self.config.rollout.addresses or run.ranks.from_main(own)
        rollout = self.config.rollout
        self._client = SGLangClient(
            addresses,
            concurrency=rollout.concurrency,
            timeout_s=rollout.request_timeout_s,
            retries=rollout.retries,
            lost=lambda: self._servers is not None and self._servers.lost(),
        )
        self._sync = WeightSync(
            self.config.sync,
            addresses,
            rollout_dtype=self.config.precision.rollout,
            folder=self.config.run_dir / "sync",
            group=run.ranks.world_group,
            stay_paused=self._colocated,
        )
        self._stack.callback(self._sync.close)
        run.before_saving = self.sleep  # all of the trainer has to be there

    # -- weights ------------------------------------------------------------------------------------------------------

    def push(self, trainer: Trainer, version: int) -> None:
        """Send the trainer's weights to every server and compare checksums; a server that has died is restarted first."""
        self._trainer, self._now = trainer, version
        if not self.config.rollout.load:
            self._revive()
            self._push()
            return
        self.version = version
        trainer.weights_pushed()
        if self._routes is not None:
            digest = WeightsDigest(self._dtype)
            for _ in digest.watch(trainer.export_weights()):
                pass
            self._weights = str(digest)

    def _push(self) -> None:
        """Push the current weights; again, where a server died meanwhile."""
        for attempt in range(RESTARTS + 1):
            try:
                with self._turn("wake"):
                    self._take_turns("weights")
                weights, digest = self._trainer.export_weights(), WeightsDigest(self._dtype)
                if self.config.rollout.record and self._routes is not None:
                    weights = digest.watch(weights)
                self.stats.sync_bytes = self._sync.push(weights, str(self._now)).bytes
                self.version, self._weights = self._now, str(digest)
                self._trainer.weights_pushed()
                with self._turn("wake"):
                    self._take_turns("kv_cache")
                return
            except UserError:  # the same on every process
                if attempt == RESTARTS or not self._revive(DEATH_S):
                    raise

    def _revive(self, patience_s: float = 0.0) -> bool:
        """Restart child servers that are dead, or one that dies within the time. Returns whether (on every process)."""
        dead = self._servers.dead(patience_s) if self._servers else []
        if not (count := self.run.ranks.maximum(len(dead))):
            return False
        if self._colocated:  # a new server measures how much memory is free
            self._trainer.sleep()
            self.run.ranks.barrier()
        self._together(self._servers.restart if self._servers else None)
        self.stats.restarts += count
        return True

    # -- turns on shared GPUs ---------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """The trainer's turn: servers that share its GPUs give up their memory, and all of the trainer is there again."""
        if self._colocated and not self._asleep:
            with self._turn("sleep"):
                self._together(self._servers.sleep if self._servers else None)
                self._asleep = True
                self._trainer.wake()

    def wake(self) -> None:
        """The engine's turn, with the weights that it had; with the trainer's, where these are lost."""
        if not (self._colocated and self._asleep):
            return
        if self._revive() or self.config.sync.refresh.when != "drift":
            self._push()
            return
        try:
            with self._turn("wake"):
                self._take_turns("kv_cache", "weights")
            self._sync.verify()
        except UserError:
            if not self._revive(DEATH_S):
                raise
            self._push()

    def _take_turns(self, *tags: str) -> None:
        """Servers take back the memory with these tags, where they share the trainer's GPUs; with their weights alone, the
        trainer's weights are there too, else nothing of it."""
        if not self._colocated:
            return
        sending = tags == ("weights",)
        self._trainer.sleep(keep_weights=sending)
        self.run.ranks.barrier()  # every process has left its GPU
        if sending:  # of a server that never slept, or was started again
            self._together(partial(self._servers.sleep, "kv_cache") if self._servers else None)
        self._together(partial(self._servers.wake, *tags) if self._servers else None)
        if sending:
            self._trainer.wake(weights_only=True)
        else:
            self._asleep = False

    def _turn(self, name: str) -> AbstractContextManager[None]:
        """A part of the step's time of its own."""
        return self.run.current_clock(name) if self._colocated else nullcontext()

    def _together(self, work) -> None:
        """Run `work` on rank 0; its error is every process's."""
        problem = None
        if work is not None:
            try:
                work()
            except UserError as error:
                problem = str(error)
        problem = self.run.ranks.from_main(problem)
        if problem:
            raise UserError(problem)

    def metrics(self) -> dict[str, float]:
        """Counts since the start of the run, and the size of the last push."""
        return {
            "rollout/restarts": self.stats.restarts,
            "rollout/retries": self.stats.retries,
            "sync/megabytes": self.stats.sync_bytes / 1e6,
        }

    # -- trajectories -------------------------------------------------------------------------------------------------

    def collect(self, prompts: Sequence[Prompt], step: int) -> list[Trajectory]:
        """Trajectories of training step `step` (0-based), with rewards: on each data-parallel leader those of its share of
        the requests (`prompts` are the whole step's), elsewhere none. Every process calls it."""
        rollout = self.config.rollout
        rank = self.run.ranks.data_rank
        self._now = step
        if rollout.load:
            trajectories = self._on_leaders(lambda: self._load(file_of(Path(rollout.load), step, rank)))
            fresh = [t.weights == self._weights for t in trajectories]
        else:
            samples = self.config.batch.samples_per_prompt
            trajectories = self.ask(prompts, self.run.support, samples=samples, with_routes=True)
            fresh = [sampled_by(t, str(self.version)) for t in trajectories]
            if rollout.record and self.run.ranks.is_leader:
                for trajectory, current in zip(trajectories, fresh, strict=True):
                    trajectory.weights = self._weights if current else ""
                save_trajectories(file_of(self.config.run_dir / "rollouts", step, rank), trajectories)
        for trajectory, current in zip(trajectories, fresh, strict=True):  # what is dropped is counted without a route
            drop_stale_routes(trajectory, fresh=current)
        self.sleep()
        return trajectories

    def _on_leaders(self, work: Callable[[], list[T]]) -> list[T]:
        """What `work` gives on a data-parallel leader, nothing elsewhere; one leader's error is every process's."""
        done, problem = [], None
        if self.run.ranks.is_leader:
            try:
                done = work()
            except UserError as error:
                problem = error
        for found in self.run.ranks.gather(problem):
            if found:
                raise found
        return done

    def _load(self, path: Path) -> list[Trajectory]:
        """Recorded trajectories. Errors: UserError where their routes or features are not those of this model."""
        trajectories = load_trajectories(path)
        for number, t in enumerate(trajectories):
            # What the config does not ask for is not used, though it was recorded.
            t.routes = t.routes if self._routes else None
            t.features = t.features if self._features else None
            try:
                self.run.support.check_recorded(t.support)
                if t.routes is not None:
                    self._routes.kept.check(t.routes, len(t.tokens) - 1)
                if t.features is not None:
                    self._features.check(t.features, t.response_length)
            except ValueError as error:
                raise UserError(f"rollout.load: {path}, trajectory {number}: {error}") from None
        return trajectories

    def ask(
        self, prompts: Sequence[Prompt], support: SamplingSupport, *, samples: int, with_routes: bool = False
    ) -> list[Trajectory]:
        """`samples` responses to each of `prompts`, which are the same everywhere, with rewards: on each data-parallel leader
        its share of them, elsewhere none. A group is a prompt's place in `prompts`; several leaders may share it.

        with_routes: also the engine's routes and router features, where the config asks for them.
        Every process calls it. When the child servers die, they are restarted with the current weights, and what was not
        answered is asked again.
        """
        self.wake()
        ranks = self.run.ranks
        total = len(prompts) * samples
        collection = Collection(
            prompts=prompts,
            support=support,
            samples_per_prompt=samples,
            max_new_tokens=self.config.rollout.max_new_tokens,
            share=share_of(total, ranks.data_rank, ranks.data_size) if ranks.is_leader else range(0),
            stop_token_ids=self._stop_tokens,
            routes=self._routes if with_routes else None,
            features=self._features if with_routes else None,
            # Nothing moves before the first update, so that no predictor learns from its trajectories.
            features_from=share_of(total, 0, self.config.batch.updates_per_step).stop,
        )
        attempts = 0
        while True:
            problem: UserError | None = None
            if not collection.complete:
                try:
                    collection.run(self._client)
                except UserError as error:
                    problem = error
            problems = [p for p in ranks.gather(problem) if p is not None]
            if not problems:
                break
            attempts += 1
            fatal = [p for p in problems if not isinstance(p, EngineLost)]
            if fatal or attempts > RESTARTS or not self._revive():
                raise (fatal or problems)[0]
            if self._trainer:  # else what is asked is the folder as it is
                self._push()
        self.stats.retries += sum(ranks.gather(collection.stats.retries))
        return self._with_rewards(prompts, collection.trajectories())

    def _with_rewards(self, prompts: Sequence[Prompt], trajectories: list[Trajectory]) -> list[Trajectory]:
        task, tokenizer = self.run.task, self.run.tokenizer
        texts = tokenizer.batch_decode([t.tokens[t.prompt_length :] for t in trajectories], skip_special_tokens=True)
        asked = [prompts[t.group_id] for t in trajectories]
        truncated = [t.finish_reason == "length" for t in trajectories]
        for t, text, parts in zip(trajectories, texts, score(task, asked, texts, truncated), strict=True):
            t.text, t.reward_parts, t.reward = text, parts, combine(parts, task.weights)
        return trajectories


def _check_served(config: Config, hf_config: PreTrainedConfig, *, pushes: bool) -> None:
    """Errors: UserError for a folder whose weights SGLang would hold in another form than the trainer pushes them, or
    with which it would die at the first request."""
    path, rollout, name = config.model.path, config.precision.rollout, architecture(hf_config)
    on_gpu = torch.cuda.is_available()
    if rollout == "fp8":
        server = config.rollout.server
        fp8.check_folder(Path(path), server.tensor, server.expert, simulate=not on_gpu)
    if getattr(hf_config, "tie_word_embeddings", False) and name not in TIED_IN_SGLANG:
        raise UserError(
            f"model: SGLang serves {name} without tied embeddings: write the embedding as lm_head.weight too, and set"
            " tie_word_embeddings to false in config.json"
        )
    quantized = getattr(hf_config, "quantization_config", None)
    method = quantized and quantized["quant_method"]
    if method and (pushes or (method == "fp8" and not on_gpu)):
        reason = "which a push does not fill" if pushes else "whose products need a GPU"
        raise UserError(
            f"model {path}: SGLang would hold its weights as {method} (quantization_config in config.json), {reason}; write"
            f" plain ones: megatron-rl convert {path} CHECKPOINT, then megatron-rl convert CHECKPOINT FOLDER"
        )
    dtype = getattr(hf_config, "dtype", None)
    if name in OF_THE_FOLDERS_DTYPE and dtype not in (None, ROLLOUT_DTYPES[rollout]):
        found = str(dtype).removeprefix("torch.")
        raise UserError(
            f"model {path}: SGLang serves {name} in the dtype of config.json alone, which is {found}, but precision.rollout is"
            f" {rollout}: set it to match, or dtype in config.json"
        )
