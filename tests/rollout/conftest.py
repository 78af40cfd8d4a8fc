"""One SGLang server for all tests of the folder, and what transformers says about the same model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import ServerConfig
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.distributed.parallel import Ranks
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import engine_routes
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.over_sampling import FirstGroups
from megatron_rl.rollout.recover import generate
from megatron_rl.servers.client import SGLangClient
from megatron_rl.servers.server import RolloutServer
from tests.ranks import nearly_ties
from tools.make_tiny_model import make_tiny_model

CPU_SERVER = ServerConfig(threads=1, memory_fraction=0.2, max_total_tokens=32768, start_timeout_s=540)


@dataclass
class Question:
    prompt_id: str
    tokens: list[int]


def key_reference(server: RolloutServer) -> str:
    """A reference to its key for a config: a file beside its log."""
    file = server.log_path.with_suffix(".key")
    file.write_text(server.key)
    return f"file:{file}"


def client_of(server: RolloutServer, **options) -> SGLangClient:
    return SGLangClient([server.address], lost=lambda: not server.alive(), timeout_s=120, key=server.key, **options)


def collect(client: SGLangClient, prompts, support: SamplingSupport, **settings) -> tuple[list[Trajectory], Collection]:
    """All that is asked for, in one go. settings: fields of Collection."""
    collection = Collection(prompts, support, **settings)
    collection.run(client)
    return collection.trajectories(), collection


class OneProcess(Ranks):
    """Alone, without torch.distributed."""

    def __init__(self) -> None:
        pass

    def _maxima(self, *values: int) -> list[int]:
        return [*values]

    def gather[T](self, value: T) -> list[T]:
        return [value]

    gather_from_leaders = gather


def first_groups(collection: Collection, client: SGLangClient, wanted: int) -> FirstGroups:
    """Wait for the first groups that are complete; the others are aborted, and left out."""
    first = FirstGroups(wanted, collection.samples_per_prompt)
    generate(collection, client, OneProcess(), lambda: False, first=first)
    collection.keep(first.taken)
    return first


def prefill_log_probs(client: SGLangClient, sequences) -> list[np.ndarray]:
    """Per sequence [n - 1], from the prefill, at temperature 1."""

    async def ask():
        async with client:
            return await client.call(sequences, {"max_new_tokens": 0}, prompt_log_probs=True)

    return [reply.prompt_log_probs for reply in asyncio.run(ask())]


@dataclass
class Reference:
    """The model in transformers, fp32."""

    folder: Path

    def __post_init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.layout = engine_routes(read_hf_config(self.folder))

    @torch.no_grad()
    def logits(self, tokens) -> torch.Tensor:
        """[n, V] for one sequence of n tokens."""
        return self.model(torch.as_tensor(tokens, dtype=torch.long)[None]).logits[0].float()

    def log_probs(self, tokens, temperature: float = 1.0) -> torch.Tensor:
        """[n - 1]: of tokens 1..n-1, each given those before it."""
        log_softmax = (self.logits(tokens)[:-1] / temperature).log_softmax(-1)
        return log_softmax.gather(-1, torch.as_tensor(tokens[1:], dtype=torch.long)[:, None])[:, 0]

    @torch.no_grad()
    def routes(self, tokens) -> torch.Tensor:
        """[n, layers, topk], sorted by expert."""
        out = self.model(torch.as_tensor(tokens, dtype=torch.long)[None], output_router_logits=True)
        return torch.stack(out.router_logits, 1).topk(self.layout.topk, -1).indices.sort(-1).values

    def tied(self, sequences) -> list[bool]:
        """In which of them experts nearly tie; of trajectories, all their tokens."""
        return [nearly_ties(self.model, getattr(one, "tokens", one)) for one in sequences]

    def on_the_border(self, trajectory: Trajectory, support: SamplingSupport) -> np.ndarray:
        """bool [L]: response tokens at which any token of the vocabulary is in the safe set, or not, but for rounding.

        Logits of two sides differ by some 1e-7. With 200 logits a unit around the border (this model, rho 0.8), four positions
        in a thousand have one within 1e-5 of it, and one of 900 has one within rounding with a chance of 0.04: its share of the
        probability is percents, both sides are right, and their log-probs differ by that share.
        """
        scaled = self.logits(trajectory.tokens)[trajectory.prompt_length - 1 : -1] / support.temperature
        threshold = scaled.amax(-1, keepdim=True) + math.log(support.min_p)
        return ((scaled - threshold).abs() < 1e-5).any(-1).numpy()


def assert_agree(
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
    *,
    median: float,
    largest: float,
    tied: Sequence[bool] | None = None,
) -> None:
    """Of all tokens the median difference, and the largest one of the sequences in which no experts nearly tie (`tied`).

    In fp32 these differ by rounding alone: log-probs here are -6 to -8, whose last bit is 5e-7, and logits below 1 add less. A
    token and layer nearly tie with a chance of 3e-5 at most, so that half of the sequences are never left out: of four that
    have 160 tokens and four layers, three or more with a chance of 4 x 0.02^3.
    tied: None where precision is so low that experts tie everywhere: of four sequences in five the largest one.
    """
    differences = [np.abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    if tied is None:
        found = np.median(np.concatenate(differences)), np.quantile([d.max() for d in differences], 0.8)
    else:
        clear = [d for d, out in zip(differences, tied, strict=True) if not out]
        assert len(clear) >= len(differences) / 2, "most sequences have experts that nearly tie"
        found = np.median(np.concatenate(differences)), max(d.max(initial=0) for d in clear)
    print(f"median {found[0]:.2g}, largest {found[1]:.2g}, {sum(tied or [])} of {len(differences)} sequences with ties")
    assert found[0] <= median and found[1] <= largest


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Reference:
    return Reference(make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("models") / "qwen3_moe"))


@pytest.fixture(scope="session")
def server(reference, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "sglang.log"
    options = {"routes": True, "processor": True, "kept_sets": True}
    with RolloutServer(
        reference.folder, CPU_SERVER, dtype="fp32", context_length=4096, log_path=log, **options
    ) as running:
        yield running
