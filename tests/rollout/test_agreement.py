"""The two sides of one model: the trainer's log-probs against those of SGLang's prefill, and of its sampling."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.rollout.server import RolloutServer
from tests.ranks import run_ranks
from tests.rollout.conftest import CPU_SERVER, Question, assert_agree, client_of, collect, prefill_log_probs


def trainer_log_probs(
    model: str, precision: str, sequences: list[list[int]], temperature: float = 1.0
) -> list[np.ndarray]:
    """Per sequence [n - 1], from the trainer's scoring pass over packed micro-batches. Runs in a process of its own."""
    from megatron_rl.config import build_config
    from megatron_rl.trainer import parallel
    from megatron_rl.trainer.packing import Sample
    from megatron_rl.trainer.trainer import build_trainer

    config = build_config(
        {"model": {"path": model}, "batch": {"tokens_per_micro_batch": 256}, "precision": {"train": precision}}
    )
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=1, temperature=temperature)
    batches = trainer.pack([Sample.demonstration(sequence[:1], sequence[1:]) for sequence in sequences])
    trainer.score(batches, "scored")
    found = {}
    for batch in batches:
        for row, sample in enumerate(batch.samples):
            found[sample] = batch.scored["scored"][batch.sequence_ids == row].float().numpy()
    assert len(batches) > 1
    return [found[i][: len(sequence) - 1] for i, sequence in enumerate(sequences)]


@pytest.mark.parametrize(("dtype", "median", "largest"), [("fp32", 1e-5, 1e-5), ("bf16", 0.01, 0.1)])
def test_trainer_agrees_with_prefill(dtype, median, largest, reference, request, tmp_path):
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    sequences = [rng.integers(3, 512, int(rng.integers(4, 60))).tolist() for _ in range(24)]
    if dtype == "fp32":
        served = prefill_log_probs(client_of(request.getfixturevalue("server")), sequences)
    else:
        with RolloutServer(
            reference.folder, CPU_SERVER, dtype=dtype, context_length=512, log_path=tmp_path / "log"
        ) as server:
            served = prefill_log_probs(client_of(server), sequences)
    [trained] = run_ranks(1, f"{__name__}:trainer_log_probs", (str(reference.folder), dtype, sequences))
    assert sum(map(len, served)) == sum(len(sequence) - 1 for sequence in sequences)
    assert_agree(trained, served, median=median, largest=largest)
    assert np.std(np.concatenate(served)) > 0.05, "log-probs too alike for a comparison"


def test_trainer_agrees_with_what_was_sampled_at_a_temperature(server, reference):
    """Log-probs under the tempered distribution, which is the one that the tokens came from."""
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    prompts = [Question(str(i), rng.integers(3, 512, int(rng.integers(4, 30))).tolist()) for i in range(12)]
    trajectories, _ = collect(
        client_of(server), prompts, SamplingSupport(temperature=0.6), samples_per_prompt=2, max_new_tokens=24
    )
    sequences = [t.tokens.tolist() for t in trajectories]
    [trained] = run_ranks(1, f"{__name__}:trainer_log_probs", (str(reference.folder), "fp32", sequences, 0.6))
    ours = [one[t.prompt_length - 1 :] for one, t in zip(trained, trajectories, strict=True)]
    assert_agree(ours, [t.log_probs for t in trajectories], median=1e-5, largest=1e-5)
