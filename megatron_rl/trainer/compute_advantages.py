"""Computes the advantages of tokens from the rewards of a step's responses (`algorithm.advantage`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_rl.algorithms import advantages
from megatron_rl.config import OF_TOKENS, AlgorithmConfig, Config, DistillationConfig
from megatron_rl.config.registry import resolve
from megatron_rl.credentials import key_of
from megatron_rl.data.packing import Batch, Labels
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics, derived, maximum, mean, minimum
from megatron_rl.servers.scores import teacher_log_probs
from megatron_rl.trainer.critic import Critic, everywhere
from megatron_rl.trainer.trainer import Trainer

SUPERVISED = {"grpo": True, "dr_grpo": False}
"""Response-level advantages that can be combined with step advantages. True: step advantages are divided by their
standard deviation."""
OF_STEPS = ("gae", "reinforce_plus_plus", *SUPERVISED)
"""Advantages that can use rewards of single steps of a response (process rewards)."""


def estimator(config: AlgorithmConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function for response advantages: (rewards [N], group ids [N]) -> [N]. Errors: UserError."""
    if config.advantage == "tilt":
        return partial(advantages.exponential_tilt, temperature=config.tilt_temperature)
    return resolve("advantage", config.advantage, advantages.ADVANTAGES, "algorithm.advantage")


def _mean_and_std(count: float, total: float, squares: float) -> dict[str, float]:
    if not count:
        return {}
    average, variance = advantages.mean_and_variance(torch.tensor([count, total, squares], dtype=torch.float64))
    return {"mean": float(average), "std": math.sqrt(float(variance))}


class Advantages:
    """Computes the advantages of a run's tokens. Its methods are collective.

    Response advantages are computed on the leader process that requested the responses, before the responses are distributed
    over the ranks. Token advantages are computed later, after the forward passes that provide their inputs.
    """

    def __init__(self, config: Config, trainer: Trainer, critic: Critic | None) -> None:
        """Create it. trainer: trainer of the policy, whose log-probs may enter token rewards. critic: critic for `gae`."""
        self._trainer, self._critic = trainer, critic
        self._bootstraps = config.bootstraps_truncated
        self._config = algorithm = config.algorithm
        self._of_tokens = algorithm.advantage in OF_TOKENS
        self._shaped = algorithm.entropy_reward > 0 or (
            algorithm.kl.coefficient > 0 and algorithm.kl.placement == "reward"
        )
        """True if tokens get rewards in addition to the rewards of responses."""
        self._estimate = self._group_estimator()
        """Function that computes response advantages from rewards and groups; None if token rewards must be computed first."""
        self._process = config.process_rewards
        self._process_weight = config.data.rewards.get(self._process or "", 1.0)
        self._timeout_s = config.rewards.timeout_s
        self._teacher = config.distillation if config.teaches else None
        self._whitens = self._of_tokens if algorithm.whiten is None else algorithm.whiten
        self.returns: list[Tensor] = []
        """Targets [L] of the critic, a tensor for each update; empty if no advantages are computed token by token."""
        self._limit = math.inf if algorithm.advantage_clip is None else algorithm.advantage_clip
        self._measured: Metrics = {}

    def compute_group_advantages(self, trajectories: list[Trajectory]) -> None:
        """Set the advantage of each of this leader's trajectories within its group. A group may extend over several leaders.

        Masked trajectories get advantage 0 and do not enter the baseline of the others. If token rewards have to be computed
        first, this method sets no advantages.
        """
        if self._teacher and self._teacher.address:
            key = key_of(self._teacher.api_key, "distillation.api_key")
            self._ask_teacher(self._teacher.address, key, trajectories)
        if self._estimate is None:
            return
        judged = [t for t in trajectories if not t.masked and not t.part]
        mine = iter(self._over_groups(self._estimate, judged, [t.outcome_reward for t in judged]))
        advantage = 0.0
        for trajectory in trajectories:
            if not trajectory.part:
                advantage = 0.0 if trajectory.masked else next(mine)
            trajectory["advantages"] = advantage

    def _group_estimator(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        if self._config.advantage == "reinforce_plus_plus_baseline":
            return partial(advantages.group_relative, normalize=False)
        return None if self._of_tokens or self._shaped else estimator(self._config)

    def _ask_teacher(self, address: str, key: str, trajectories: list[Trajectory]) -> None:
        """Get the teacher's log-probs from its server. Errors: UserError on all processes if the server does not answer."""
        asked = [t for t in trajectories if not t.masked]
        ranks = self._trainer.ranks
        ranks.leaders_do(lambda: teacher_log_probs(address, asked, timeout_s=self._timeout_s, key=key), patient=True)

    def _over_groups(
        self, estimate: Callable[[Tensor, Tensor], Tensor], judged: list[Trajectory], rewards: list[float]
    ) -> list[float]:
        """Return the estimator's results for this leader's rewards. The estimator sees the rewards of all leaders."""
        ranks = self._trainer.ranks
        mine = [(t.group_id, reward) for t, reward in zip(judged, rewards, strict=True)]
        parts = ranks.gather_from_leaders(mine)
        groups = torch.tensor([group for part in parts for group, _ in part])
        everyones = torch.tensor([reward for part in parts for _, reward in part], dtype=torch.float32)
        first = sum(len(part) for part in parts[: ranks.data_rank])
        return estimate(everyones, groups).tolist()[first : first + len(mine)]

    def compute_token_advantages(
        self, rollout: Sequence[list[Trajectory]], rollout_batch: Sequence[list[Batch]], kl_coefficient: float
    ) -> None:
        """Set the token advantages in each update's batches, unless tokens keep their response's advantage unchanged.

        rollout: this rank's trajectories of each update, from which the batches were packed. Fields that the advantages need
        (such as log-probs) must be computed before.
        """
        labels = [Labels(trajectories) for trajectories in rollout]
        made = self._of_tokens or self._shaped or self._whitens or self._teacher or self._process
        if not (made or self._config.advantage_clip):
            self._measured = self._measure([of_update.of("advantages") for of_update in labels], labels)
            return
        shaping = [
            self._shaping(of_update, batches, kl_coefficient)
            for of_update, batches in zip(labels, rollout_batch, strict=True)
        ]
        if self._of_tokens:
            found = self._along_tokens(rollout, labels, shaping)
        else:
            found = self._along_responses(rollout, labels, shaping)
            if self._process:
                found = [a + b for a, b in zip(found, self._along_steps(rollout), strict=True)]
        if self._whitens:
            found = self._whitened(found, [of_update.of("loss_mask") for of_update in labels])
        if self._teacher:
            found = [
                self._teacher.task_coefficient * values + self._taught(self._teacher, of_update, batches)
                for values, of_update, batches in zip(found, labels, rollout_batch, strict=True)
            ]
        self._measured = self._measure(found, labels)
        for of_update, batches, values in zip(labels, rollout_batch, found, strict=True):
            of_update.give(batches, "advantages", values.clamp(-self._limit, self._limit))

    def metrics(self) -> Metrics:
        """Return the metrics of this step's advantages."""
        return self._measured

    def _measure(self, found: list[Tensor], labels: list[Labels]) -> Metrics:
        """Clip the advantages `found`, and return the metrics advantage/* of all counted tokens."""
        if not self._trainer.ranks.is_leader:  # other processes of the copy have the same sequences
            return {}
        mask = torch.cat([of_update.of("loss_mask") for of_update in labels]).bool()
        whole = torch.cat(found)
        values = whole.clamp(-self._limit, self._limit)
        count, total, squares = advantages.moments(values, mask).tolist()
        measured = {"advantage": derived(_mean_and_std, count, total, squares)}
        if count:
            inside = values[mask]
            measured |= {"advantage/min": minimum(float(inside.min())), "advantage/max": maximum(float(inside.max()))}
        if self._config.advantage_clip is not None:
            measured["advantage/clipped"] = mean(int((mask & (values != whole)).sum()), count)
        return measured

    def _shaping(self, labels: Labels, batches: list[Batch], kl_coefficient: float) -> Tensor:
        """Return the rewards of single tokens, [L]: minus the KL to the reference, an entropy reward, and step rewards."""
        if not self._shaped:
            return self._of_steps(labels)
        old = everywhere(self._trainer, labels, batches, "old_log_probs")
        rewards = -self._config.entropy_reward * old
        if self._config.kl.placement == "reward" and kl_coefficient:
            rewards -= kl_coefficient * (old - everywhere(self._trainer, labels, batches, "reference_log_probs"))
        counts = labels.of("loss_mask") & old.isfinite()  # -inf for a pruned token
        return torch.where(counts, rewards, 0.0) + self._of_steps(labels)

    def _of_steps(self, labels: Labels) -> Tensor:
        """Return the step rewards, [L], each at its step's last token; zeros if advantages are not computed token by token."""
        if not (self._process and self._of_tokens):
            return torch.zeros(labels.count)
        return self._process_weight * labels.of("step_scores").nan_to_num(nan=0.0)

    def _along_steps(self, rollout: Sequence[list[Trajectory]]) -> list[Tensor]:
        """Return, for each update, the step advantages to add to the tokens, [L]. A group may extend over several ranks."""
        trajectories = [t for of_update in rollout for t in of_update]
        ends = [np.flatnonzero(~np.isnan(t["step_scores"])) for t in trajectories]
        mine = [(t.group_id, t["step_scores"][places].tolist()) for t, places in zip(trajectories, ends, strict=True)]
        parts = self._trainer.ranks.gather_from_leaders(mine)
        scores = [torch.tensor(steps, dtype=torch.float32) for part in parts for _, steps in part]
        groups = torch.tensor([group for part in parts for group, _ in part])
        padded = pad_sequence(scores, batch_first=True)
        mask = torch.arange(padded.shape[1]) < torch.tensor([[len(steps)] for steps in scores])
        found = advantages.process_supervision(padded, mask, groups, normalize=SUPERVISED[self._config.advantage])
        first = sum(len(part) for part in parts[: self._trainer.ranks.data_rank])
        own = torch.cat([self._process_weight * found, found.new_zeros(len(found), 1)], 1)[first : first + len(mine)]
        values = []
        for t, places, of_steps in zip(trajectories, ends, own, strict=True):
            # The first step that ends at or after the token; -1 after the last complete step.
            step = np.searchsorted(places, np.arange(t.response_length))
            step[step == len(places)] = -1
            values.append(of_steps[torch.from_numpy(step)])
        following = iter(values)
        return [torch.cat([torch.zeros(0), *islice(following, len(of_update))]) for of_update in rollout]

    def _taught(self, settings: DistillationConfig, labels: Labels, batches: list[Batch]) -> Tensor:
        """Return the teacher's contribution to token advantages, [L]: positive if the teacher finds a token more likely."""
        if settings.placement == "loss":
            return torch.zeros(labels.count)
        old = everywhere(self._trainer, labels, batches, "old_log_probs")
        told = settings.address is not None
        teacher = (
            labels.of("teacher_log_probs") if told else everywhere(self._trainer, labels, batches, "teacher_log_probs")
        )
        counts = labels.of("loss_mask") & old.isfinite()  # -inf for a pruned token
        return torch.where(counts, advantages.distillation(old, teacher, settings.coefficient), 0.0)

    def _along_tokens(
        self, rollout: Sequence[list[Trajectory]], labels: list[Labels], shaping: list[Tensor]
    ) -> list[Tensor]:
        """Return the generalized advantages [L] of each update. Without a critic, values are 0 and lambda is 1."""
        scored = self._critic.score(rollout) if self._critic else [None] * len(rollout)
        found, self.returns = [], []
        for trajectories, of_update, of_tokens, values in zip(rollout, labels, shaping, scored, strict=True):
            mask = of_update.rows(of_update.of("loss_mask"))
            final = torch.tensor([self._final(t) for t in trajectories])
            rewards = advantages.token_rewards(final, mask, kl=-of_update.rows(of_tokens), kl_coefficient=1.0)
            goes_on = torch.tensor([float(self._bootstraps and t.truncated) for t in trajectories])
            before = torch.zeros_like(rewards) if values is None else of_update.rows(values.before)
            advantage, returns = advantages.generalized(
                rewards,
                before,
                mask,
                gamma=self._config.gamma,
                lam=1.0 if values is None else self._config.lam,
                bootstrap=None if values is None else goes_on * values.last,
            )
            found.append(of_update.flat(advantage))
            self.returns.append(of_update.flat(returns))
        return found

    def _final(self, trajectory: Trajectory) -> float:
        """Return the reward for the response's last token: the outcome reward, minus the baseline if there is one."""
        if self._estimate is None or not trajectory.response_length:
            return trajectory.outcome_reward
        return float(trajectory["advantages"][0])

    def _along_responses(
        self, rollout: Sequence[list[Trajectory]], labels: list[Labels], shaping: list[Tensor]
    ) -> list[Tensor]:
        """Return, for each update, the response advantage at each label, [L].

        With token rewards, a response's reward is its outcome reward plus the sum of its token rewards.
        """
        if not self._shaped:
            return [of_update.of("advantages") for of_update in labels]
        trajectories = [t for of_update in rollout for t in of_update]
        self._trainer.ranks.all_do(lambda: self._check_whole(trajectories))
        sums = torch.cat(
            [of_update.rows(of_tokens).sum(1) for of_update, of_tokens in zip(labels, shaping, strict=True)]
        )
        judged = [
            (t, t.outcome_reward + of_tokens)
            for t, of_tokens in zip(trajectories, sums.tolist(), strict=True)
            if not t.masked
        ]
        mine = iter(
            self._over_groups(estimator(self._config), [t for t, _ in judged], [reward for _, reward in judged])
        )
        found = []
        for of_update, each in zip(labels, rollout, strict=True):
            numbers = torch.tensor([0.0 if t.masked else next(mine) for t in each])
            found.append(numbers.repeat_interleave(of_update.lengths))
        return found

    def _check_whole(self, trajectories: list[Trajectory]) -> None:
        """Raise UserError if a response has several sequences, because they may be on different processes."""
        if parts := [t for t in trajectories if t.part]:
            kl = self._config.kl.placement == "reward" and self._config.kl.coefficient > 0
            key, remedy = (
                ("kl.placement = reward", "placement: loss")
                if kl
                else ("entropy_reward", "entropy_coefficient instead")
            )
            raise UserError(
                f"config: algorithm.{key} with algorithm.advantage = {self._config.advantage}: a response of prompt"
                f" {parts[0].prompt_id} is several sequences; set {remedy}, or advantage: reinforce_plus_plus"
            )

    def _whitened(self, found: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        """Normalize advantages to mean 0 and standard deviation 1 over the counted tokens of all ranks and updates."""
        whitened = advantages.batch_normalized(torch.cat(found), torch.cat(masks), self._everyones)
        return list(whitened.split([len(part) for part in found]))

    def _everyones(self, mine: Tensor) -> Tensor:
        return torch.stack(self._trainer.ranks.gather_from_leaders(mine)).sum(0)
