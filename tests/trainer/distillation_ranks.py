"""What each rank does in test_distillation.py: one update by a teacher under each layout, and what it was of."""

from __future__ import annotations

from dataclasses import replace

from layouts import make_config, whole_gradients
from ranks import end_layout
from transformers import PreTrainedConfig

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.architecture import teacher_folder
from megatron_rl.checks.preflight import check_keys
from megatron_rl.checks.refusals import refuse
from megatron_rl.config import Config
from megatron_rl.config.conditions import Kind
from megatron_rl.data.packing import Labels
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.metrics.reduce import figures
from megatron_rl.trainer.compute_advantages import Advantages
from megatron_rl.trainer.critic import everywhere
from megatron_rl.trainer.hooks import UpdateContext
from megatron_rl.trainer.objective import SFT, Policy
from megatron_rl.trainer.trainer import TEACHER, Trainer, build_trainer

LAYOUTS = {
    "tp2_sp": {"tensor": 2, "expert_tensor": 1},
    "ep2": {"expert": 2},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {"distributed_optimizer": True},
}
"""On two processes."""


def check_teacher(config: Config, hf_config: PreTrainedConfig, kind: Kind, world_size: int) -> None:
    """By the keys alone, and by the teacher's folder."""
    check_keys(config, kind, world_size)
    refuse(config, teacher_folder, hf_config=hf_config, kind=kind, world_size=world_size)


def with_teacher(config: Config) -> Trainer:
    """As a run builds it."""
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=4, support=SamplingSupport())
    if config.distillation.teacher is None:
        return trainer
    other = replace(config, model=replace(config.model, path=config.distillation.teacher))
    trainer.companions[TEACHER] = build_trainer(other, ranks, total_updates=None, support=SamplingSupport())
    return trainer


def update_once(config: Config, samples: list[Sequence], *, policy: bool = False) -> dict:
    trainer = with_teacher(config)
    settings = trainer.chunks[0].config
    finalize = settings.finalize_model_grads_func  # gradients are reduced whole on every rank
    settings.finalize_model_grads_func = lambda *args, force_all_reduce=None, **kw: finalize(
        *args, force_all_reduce=True, **kw
    )
    ranks, caught, step = trainer.ranks, {}, trainer._step
    mine = samples[ranks.data_rank :: ranks.data_size]
    batches = trainer.pack(mine)
    objective = Policy(config) if policy else SFT(config.distillation)
    trainer.compute_fields(batches, objective.needs)
    found: dict = {}
    if policy:
        Advantages(config, trainer, None).compute_token_advantages([mine], [batches], 0.0)
        found["advantages"] = Labels(mine).collect(batches, [batch.fields["advantages"] for batch in batches])
        if config.distillation.placement == "advantage":
            found["teacher"] = everywhere(trainer, Labels(mine), batches, "teacher_log_probs")
            found["old"] = everywhere(trainer, Labels(mine), batches, "old_log_probs")
    trainer._step = lambda: (caught.update(grads=whole_gradients(trainer)), step())[1]
    done = trainer.update(batches, objective, UpdateContext(again=True))
    found |= {"metrics": figures(done.metrics), "grads": caught["grads"]}
    if policy:  # a second epoch, by what the teacher said before the first
        trainer._step = step
        found["later"] = figures(trainer.update(batches, objective).metrics)
        assert not any(batch.teacher_layers or batch.teacher_hidden is not None for batch in batches)
    end_layout()
    return found if ranks.rank == 0 else {}


def updates(model: str, samples: list[Sequence], layouts: list[dict], policy: bool = False) -> list[dict]:
    """One update under each layout, one after the other on the same processes."""
    return [update_once(make_config(model, overrides), samples, policy=policy) for overrides in layouts]
