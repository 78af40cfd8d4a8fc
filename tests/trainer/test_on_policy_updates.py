"""Updates that claim to be on-policy: a ratio of exactly 1 and nothing clipped by every loss, and who is not is named."""

from __future__ import annotations

from ranks import fresh_seed, run_ranks

from megatron_rl.algorithms.losses import POLICY_LOSSES

LAYOUTS = {
    "dp2": {},
    "tp2_ep2": {"parallel": {"tensor": 2, "expert": 2}},
    "pruned pp2": {"parallel": {"pipeline": 2}, "pruning": {"enabled": True, "rho": 0.43}},
}


def test_ratios_are_exact_and_who_is_not_on_policy_is_named(tiny_model):
    """Several packed micro-batches of experts; clip bounds of 0 clip whatever is not exactly 1. The same line on all ranks."""
    seed = fresh_seed()
    model = str(tiny_model("qwen3_moe", "--layers", "2"))
    by_rank = run_ranks(2, "on_policy_ranks:run_layouts", (model, seed, [*LAYOUTS.values()]))
    assert by_rank[0] == by_rank[1]
    for layout, found in zip(LAYOUTS, by_rank[0], strict=True):
        for loss in POLICY_LOSSES:
            ratio, clipped, micro_batches = found[loss]
            assert (ratio, clipped) == (1.0, 0.0) and micro_batches > 1, f"{layout}, {loss}, seed {seed}: {found[loss]}"
            # A sequence with a token outside the safe set has no part in GSPO: few may be left.
            assert found[f"{loss} moved"] or (layout.startswith("pruned") and loss == "gspo")
        said, stayed = found["weights"]
        assert "1 of the trainer's " in said and " on rank 1; nothing was learned" in said and "\n" not in said, said
        assert stayed
        said, stayed = found["ratio"]
        assert "loss/ratio of the update is 0.999" in said and "on-policy it is 1.0; nothing was learned" in said, said
        assert stayed
