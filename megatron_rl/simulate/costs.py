"""Costs (in seconds) and sizes of a training step. Costs are stated in a file, derived from FLOPs and bytes, or measured."""

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
"""90th percentile of the standard normal distribution."""


@section
class Costs:
    """Seconds that servers and trainer need for their work.

    A "rank" is a data-parallel rank of the trainer with all its GPUs.
    """

    decode_base_s: NonNegativeFloat = 0.0
    """Time per decoding iteration to read the weights that every token uses. An iteration adds one token to each running
    response."""
    decode_overhead_s: NonNegativeFloat = 0.0
    """Time per decoding iteration for kernel launches, scheduling and sampling."""
    decode_experts_s: NonNegativeFloat = 0.0
    """Time to read the weights of all experts. An iteration reads only the experts that its tokens use."""
    expert_share: Fraction = 0.0
    """Share of the experts that one token uses."""
    decode_sequence_s: NonNegativeFloat = 0.0
    """Time per decoding iteration and running response."""
    decode_kv_token_s: NonNegativeFloat = 0.0
    """Time per decoding iteration and cached token of the running responses."""
    prefill_token_s: NonNegativeFloat = 0.0
    """Time per prefilled token. A server prefills each prompt once, and responses again after a weight sync. Decoding waits
    meanwhile."""
    request_s: NonNegativeFloat = 0.0
    """Time from the request for a batch until the servers start to work on it."""
    train_token_s: NonNegativeFloat = 0.0
    """Time per token of a rank's updates, for all forward and backward passes."""
    train_pair_s: NonNegativeFloat = 0.0
    """Time per (query, key) pair of causal attention in the updates."""
    micro_batch_s: NonNegativeFloat = 0.0
    """Time per micro-batch, in addition to its tokens."""
    update_s: NonNegativeFloat = 0.0
    """Time per update for gradient reduction and the optimizer."""
    log_probs_share: NonNegativeFloat = 1 / 3
    """Time of a log-prob pass, divided by the training time of the same tokens, pairs and micro-batches."""
    log_probs_s: NonNegativeFloat = 0.0
    """Time per step for advantages and packing, which are timed together with the log-prob passes."""
    push_s: NonNegativeFloat = 0.0
    """Time of a weight sync, independent of the number of servers."""
    push_server_s: NonNegativeFloat = 0.0
    """Additional time of a weight sync for each server."""
    turns_s: NonNegativeFloat = 0.0
    """Time per step in which a colocated run switches the GPUs from the servers to the trainer and back."""
    other_s: NonNegativeFloat = 0.0
    """Other time per step, during which the servers continue to work."""
    overlap_slowdown: Factor = 1.0
    """Factor by which trainer and servers are slower while both work. It is above 1 if they share processors."""

    @model_validator(mode="after")
    def _decodes(self) -> Self:
        if not (self.decode_base_s or self.decode_overhead_s or self.decode_experts_s or self.decode_sequence_s):
            raise ValueError("decoding takes no time: state decode_base_s or decode_sequence_s, or hardware and model")
        return self

    def iteration_s(self, running: int) -> float:
        """Return the time of a decoding iteration with `running` responses, without the cost of their cached tokens."""
        read = 1 - (1 - self.expert_share) ** running
        fixed = self.decode_base_s + self.decode_overhead_s
        return fixed + self.decode_experts_s * read + self.decode_sequence_s * running


@section
class Model:
    """Numbers of a model from which the costs can be derived."""

    parameters: PositiveFloat
    expert_parameters: NonNegativeFloat = 0.0
    """Number of parameters in experts."""
    active_parameters: PositiveFloat
    """Number of parameters that a token uses."""
    experts: Positive = 1
    """Number of experts per layer."""
    topk: Positive = 1
    """Number of experts that a token is routed to."""
    kv_bytes_per_token: PositiveFloat
    """Bytes of keys and values per token, over all layers."""
    attention_flops_per_pair: NonNegativeFloat = 0.0
    """FLOPs of a forward pass per pair of tokens, over all layers: 4 x heads x head size x layers."""
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
    """Peak rates of a GPU, and the shares of them that a program reaches."""

    tflops: PositiveFloat
    """Peak rate of dense matrix multiplications, in 1e12 FLOPs per second."""
    memory_tb_per_s: PositiveFloat
    train_efficiency: Efficiency
    """Share of the peak FLOPs that training reaches."""
    prefill_efficiency: Efficiency
    decode_efficiency: Efficiency
    """Share of the peak FLOPs that decoding reaches."""
    memory_efficiency: Efficiency
    """Share of the peak bandwidth that decoding reaches."""
    training_forwards: PositiveFloat = 3.0
    """Cost of training relative to a forward pass: 3, or 4 with recomputation of activations."""
    push_gb_per_s: PositiveFloat
    """Rate at which a weight sync brings all weights to all servers, in GB per second."""

    def costs(self, model: Model, server_gpus: int, gpus_per_rank: int) -> dict[str, float]:
        """Return fields of `Costs`. Times for memory reads and FLOPs of an iteration are added, as if they did not overlap."""
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
    """Lognormal distribution of response lengths, by mean and 90th percentile before clipping at max_new_tokens."""

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
        """Draw response lengths, [count] int."""
        # p90 = exp(m + Z90 s) and mean = exp(m + s^2 / 2) have two solutions; the one with the smaller s is used.
        s = Z90 - math.sqrt(max(0.0, Z90**2 - 2 * math.log(self.p90 / self.mean)))
        drawn = rng.lognormal(math.log(self.mean) - s * s / 2, s, count)
        return np.clip(np.rint(drawn), 1, max_new_tokens).astype(int)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes that describe a training step."""

    samples_per_prompt: int
    max_new_tokens: int
    prompt_tokens: float
    servers: int
    slots: int
    """Number of responses that a server runs at the same time. Further responses wait on the server."""
    leaders: int
    """Number of data-parallel ranks of the trainer, each with `concurrency` requests in flight."""
    concurrency: int
    tokens_per_micro_batch: float
    """Number of tokens in a rank's micro-batch."""
    updates_per_step: int = 1
    """Number of updates in one epoch."""
    epochs: int = 1
    scoring_passes: int = 0
    """Number of log-prob passes per step, for the old policy and the reference."""
    max_staleness: int = 0
    partial_rollout: bool = True
    colocated: bool = False
    pipeline: int = 1
    """Number of pipeline stages of a trainer rank."""
    virtual_pipeline: int = 1


@section
class Mode:
    """Schedule of servers and trainer: at the same time on divided GPUs, or in turns on all GPUs."""

    max_staleness: Count = 0
    partial_rollout: bool = True
    colocate: bool = False
    """True if all GPUs serve and then all train. Otherwise the GPUs are divided."""
    server_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the GPUs for servers, if the GPUs are divided."""

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.colocate and self.max_staleness:
            raise ValueError("with colocate servers sleep while the trainer learns: set max_staleness to 0")
        return self
