"""The tree of all config keys, as frozen dataclasses. `megatron_rl.config.load` reads it.

Users give sizes once, in prompts and samples (`batch`). `megatron_rl.config.plan` derives all other sizes, and each run
prints the derived sizes at its start.
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
    """Checkpoints: how often they are written, and which are kept."""

    every: Count = 0
    """Number of steps between checkpoints; 0: save only at the end."""
    keep: Positive = 2
    """Number of newest complete checkpoints to keep."""
    keep_best: Count = 0
    """Number of checkpoints with the best eval/score (SFT: the lowest eval/loss) to keep in addition. Only steps with
    both an evaluation and a checkpoint count."""
    async_save: bool = False
    """Write checkpoints in the background during training. Each rank first copies its share of the state from its GPU
    to host memory."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time, in seconds, that the next save or the end of the run waits for a save in the background."""
    load: str | None = None
    """Checkpoint folder of another run, whose weights (and nothing else) this run starts from."""


@section
class LoggingConfig:
    """Logs, metrics and the report."""

    progress: bool = True
    """Print progress on the terminal."""
    trackers: list[str] = dataclasses.field(default_factory=lambda: ["tensorboard"])
    """Services that get metrics and samples: tensorboard, wandb, mlflow, trackio, or your own as module:name. []: none."""
    project: str = "megatron_rl"
    """Project or experiment that groups runs in wandb, mlflow and trackio."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on rank 0's machine where Prometheus reads the newest metrics, as megatron_rl_metric{run, metric}. null:
    none."""
    prometheus_address: str = "127.0.0.1"
    """Address on rank 0's machine at which prometheus_port is open; 0.0.0.0: all addresses. An address that other
    machines can reach needs logging.prometheus_api_key."""
    prometheus_api_key: Secret | None = None
    """Reference to the key that Prometheus has to send (authorization.credentials in its configuration): env:NAME or
    file:PATH."""
    samples: Count = 8
    """Number of rollouts of each step that are kept for the report: those with the highest rewards, the most frequent
    ones, and others from different prompts."""
    profile_steps: list[Positive] = dataclasses.field(default_factory=list)
    """Steps for which rank 0 writes a torch profiler trace, as profile/step_N.json.gz in the run's folder."""


@section
class Config:
    """The whole config of a run."""

    name: RunName = "run"
    """Name of the run, and of its folder in runs_dir; a/b is a nested folder. No part may begin with . or -, or begin
    or end with a blank."""
    runs_dir: str = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Seed of the trainer's random generators and of sampling."""
    steps: Positive = 100
    """Number of steps of the run."""
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
    """Your own hooks of the update, which run after the hooks that the config turns on (see CONTRIBUTING.md). Each is a
    function or class that creates an UpdateHook from the config, given as module:name or path/to/file.py:name."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.runs_dir) / self.name

    @property
    def zero_truncated(self) -> bool:
        """True if a response that a limit ended gets a reward of 0, whatever the response contains."""
        return self.rollout.program != "single_turn" and self.agent.on_truncation == "zero"

    @property
    def bootstraps_truncated(self) -> bool:
        """True if the critic's value after the last token replaces the score of a response that a limit cut off."""
        algorithm = self.algorithm
        return algorithm.bootstrap_truncated and algorithm.advantage == "gae" and not self.zero_truncated

    @property
    def teaches(self) -> bool:
        """True if the config has a teacher."""
        teacher = self.distillation
        return teacher.teacher is not None or teacher.address is not None or teacher.recorded

    @property
    def process_rewards(self) -> str | None:
        """Name of the reward model whose scores are rewards at the ends of steps; None if there is no such model."""
        found = (n for n, model in self.rewards.models.items() if model.steps and model.step_placement == "tokens")
        return next(found, None)

    @property
    def policy_reference(self) -> str | None:
        """Folder of the reference model of reinforcement learning; None if no key needs one."""
        kl = self.algorithm.kl
        return (kl.reference or self.model.path) if kl.coefficient > 0 else None
