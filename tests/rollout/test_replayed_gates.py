"""Gates of the real engine are those that the trainer computes; replayed, they take their part of the mismatch away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.data.sequence import Sequence
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import engine_routes
from megatron_rl.servers.server import RolloutServer
from tests.ranks import run_ranks, without_ties
from tests.rollout.conftest import CPU_SERVER, Question, client_of, collect
from tests.weights import scaled
from tools.make_tiny_model import Sizes, make_tiny_model

SUPPORT = SamplingSupport()


def scored(model: str, precision: str, samples: list[Sequence]) -> dict[str, list]:
    """What the trainer makes of the samples by what is replayed, and its own gates [n - 1, moe_layers, topk] of the engine's
    experts under "gates of the trainer". Runs in a process of its own."""
    from megatron_rl.config.load import build_config
    from megatron_rl.distributed import parallel
    from megatron_rl.hooks.routing_replay import RoutingReplay
    from megatron_rl.models.router import routers
    from megatron_rl.routing.replay import ReplayRoutes
    from megatron_rl.trainer.hooks import UpdateHook
    from megatron_rl.trainer.trainer import build_trainer

    class Watch(UpdateHook):
        """Replays the experts, and keeps what the routers give them."""

        def observers(self, table, stage, place):
            return [Keep(table, "r3")]

    class Keep(ReplayRoutes):
        def see_logits(self, layer, hidden, logits, router):
            ids = self.replay(layer)
            kept.setdefault(layer, []).append(router.gates(logits, ids).gather(1, ids.long()))
            return logits

    config = build_config({"model": {"path": model}, "precision": {"train": precision}})
    trainer = build_trainer(config, parallel.initialize(config.parallel, config.seed), total_updates=1, support=SUPPORT)
    kinds = {
        "nothing": RoutingReplay("none"),
        "ids": RoutingReplay("r3"),
        "ids and gates": RoutingReplay("r3", gates=True),
        "watch": Watch(),
    }
    found: dict[str, list] = {kind: [] for kind in kinds}
    found["gates of the trainer"] = []
    for sample in samples:
        kept: dict[int, list[torch.Tensor]] = {}
        for kind, hook in kinds.items():
            [batch] = trainer.pack([sample])
            [log_probs] = trainer.compute_log_probs([batch], hooks=[hook])
            found[kind].append(log_probs[batch.mask].float().numpy())
        gates = [kept[layer][0][: sample.inputs] for layer, _ in routers(trainer.chunks)]
        found["gates of the trainer"].append(torch.stack(gates, 1).numpy())
    return found


def sample(folder, dtype: str, tmp_path, prompts: int) -> list:
    rng = np.random.default_rng()
    layout = engine_routes(read_hf_config(folder), gates=True)
    questions = [Question(str(i), rng.integers(3, 512, int(rng.integers(4, 30))).tolist()) for i in range(prompts)]
    options = {"routes": True, "gates": True, "log_path": tmp_path / "log"}
    with RolloutServer(folder, CPU_SERVER, dtype=dtype, context_length=512, **options) as server:
        settings = {"samples_per_prompt": 2, "max_new_tokens": 40, "routes": layout}
        trajectories, _ = collect(client_of(server), questions, SUPPORT, **settings)
    return trajectories


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "olmoe", "mixtral", "gpt_oss"])
def test_the_engines_gates_are_the_trainers(family, tmp_path):
    """In fp32, where both compute alike: within what a step of the fixed-point number and fp32 in other orders leave."""
    folder = make_tiny_model(family, tmp_path / "model")

    def attempt(_: int) -> tuple[list, dict]:
        sampled = sample(folder, "fp32", tmp_path, 6)
        return sampled, *run_ranks(1, f"{__name__}:scored", (str(folder), "fp32", sampled), refuse_ties=True)

    trajectories, found = without_ties(attempt)  # another expert has another gate, and moves those of later layers
    apart = [
        np.abs(t.gates - own).max((1, 2)) for t, own in zip(trajectories, found["gates of the trainer"], strict=True)
    ]
    spread = np.std(np.concatenate([t.gates.reshape(-1) for t in trajectories]))
    print(f"{family}: largest difference {np.concatenate(apart).max():.2g}, spread {spread:.2g}")
    # Gates of 1 at most: half a step is 5e-7, and logits of some units have a last bit of as much on either side.
    assert np.concatenate(apart).max() < 1e-5 < spread / 100
    same = np.concatenate(found["ids and gates"]) - np.concatenate(found["ids"])
    assert np.abs(same).max() < 1e-4


def test_replayed_gates_take_their_part_of_the_mismatch_away(tmp_path):
    """In bf16, where SGLang rounds router logits and the trainer does not.

    What all logits of a token have in common changes no gate; here it is some 64, where bf16 numbers are 0.25 or 0.5 apart.
    The engine's logits are then off by 0.1 on average, and gates by a tenth of that. All else is off by 2^-9 of itself, and
    40 to 70 times less of the KL: a fifth leaves room for the draw.
    """
    folder = scaled(make_tiny_model("qwen3_moe", tmp_path / "model", sizes=Sizes(layers=2)), {"down_proj.weight": 40.0})
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            weights[name] = 10 * weight + 8 * torch.randn(weight.shape[1])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    trajectories = sample(folder, "bf16", tmp_path, 24)
    [found] = run_ranks(1, f"{__name__}:scored", (str(folder), "bf16", trajectories))
    engine = np.concatenate([t["rollout_log_probs"] for t in trajectories])
    kl = {}
    for kind in ("nothing", "ids", "ids and gates"):
        d = np.concatenate(found[kind]).astype(np.float64) - engine
        kl[kind] = float(np.mean(np.expm1(d) - d))
    print(len(engine), "tokens, KL by what is replayed:", {kind: f"{value:.3g}" for kind, value in kl.items()})
    assert kl["ids and gates"] < kl["ids"] / 5 and kl["ids"] < kl["nothing"]
