"""Routing replay with moving routers: GRPO, R2, Pr2, R3 and Pr3 at 16 updates per rollout batch; R3 also with gates.

There are three seeds. The setting is the same as in route_shadow.py: 64 experts of which 8 are chosen, 64 responses per
update, and a learning rate that is not divided by the number of updates. In the first update of a rollout batch no
router has moved, and a recorded route is the router's own choice. Agreement and route KL are therefore measured on
the later updates. "Without prediction" is the result of the same run on the same tokens with predictors of zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import override

from ablations import Ablation, Figures, Settings, mean_of, metric_lines, quarters, warm_start
from curves import Groups, Panel, write_svg
from route_shadow import MODEL, RUN, UPDATES, WARM_START

PUBLISHED: Settings = {
    "routing.source": "pr2",
    "routing.predictor_horizon": "constant",
    "routing.predictor_decay": 0.0,
}
GATES: Settings = {"routing.source": "r3", "routing.replay_gates": "true"}
ARMS: dict[str, Settings] = {
    "GRPO": {"routing.source": "none"},
    "R2": {"routing.source": "r2"},
    **{f"Pr2 as published, x{m:g}": PUBLISHED | {"routing.predictor_lr_multiplier": m} for m in (0.02, 0.1, 0.5)},
    "Pr2, horizon-scaled": {"routing.source": "pr2"},
    "R3": {"routing.source": "r3"},
    "R3 with gates": GATES,
    "R3 with gates, given up below 0.5": GATES | {"routing.give_up_below": 0.5},
    "Pr3": {"routing.source": "pr3"},
    "Pr3, the engine's features": {"routing.source": "pr3", "routing.features": "engine"},
}
OF_ONE_SEED = (
    "Pr2 as published, x0.02",
    "Pr2 as published, x0.5",
    "Pr3, the engine's features",
    "R3 with gates, given up below 0.5",
)
COMMON: Settings = RUN | {
    "hooks": "[]",
    "rollout.routes": "true",
    "precision.rollout": "bf16",
    "eval.prompts": 100,
}
COLUMNS = {
    "score": ("score", ".3f"),
    "best": ("largest reward of a step", ".3f"),
    "routing/later/agreement": ("agreement, updates 2 on", ".4f"),
    "routing/later/agreement_unpredicted": ("without prediction", ".4f"),
    "last/agreement": ("last update", ".4f"),
    "routing/later/kl": ("route KL x 1e3, updates 2 on", ".3f"),
    "routing/later/kl_unpredicted": ("KL without prediction", ".3f"),
    "first/kl": ("KL of update 1", ".3f"),
    "routing/given_up": ("experts given up", ".4f"),
    "routing/deviation_0": ("tokens whose experts all agree", ".3f"),
    "loss/clip_fraction": ("clipped", ".4f"),
    "loss/ratio_tail": ("ratio outside [1/2, 2]", ".5f"),
    "mismatch/kl": ("engine KL x 1e3", ".3f"),
    "entropy": ("entropy, last quarter", ".3f"),
}
IN_THOUSANDTHS = ("routing/later/kl", "routing/later/kl_unpredicted", "first/kl", "mismatch/kl")
PANELS = (
    Panel("Top-k agreement, updates 2 on", "routing/later/agreement"),
    Panel("Route KL, updates 2 on, nats per token", "routing/later/kl", log=True),
    Panel("Reward", "reward/mean", smooth=3),
    Panel("Share of clipped tokens", "loss/clip_fraction", smooth=3),
)


def figures(folder: Path) -> Figures:
    """Return a run's figures: means over the steps after the first quarter; None for a figure that does not apply."""
    steps, evaluated = metric_lines(folder)
    later = steps[len(quarters(steps)[0]) :]
    found = {name: mean_of(name, later) for name in COLUMNS if "/" in name and not name.startswith(("last/", "first/"))}
    found |= {
        "score": evaluated[-1].get("eval/score"),
        "before": evaluated[0].get("eval/score"),
        "best": max(line["reward/mean"] for line in steps),
        "last/agreement": mean_of(f"routing/update_{UPDATES}/agreement", later),
        "first/kl": mean_of("routing/update_1/kl", later),
        "entropy": mean_of("entropy", quarters(steps)[1]),
    }
    found |= {
        f"routing/update_{u}/agreement": mean_of(f"routing/update_{u}/agreement", later) for u in range(1, UPDATES + 1)
    }
    return {
        name: value * 1e3 if name in IN_THOUSANDTHS and value is not None else value for name, value in found.items()
    }


class RoutingReplay(Ablation):
    @override
    def write_pictures(self, groups: Groups, out: Path) -> None:
        super().write_pictures(groups, out)
        write_svg(groups, out, self.stem)


ABLATION = RoutingReplay(
    name="routing_replay",
    steps=10,
    arms=ARMS,
    common=COMMON,
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="Routing replay over rollout batches",
    differences=[
        ("R2", "GRPO"),
        *((arm, "R2") for arm in ARMS if arm.startswith("Pr2")),
        ("R3", "GRPO"),
        ("R3 with gates", "R3"),
        ("Pr3", "R3"),
    ],
    pictured=[arm for arm in ARMS if arm not in OF_ONE_SEED],
    of_one_seed=OF_ONE_SEED,
)


if __name__ == "__main__":
    ABLATION.main(__doc__, lambda runs: warm_start(runs, MODEL, WARM_START))
