"""Interface of the training loop to the SGLang servers: push weights, request trajectories, restart dead servers.

`begin` sends the requests of a step and `finish` waits for the answers, so that the servers sample while the trainer learns.

If engine and trainer share GPUs (colocation.py), the engine is awake after `push` and `ask`, and the trainer is awake after
`sleep` and `collect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import RoutingConfig
from megatron_rl.config.plan import share_of
from megatron_rl.data.engine_routes import drop_stale_routes, sampled_by
from megatron_rl.data.trajectory import Trajectory, file_of, save_trajectories
from megatron_rl.errors import StopRequested, UserError
from megatron_rl.metrics.reduce import Metrics, maximum, mean, total
from megatron_rl.models.hf_folder import check_served
from megatron_rl.models.precision import ROLLOUT_DTYPES, torch_dtype
from megatron_rl.models.shape import engine_features, engine_routes
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.colocation import Colocation
from megatron_rl.rollout.over_sampling import FirstGroups, LeftOut
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.rollout.push import Pusher, others, staleness
from megatron_rl.rollout.recover import CANCEL_S, Recovery, generate, start_collection
from megatron_rl.rollout.run_context import RunContext
from megatron_rl.rollout.sample_journal import PENDING, SampleJournal, key_of, read_recorded
from megatron_rl.servers.client import SGLangClient
from megatron_rl.servers.flags import asks_routes
from megatron_rl.servers.fleet import Fleet
from megatron_rl.servers.local import LocalServers, place_here
from megatron_rl.servers.server import asks_gates, feature_stride, serves_adapters
from megatron_rl.sync.adapter_push import SERVED, AdapterSync
from megatron_rl.sync.checksums import WeightsDigest
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.tasks import Prompt
from megatron_rl.trainer.trainer import Trainer

KEPT_DIGESTS = 100
"""Number of latest pushes whose weight digests a checkpoint stores. A resumed run reuses a sample only if it knows the
digest of the sample's weights."""


@dataclass
class PendingRollout:
    """Requests that were sent to the servers, and whose responses have not been collected yet."""

    prompts: Sequence[Prompt]
    collection: Collection
    answered: Future[None]
    step: int
    """Step (0-based) that will train on these samples."""
    program: SingleTurn
    """The program that sent the requests, with the task that computes the rewards."""
    round: int = 0
    """Round of the step (rollout.dynamic_sampling)."""
    first: FirstGroups | None = None
    """Choice of the groups that the step uses; None if the step uses all groups."""


class Engine:
    """Rollout engine: the servers, an HTTP client on each data-parallel leader, and weight sync on all ranks.

    The servers are external, or child processes of rank 0. `__enter__` starts the child servers before the trainer is built, so
    that both load at the same time; `join` connects to the servers. Child servers that share the trainer's GPUs start and fall
    asleep before the trainer is built, because SGLang sizes its cache by the free memory that it finds.
    """

    def __init__(self, run: RunContext) -> None:
        # An engine that only answers has no trainer that replays routes or pushes predictors.
        self.run, self.trains = run, run.kind == "train"
        self.config = run.config if self.trains else replace(run.config, routing=RoutingConfig())
        self._stack = ExitStack()
        self._children = LocalServers(self.config, [], sleeps=False)  # rank 0 may replace this with servers
        rollout = self.config.rollout
        self._shares = rollout.colocate and self.trains and not rollout.load
        self._dtype = torch_dtype(ROLLOUT_DTYPES[self.config.precision.rollout])
        sections, model = (rollout, self.config.routing), run.hf_config
        self._routes = engine_routes(model, gates=asks_gates(*sections)) if asks_routes(*sections) else None
        self._features = engine_features(model, self._dtype) if feature_stride(*sections) else None
        self._unmerged = serves_adapters(self.config.lora, self.config.sync)
        self._retries = 0
        self._stale: list[bool] = []
        """For each response of the last step: True if it was sampled with other weights than those of the last push."""
        self._staleness: list[int] = []
        """For each response of the last step: age of its oldest weights, in steps."""
        self._left_out = LeftOut()
        """Counts of responses that the last step left out, if it did not use all groups."""
        self._reused = 0
        """Number of samples reused from an earlier process of the run."""
        self._pushed_before: dict[str, str] = {}
        """Weight digests by version, from the checkpoint: earlier processes of the run pushed these weights."""
        self._asked: list[PendingRollout] = []
        self._loaded = 0, ""
        """Step and digest of the trainer's weights, if trajectories are loaded instead of sampled."""

    def __enter__(self) -> Engine:
        config, rollout = self.config, self.config.rollout
        if rollout.load or rollout.external:
            return self
        check_served(
            config.model.path, config.precision.rollout, rollout.server, self.run.hf_config, pushes=self.trains
        )
        try:
            self.run.ranks.main_does(self._start_servers, patient=True)
        except BaseException:  # an interrupt while other servers start
            self._stack.close()
            raise
        return self

    def _start_servers(self) -> None:
        places = place_here(self.config.rollout, trains=self.trains)
        self._children = LocalServers(self.config, places, sleeps=self._shares)
        self._stack.callback(self._children.close)
        try:
            self._children.start()
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def join(self) -> None:
        """Wait until the servers answer, then make the client and the weight sync. Every process calls it."""
        rollout, ranks = self.config.rollout, self.run.ranks
        if rollout.load:
            return

        servers: LocalServers | Fleet = self._children
        if rollout.external and ranks.rank == 0:
            servers = Fleet(
                self.config, self.run.hf_config, pushes=self.trains, run=self.run.id, say=self.run.logger.say
            )
            self._stack.callback(servers.close)

        def wait() -> tuple[list[str], str]:
            if not self._shares:  # servers on shared GPUs were awaited at their start
                servers.wait_ready()
            return servers.addresses, servers.key

        addresses, key = ranks.main_does(wait, patient=True)
        sync = self._make_sync(addresses, key)
        self._stack.callback(sync.close)
        self._stack.callback(self._cancel)
        self._turns = Colocation(
            self._children, ranks, shared=self._shares, clock=lambda part: self.run.current_clock(part)
        )

        def moved(addresses: list[str]) -> None:
            self.client.move(addresses)
            sync.move(addresses)

        make_room = self._turns.make_room
        self._recovery = Recovery(servers, ranks, make_room, moved, external=rollout.external)
        self._pusher = Pusher(
            sync,
            self._turns,
            self._recovery,
            ranks,
            dtype=self._dtype,
            digests=rollout.durable or (rollout.record and self._routes is not None),
            keeps_weights=self.config.sync.refresh.when == "drift",
            run=self.run.id,
        )
        # A repeated request may reach a restarted server that does not have this run's weights yet. A run with
        # `algorithm.on_policy` stops if an external server has other weights; other runs push again.
        guarded = self.trains and not (rollout.external and self.config.algorithm.on_policy)
        self.client = SGLangClient(
            addresses,
            concurrency=rollout.concurrency,
            timeout_s=rollout.request_timeout_s,
            retries=rollout.retries,
            lost=servers.lost,
            health=(rollout.health_check_interval_s, rollout.health_check_timeout_s),
            adapter=SERVED if self._unmerged and self.trains else None,
            run=self.run.id,
            key=key,
            vocabulary=self.run.hf_config.vocab_size,
            versions=self._pusher.digests.keys() if guarded else None,
            pushed=lambda: self._pusher.latest,
        )
        self._stack.push(self._leave)

    def _make_sync(self, addresses: list[str], key: str) -> WeightSync | AdapterSync:
        config, folder, group = self.config, self.config.run_dir / "sync", self.run.ranks.world_group
        if self._unmerged:
            base = Path(config.model.path)
            return AdapterSync(config.sync, addresses, config.lora, base=base, folder=folder, group=group, key=key)
        return WeightSync(
            config.sync,
            addresses,
            rollout_dtype=config.precision.rollout,
            folder=folder,
            group=group,
            stay_paused=self._shares,
            key=key,
        )

    def _leave(self, kind: type | None, *_: object) -> None:
        if kind is None or issubclass(kind, StopRequested):
            self.sleep()  # the run may end by saving a checkpoint, which needs the trainer awake

    def state_dict(self) -> dict[str, Any]:
        """Return the digests of the last pushes, by which a resumed run recognizes samples that it can reuse."""
        pushed = {} if self.config.rollout.load else self._pusher.digests
        return {"pushed": dict([*(self._pushed_before | pushed).items()][-KEPT_DIGESTS:])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the digests of the pushes of earlier processes."""
        self._pushed_before = state.get("pushed", {})

    @property
    def version(self) -> int:
        """Step of the weights that the engine has."""
        return self._loaded[0] if self.config.rollout.load else self._pusher.version

    def push(self, trainer: Trainer, version: int) -> None:
        """Send the trainer's weights to every server and compare checksums; a server that has died is restarted first.

        Responses in progress continue with the new weights (rollout.partial_rollout), or the push waits for them.
        """
        if not self.config.rollout.load:
            self._turns.attach(trainer)
            self._pusher.note_step(version)
            # An adapter push does not pause the server: a request that arrives during the exchange finds no adapter.
            if not self.config.rollout.partial_rollout or self._unmerged:
                self._wait_for_all()
            self._pusher.push(trainer, version)
            return
        trainer.weights_pushed()
        digest = WeightsDigest(self._dtype)
        if self._routes is not None:
            for _ in digest.watch(trainer.export_weights()):
                pass
        self._loaded = version, str(digest)

    def _wait_for_all(self) -> None:
        try:
            for asked in self._asked:
                self._complete(asked)
        except StopRequested:  # the pending requests are given up, and the current step ends
            pass

    def sleep(self) -> None:
        """Give shared GPUs to the trainer."""
        if not self.config.rollout.load:
            self._turns.to_trainer()

    def wake(self) -> None:
        """Give shared GPUs to the engine."""
        self._pusher.wake()

    def collect(self, prompts: Sequence[Prompt], step: int, *, top_log_probs: int = 0) -> list[Trajectory]:
        """Return trajectories of training step `step` (0-based), without rewards yet. Every process calls it.

        `prompts` holds the prompts of the whole step. Each data-parallel leader gets the trajectories of its share of the
        requests, other processes get none. top_log_probs: number of the engine's likeliest tokens to return with each token of
        a response.
        """
        return self.finish(self.begin(prompts, step, top_log_probs=top_log_probs))

    def begin(
        self,
        prompts: Sequence[Prompt],
        step: int,
        *,
        round: int = 0,
        top_log_probs: int = 0,
        wanted: int | None = None,
    ) -> PendingRollout:
        """Send the requests of `collect`; `finish` waits for the answers. Samples that exist already are not requested again.

        round: index of the round; each round has its own request seeds. wanted: number of groups to use. The first
        groups that complete are used, and `finish` aborts the requests of the others (rollout.over_sample_rate).
        """
        if self.config.rollout.load:
            nothing = Collection([], self.run.support, samples_per_prompt=1, max_new_tokens=1)
            return PendingRollout(prompts, nothing, Future(), step, self.run.program, round)
        if self.trains:
            self._pusher.note_step(self.run.step)
        asked = self._begin(
            prompts,
            self.run.support,
            samples=self.config.batch.samples_per_prompt,
            seed=f"train/{step}/{round}" if round else f"train/{step}",
            with_routes=True,
            top_log_probs=top_log_probs,
            step=step,
            durable=self.trains and self.config.rollout.durable and not top_log_probs,
            some=wanted is not None and wanted < len(prompts),
        )
        asked.round = round
        if wanted is not None and wanted < len(prompts):
            asked.first = FirstGroups(wanted, self.config.batch.samples_per_prompt)
        self._asked.append(asked)
        return asked

    def finish(self, asked: PendingRollout) -> list[Trajectory]:
        """Wait for the oldest pending requests and return their trajectories. Errors: the same as `generate`."""
        rollout, ranks, step = self.config.rollout, self.run.ranks, asked.step
        if rollout.load:
            file = file_of(Path(rollout.load), step, ranks.data_rank)
            arguments = (file, self.run.support, self._routes, self._features)
            trajectories = ranks.leaders_do(lambda: read_recorded(*arguments)) or []
            fresh = [t.weights == self._loaded[1] for t in trajectories]
        else:
            trajectories = self._answers(asked)
            self._asked.remove(asked)
            self._look_at_versions(trajectories, asked)
            # Replay routes of all weights that max_staleness allows: the routes that the engine took when it sampled.
            recent = min(self.version, step - rollout.max_staleness)
            allowed = [v for v in self._pusher.digests if int(v) >= recent] or [str(self.version)]
            fresh = [any(sampled_by(t, version) for version in allowed) for t in trajectories]
            if rollout.record:
                for trajectory, current in zip(trajectories, fresh, strict=True):
                    routed = current and self._routes is not None
                    version = trajectory.weight_spans[-1].version if routed else ""
                    trajectory.weights = self._pusher.digests.get(version, "")
            self.sleep()
        for trajectory, current in zip(trajectories, fresh, strict=True):  # a dropped route counts as missing
            drop_stale_routes(trajectory, fresh=current)
        return trajectories

    def record(self, trajectories: list[Trajectory], step: int) -> None:
        """Save this leader's trajectories that step `step` (0-based) trains on, if rollout.record is set."""
        if self.config.rollout.record and not self.config.rollout.load:
            ranks = self.run.ranks
            file = file_of(self.config.run_dir / "rollouts", step, ranks.data_rank)
            ranks.leaders_do(lambda: save_trajectories(file, trajectories))

    def _look_at_versions(self, trajectories: list[Trajectory], asked: PendingRollout) -> None:
        """Count the responses that were sampled with other weights than those of the last push.

        Errors: UserError if algorithm.on_policy is set and there is such a response, or a server with other weights.
        """
        if not self.trains:
            return
        version = str(self.version)
        mine = others(trajectories, version)
        if not asked.round:
            self._stale, self._staleness = [], []
        self._stale += [True] * len(mine) + [False] * (len(trajectories) - len(mine))
        self._staleness += staleness(trajectories, asked.step)
        if not self.config.algorithm.on_policy:
            return
        stale = [line for part in self.run.ranks.gather_from_leaders(mine) for line in part]
        problems = [f"{len(stale)} responses are not from version '{version}' (last push): {stale[0]}"] if stale else []
        try:
            self._pusher.verify()
        except UserError as error:  # the same error on every process
            problems.append(str(error))
        if problems:
            raise UserError(f"algorithm.on_policy: step {asked.step + 1}: {'; '.join(problems)}")

    def ask(
        self,
        prompts: Sequence[Prompt],
        support: SamplingSupport,
        *,
        samples: int,
        seed: str,
        program: SingleTurn | None = None,
    ) -> list[Trajectory]:
        """Return `samples` responses to each of `prompts`, without rewards yet. Every process calls it with the same prompts.

        Each data-parallel leader gets its share of the responses, other processes get none. The group id is the index in
        `prompts`; several leaders may share a group. seed: determines the random draws, together with config.seed; an equal
        seed repeats the draws. program: used instead of the run's program. Child servers that die are restarted with the
        current weights, and unanswered requests are sent again.
        """
        return self._answers(
            self._begin(
                prompts,
                support,
                samples=samples,
                seed=seed,
                step=self.run.step - 1,  # sent before the requests of later steps
                program=program,
                evaluates=True,
            )
        )

    def _begin(
        self,
        prompts: Sequence[Prompt],
        support: SamplingSupport,
        *,
        samples: int,
        seed: str,
        with_routes: bool = False,
        top_log_probs: int = 0,
        step: int,
        durable: bool = False,
        program: SingleTurn | None = None,
        some: bool = False,
        evaluates: bool = False,
    ) -> PendingRollout:
        """Send requests. step: step that waits for the responses. durable: save samples to disk as they finish.

        some: True if not all groups are used. evaluates: True if the responses are not used for training.
        """
        self.wake()
        ranks, total = self.run.ranks, len(prompts) * samples
        settings = {
            "support": support,
            "samples_per_prompt": samples,
            "max_new_tokens": self.config.rollout.max_new_tokens,
            "seed": f"{self.config.seed}/{seed}" if self.config.rollout.seed_requests else None,
            "stop_token_ids": self.run.stop_tokens(),
            "routes": self._routes if with_routes else None,
            "features": self._features if with_routes else None,
        }
        share = share_of(total, ranks.data_rank, ranks.data_size) if ranks.is_leader else range(0)
        # No weights move before the first update, so predictors do not learn from its trajectories.
        features_from = 0 if some else share_of(total, 0, self.config.batch.updates_per_step).stop
        kept: dict[str, Any] = {}
        if durable:
            kept = ranks.leaders_do(lambda: self._kept(prompts, settings, share, step, features_from)) or {}
        program = program or self.run.program
        collection = program.collect(
            prompts=prompts,
            share=share,
            features_from=features_from,
            top_log_probs=top_log_probs,
            **settings,
            **kept,
            **({"evaluates": True} if evaluates else {}),
        )
        return PendingRollout(prompts, collection, start_collection(collection, self.client, step), step, program)

    def _kept(
        self, prompts: Sequence[Prompt], settings: dict[str, Any], share: range, step: int, features_from: int
    ) -> dict[str, Any]:
        """Return `Collection` fields: samples that were found on disk, and a function that saves further samples to disk."""
        config = self.config
        what = {
            "tokens": [list(p.tokens) for p in prompts],
            "program": config.rollout.program,
            "agent": asdict(config.agent),
            "data": asdict(config.data),
            "features_from": features_from,
            "staleness": (config.rollout.max_staleness, config.sync.refresh.when, config.algorithm.on_policy),
        }
        pending = config.run_dir / PENDING
        finished = SampleJournal(pending, step, self.run.ranks.data_rank, key_of(settings | what))
        finished.mend()
        known = finished.read(share, self._pushed_before | self._pusher.digests)
        if known:
            self._reused += len(known)
            self.run.logger.say(f"step {step + 1}: {len(known)} of {len(share)} samples were found on disk")
        return {"known": known, "on_finished": finished.keeper(self._pusher.digests)}

    def _complete(self, asked: PendingRollout) -> None:
        stop = self.run.asked_to_stop if self.trains else (lambda: False)
        arguments = (asked.collection, self.client, self.run.ranks, self._revive)
        generate(*arguments, begun=asked.answered, step=asked.step, stop=stop, first=asked.first)

    def _answers(self, asked: PendingRollout) -> list[Trajectory]:
        asked.collection.on_progress = self.run.logger.progress  # show progress of the awaited collection only
        try:
            self._complete(asked)
        except BaseException:
            asked.collection.cancel()
            raise
        asked.program.check(asked.collection)
        self._retries += asked.collection.retries
        return asked.collection.trajectories() if asked.first is None else self._first(asked, asked.first)

    def _first(self, asked: PendingRollout, first: FirstGroups) -> list[Trajectory]:
        collection, place = asked.collection, {group: number for number, group in enumerate(first.taken)}
        requests = collection.requests
        collection.keep(place)
        found = collection.trajectories()
        for trajectory in found:
            trajectory.group_id = place[trajectory.group_id]
        asked.prompts = [asked.prompts[group] for group in place]
        if not asked.round:
            self._left_out = LeftOut()
        self._left_out.add(requests, found, collection.aborted)
        return found

    def _cancel(self) -> None:
        for asked in self._asked:
            asked.collection.cancel()
        wait([asked.answered for asked in self._asked], CANCEL_S)

    def _revive(self) -> bool:
        if revived := self._recovery.revive(trouble=True):
            self._pusher.again()
        return revived

    def metrics(self) -> Metrics:
        """Return counts since the start of the run, staleness of the last step, values of the last push, and GPU memory."""
        loads, ages = bool(self.config.rollout.load), self._staleness
        sampled: Metrics = {}
        if not loads:
            sampled = {
                "rollout/stale": mean(sum(self._stale), len(self._stale)),
                "rollout/reused": total(self._reused),
                "rollout/staleness": mean(sum(ages), len(ages)),
                "rollout/staleness_max": maximum(max(ages, default=0)),
                "rollout/servers": maximum(len(self.client.addresses)),
                "sync/push_s": maximum(self._pusher.sent.seconds),
            }
            sampled |= self._turns.metrics()
        if self.config.rollout.over_sample_rate:
            sampled |= self._left_out.metrics()
        return sampled | {
            "rollout/restarts": maximum(0 if loads else self._recovery.restarts),
            "rollout/retries": total(self._retries),
            "sync/megabytes": maximum(0.0 if loads else self._pusher.sent.bytes / 1e6),
        }
