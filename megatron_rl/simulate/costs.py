"""Costs of hardware, in seconds, and the sizes of a step: stated in a file, derived from FLOPs and bytes, or measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from megatron_rl.config import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, section

Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Efficiency = Annotated[float, Field(gt=0, le=1)]
Z90 = 1.2815515655446004
"""Below it lie 90 % of a normal distribution."""


@section
class Costs:
    """Seconds of what servers and trainer do. "Rank" is a data-parallel rank of the trainer, however many GPUs it has."""

    decode_base_s: NonNegativeFloat = 0.0
    """An iteration, which gives each running response of a server a token: reading the weights that every token meets."""
    decode_overhead_s: NonNegativeFloat = 0.0
    """An iteration's launches, scheduling and sampling."""
    decode_experts_s: NonNegativeFloat = 0.0
    """Reading the weights of all experts; an iteration reads those that its tokens are sent to."""
    expert_share: Fraction = 0.0
    """Experts that a token is sent to, as a share."""
    decode_sequence_s: NonNegativeFloat = 0.0
    """Per running response and iteration."""
    decode_kv_token_s: NonNegativeFloat = 0.0
    """Per token in the cache of what runs, and iteration."""
    prefill_token_s: NonNegativeFloat = 0.0
    """Per token of a prompt, once per server, and of what a push has interrupted; decoding waits meanwhile."""
    request_s: NonNegativeFloat = 0.0
    """From asking for a batch until servers begin with it."""
    train_token_s: NonNegativeFloat = 0.0
    """Per token of a rank's updates: all forwards and backwards."""
    train_pair_s: NonNegativeFloat = 0.0
    """Per (query, key) pair of causal attention in them."""
    micro_batch_s: NonNegativeFloat = 0.0
    """Per micro-batch, beside its tokens."""
    update_s: NonNegativeFloat = 0.0
    """Per update: reducing gradients, the optimizer."""
    log_probs_share: NonNegativeFloat = 1 / 3
    """A pass for log-probs, as a share of the training seconds of the same tokens, pairs and micro-batches."""
    log_probs_s: NonNegativeFloat = 0.0
    """Per step, beside the passes: advantages, packing."""
    push_s: NonNegativeFloat = 0.0
    """A push of the weights."""
    push_server_s: NonNegativeFloat = 0.0
    """Per server that gets it."""
    turns_s: NonNegativeFloat = 0.0
    """Per step where both sides share the GPUs: one falls asleep, the other wakes, and back."""
    other_s: NonNegativeFloat = 0.0
    """Rest of a step, in which the servers go on."""
    overlap_slowdown: Factor = 1.0
    """How many times slower trainer and servers are while both work: above 1 where they share processors."""

    @model_validator(mode="after")
    def _decodes(self) -> Self:
        if not (self.decode_base_s or self.decode_overhead_s or self.decode_experts_s or self.decode_sequence_s):
            raise ValueError("decoding takes no time: state decode_base_s or decode_sequence_s, or hardware and model")
        return self

    def iteration_s(self, running: int) -> float:
        """An iteration of so many responses, without what their cache adds."""
        read = 1 - (1 - self.expert_share) ** running
        fixed = self.decode_base_s + self.decode_overhead_s
        return fixed + self.decode_experts_s * read + self.decode_sequence_s * running


@section
class Model:
    """The numbers of a model that its costs follow from."""

    parameters: PositiveFloat
    expert_parameters: NonNegativeFloat = 0.0
    """Number of parameters in experts."""
    active_parameters: PositiveFloat
    """Number of parameters that a token meets."""
    experts: Positive = 1
    """Experts of a layer."""
    topk: Positive = 1
    """Experts to which a token is sent."""
    kv_bytes_per_token: PositiveFloat
    """Keys and values of all layers."""
    attention_flops_per_pair: NonNegativeFloat = 0.0
    """FLOPs of a forward for each pair of tokens, over all layers: 4 x heads x size of a head x layers."""
    bytes_per_parameter: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _parts(self) -> Self:
        if max(self.expert_parameters, self.active_parameters) > self.parameters:
            raise ValueError("expert_parameters and active_parameters are parts of parameters: neither may be larger")
        if self.topk > self.experts:
            raise ValueError(f"topk {self.topk} is more than the {self.experts} experts: state both")
        return self


@section
class Hardware:
    """Peaks of a GPU, and the share of them that is reached."""

    tflops: PositiveFloat
    """Dense products, 1e12 a second."""
    memory_tb_per_s: PositiveFloat
    train_efficiency: Efficiency
    """Share of the peak FLOPs that training reaches."""
    prefill_efficiency: Efficiency
    decode_efficiency: Efficiency
    """Share of the peak FLOPs that decoding reaches."""
    memory_efficiency: Efficiency
    """Share of the bandwidth that decoding reaches."""
    training_forwards: PositiveFloat = 3.0
    """Forwards that an update costs: 3, and 4 where activations are computed again."""
    push_gb_per_s: PositiveFloat
    """At which all weights reach all servers."""

    def costs(self, model: Model, server_gpus: int, gpus_per_rank: int) -> dict[str, float]:
        """Fields of `Costs`. The seconds of an iteration's bytes and FLOPs are added, as if nothing overlapped."""
        bandwidth = server_gpus * self.memory_tb_per_s * 1e12 * self.memory_efficiency
        flops = self.tflops * 1e12
        dense = (model.parameters - model.expert_parameters) * model.bytes_per_parameter
        forward = 2 * model.active_parameters
        trained = self.training_forwards / (gpus_per_rank * flops * self.train_efficiency)
        return {
            "decode_base_s": dense / bandwidth,
            "decode_experts_s": model.expert_parameters * model.bytes_per_parameter / bandwidth,
            "expert_share": model.topk / model.experts,
            "decode_sequence_s": forward / (server_gpus * flops * self.decode_efficiency),
            "decode_kv_token_s": model.kv_bytes_per_token / bandwidth,
            "prefill_token_s": forward / (server_gpus * flops * self.prefill_efficiency),
            "train_token_s": forward * trained,
            "train_pair_s": model.attention_flops_per_pair * trained,
            "log_probs_share": 1 / self.training_forwards,
            "push_s": model.parameters * model.bytes_per_parameter / (self.push_gb_per_s * 1e9),
        }


@section
class Lengths:
    """Response lengths: lognormal, by its mean and its 90th percentile before it is clipped at max_new_tokens."""

    mean: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    p90: PositiveFloat

    @model_validator(mode="after")
    def _possible(self) -> Self:
        most = math.exp(Z90**2 / 2)
        if not 1 <= self.p90 / self.mean <= most:
            raise ValueError(
                f"no lognormal has p90 {self.p90:g} with mean {self.mean:g}: state 1 to {most:.2f} times it"
            )
        return self

    def draw(self, rng: np.random.Generator, count: int, max_new_tokens: int) -> np.ndarray:
        """[count] int."""
        # p90 = exp(m + Z90 s) and mean = exp(m + s^2 / 2); of the two solutions the narrower one.
        s = Z90 - math.sqrt(max(0.0, Z90**2 - 2 * math.log(self.p90 / self.mean)))
        drawn = rng.lognormal(math.log(self.mean) - s * s / 2, s, count)
        return np.clip(np.rint(drawn), 1, max_new_tokens).astype(int)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of a step."""

    samples_per_prompt: int
    max_new_tokens: int
    prompt_tokens: float
    servers: int
    slots: int
    """Responses that a server runs at a time; others wait there."""
    leaders: int
    """Data-parallel ranks of the trainer, each with `concurrency` requests in flight."""
    concurrency: int
    tokens_per_micro_batch: float
    """Tokens of a rank's micro-batch."""
    updates_per_step: int = 1
    """Updates of one epoch."""
    epochs: int = 1
    scoring_passes: int = 0
    """For the old policy's log-probs and the reference's."""
    max_staleness: int = 0
    partial_rollout: bool = True
    colocated: bool = False
    pipeline: int = 1
    """Stages of a rank."""
    virtual_pipeline: int = 1


@section
class Mode:
    """How servers and trainer take turns."""

    max_staleness: Count = 0
    partial_rollout: bool = True
    colocate: bool = False
    """All GPUs serve, then all train; otherwise they are divided."""
    server_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The servers' share of the GPUs, where they are divided."""

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.colocate and self.max_staleness:
            raise ValueError("with colocate servers sleep while the trainer learns: set max_staleness to 0")
        return self
