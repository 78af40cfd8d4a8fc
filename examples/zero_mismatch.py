"""Cures compared with no mismatch at all: GRPO, R3, R3 with gates, DVP + MIS, and identical operators, three seeds.

The setting is the same as in all_cures.py, with all kinds of mismatch: a noise floor under SGLang in bf16, a trainer in
fp32, 64 experts of which 8 are chosen, and eight updates per rollout batch at a learning rate that is not divided by
their number. With identical operators, both sides compute alike, in fp32 or in bf16, and no floor can be planted. Two
arms without a floor, with one seed each, show the effect of SGLang's bf16 alone.
"""

from __future__ import annotations

from ablations import Ablation, Settings, warm_start
from all_cures import COLUMNS, MASKED, MODEL, PANELS, figures
from all_cures import COMMON as ALL_WRONG
from noise_floor import DVP, UNPRUNED

NO_FLOOR: Settings = UNPRUNED | {"rollout.sampling.tail_floor": "null"}
ZERO: Settings = NO_FLOOR | {"precision.identical": "true"}
ARMS: dict[str, Settings] = {
    "GRPO": UNPRUNED,
    "R3": UNPRUNED | {"routing.source": "r3"},
    "R3 with gates": UNPRUNED | {"routing.source": "r3", "routing.replay_gates": "true"},
    "DVP + MIS": DVP | MASKED,
    "no floor": NO_FLOOR,
    "R3 with gates, no floor": NO_FLOOR | {"routing.source": "r3", "routing.replay_gates": "true"},
    "zero, fp32": ZERO | {"precision.rollout": "fp32"},
    "zero, bf16": ZERO | {"precision.train": "bf16"},
}

ABLATION = Ablation(
    name="zero_mismatch",
    steps=30,
    arms=ARMS,
    common=ALL_WRONG | {"algorithm.advantage": "grpo"},
    figures=figures,
    columns=COLUMNS,
    panels=PANELS,
    title="What a cure leaves, and no mismatch at all",
    seeds=3,
    of_one_seed=("no floor", "R3 with gates, no floor"),
    differences=[
        ("R3 with gates", "R3"),
        ("zero, fp32", "GRPO"),
        ("zero, fp32", "DVP + MIS"),
        ("zero, bf16", "zero, fp32"),
    ],
)


if __name__ == "__main__":
    ABLATION.main(__doc__, lambda runs: warm_start(runs, MODEL))
