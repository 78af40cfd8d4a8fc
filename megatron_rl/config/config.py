"""Every knob of megatron_rl: one tree of frozen dataclasses. `megatron_rl.config.load` reads it.

Sizes are given once, in prompts and samples (`batch`); everything else is derived from them in `megatron_rl.config.plan` and
printed at the start of a run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DistillationConfig,
    DPOConfig,
    PruningConfig,
    RewardModelConfig,
    RoutingConfig,
    SFTConfig,
    VP2OConfig,
)
from megatron_rl.config.conditions import only_with, only_with_any, read_by
from megatron_rl.config.data import BatchConfig, DataConfig, EvalConfig, RewardsConfig
from megatron_rl.config.model import (
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    PruneConfig,
    QuantizeConfig,
)
from megatron_rl.config.rollout import AgentConfig, RolloutConfig, SyncConfig
from megatron_rl.config.section import Count, Positive, PositiveFloat, RunName, Secret, section


@section
class CheckpointConfig:
    """When checkpoints are written, and which stay."""

    every: Count = 0
    """Steps between checkpoints; 0 saves at the end alone."""
    keep: Positive = 2
    """Newest complete checkpoints that stay."""
    keep_best: Count = 0
    """Checkpoints of the best eval/score (in SFT: the lowest eval/loss) that stay beside them, of steps with both an evaluation
    and a checkpoint."""
    async_save: bool = False
    """Write in the background while training goes on, from a copy on the host of a rank's share of what its GPU holds."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time in seconds that the next save, or the end of the run, waits for a save in the background."""
    load: str | None = None
    """Checkpoint folder of another run to start from (weights alone)."""


@section
class LoggingConfig:
    """Logs and the report."""

    progress: bool = True
    tensorboard: bool = True
    wandb_project: str | None = None
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of rank 0's machine at which Prometheus finds the newest values, as megatron_rl_metric{run, metric}."""
    prometheus_address: str = "127.0.0.1"
    """Address of rank 0's machine on which that port listens; 0.0.0.0: all of its addresses. Another than this machine's own
    needs logging.prometheus_api_key."""
    prometheus_api_key: Secret | None = None
    """Where the key is that Prometheus has to send (authorization.credentials in its configuration)."""
    samples: Count = 8
    """Rollouts of each step that are kept for the report: best-paid, most frequent, and others from prompt to prompt."""
    profile_steps: list[Positive] = dataclasses.field(default_factory=list)
    """Steps of which rank 0 writes a trace of torch's profiler, as profile/step_N.json.gz in the run's folder."""


@section
class Config:
    """The whole tree of a run."""

    name: RunName = "run"
    """The run's folder under runs_dir; a/b is a folder in a folder. No part begins with . or -, or has a blank at an end."""
    runs_dir: str = "runs"
    seed: int = 0
    steps: Positive = 100
    model: ModelConfig = ModelConfig()
    lora: Annotated[LoRAConfig, only_with("lora.rank", example=16)] = LoRAConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    algorithm: Annotated[AlgorithmConfig, read_by("train")] = AlgorithmConfig()
    critic: Annotated[CriticConfig, read_by("train"), only_with("algorithm.advantage", "gae")] = CriticConfig()
    rewards: Annotated[RewardsConfig, read_by("train", "sample")] = RewardsConfig()
    sft: Annotated[SFTConfig, read_by("sft")] = SFTConfig()
    reward_model: Annotated[RewardModelConfig, read_by("reward")] = RewardModelConfig()
    dpo: Annotated[DPOConfig, read_by("dpo")] = DPOConfig()
    distillation: Annotated[
        DistillationConfig,
        read_by("train", "sft"),
        only_with_any("distillation.teacher", "distillation.address", "distillation.recorded"),
    ] = DistillationConfig()
    pruning: Annotated[PruningConfig, read_by("train", "sample")] = PruningConfig()
    prune: Annotated[PruneConfig, read_by("prune")] = PruneConfig()
    correction: Annotated[CorrectionConfig, read_by("train")] = CorrectionConfig()
    routing: Annotated[RoutingConfig, read_by("train")] = RoutingConfig()
    vp2o: Annotated[VP2OConfig, read_by("train"), only_with("vp2o.enabled")] = VP2OConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    rollout: Annotated[RolloutConfig, read_by("train", "sample")] = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    sync: Annotated[SyncConfig, read_by("train")] = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    quantize: Annotated[QuantizeConfig, read_by("quantize")] = QuantizeConfig()
    logging: LoggingConfig = LoggingConfig()
    hooks: Annotated[list[str], read_by("train")] = dataclasses.field(default_factory=list)
    """Further hooks of the update, after those that the config turns on: functions or classes of your own, module:name
    or path/to/file.py:name, that make an UpdateHook of the config (CONTRIBUTING.md).
    """

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.runs_dir) / self.name

    @property
    def zero_truncated(self) -> bool:
        """True if a response that a limit has ended has a reward of 0, whatever is in it."""
        return self.rollout.program != "single_turn" and self.agent.on_truncation == "zero"

    @property
    def bootstraps_truncated(self) -> bool:
        """True if the critic's value of the last state stands for what a limit has cut off."""
        algorithm = self.algorithm
        return algorithm.bootstrap_truncated and algorithm.advantage == "gae" and not self.zero_truncated

    @property
    def teaches(self) -> bool:
        """True if there is a teacher."""
        teacher = self.distillation
        return teacher.teacher is not None or teacher.address is not None or teacher.recorded

    @property
    def process_rewards(self) -> str | None:
        """Name of the reward model whose scores are rewards at the ends of steps; None where there is none."""
        found = (n for n, model in self.rewards.models.items() if model.steps and model.step_placement == "tokens")
        return next(found, None)

    @property
    def policy_reference(self) -> str | None:
        """Folder of the reference of reinforcement learning; None where nothing asks for one."""
        kl = self.algorithm.kl
        return (kl.reference or self.model.path) if kl.coefficient > 0 else None
