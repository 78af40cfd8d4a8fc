"""Flags that a server needs on a GPU if SGLang would otherwise choose a kernel that does not support routes, pushes or fp32.

The flags are for SGLang 0.5.23 (`sglang/srt/arg_groups`); tests/servers/test_choices.py resolves these flags independently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megatron_rl.config import FROM_ENGINE, RolloutConfig, RoutingConfig
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from megatron_rl.models.precision import Machine

TAKES_FP32 = ("triton", "torch_native", "flex_attention")
"""Attention backends that compute in fp32; SGLang's choices for large GPUs (fa3, trtllm_mha, trtllm_mla, flashinfer) do not."""
AS_PUSHED = ("triton", "auto")
"""Values of --moe-runner-backend that keep the experts in the layout of a push and use SGLang's top-k, which captures routes.
If SGLang still reports `auto` after its choice, it uses Triton's runner. For gpt-oss, SGLang chooses triton_kernel, whose own
top-k captures nothing. On Blackwell it chooses flashinfer_trtllm, which routes inside its kernel, so that the capture buffer
keeps old rows. flashinfer_trtllm also changes the layout of the experts."""
FP32_PRODUCTS = {"TRITON_F32_DEFAULT": "ieee"}
"""Environment variable of an fp32 server. Without it, Triton uses TF32: the range of fp32 with a 10-bit mantissa."""
_OWN_KEYS = {
    **dict.fromkeys(("--api-key", "--admin-api-key", "--config"), "rollout.api_key"),
    **dict.fromkeys(("--model-path", "--model"), "model.path"),
    "--dtype": "precision.rollout",
    "--enable-fp32-lm-head": "precision.fp32_lm_head",
    "--context-length": "rollout.context_length",
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp"), "rollout.server.tensor"),
    **dict.fromkeys(("--expert-parallel-size", "--ep-size", "--ep"), "rollout.server.expert"),
    "--base-gpu-id": "rollout.server.count, or rollout.colocate",
    "--enable-memory-saver": "rollout.colocate",
}
"""Config key for each flag that extra_args must not set, because other parts of the run read the config key."""


@dataclass(frozen=True)
class ServerFlag:
    """Command-line flag of the server, with its value and the reason for it."""

    flag: str
    value: str
    reason: str
    valid: tuple[str, ...]
    """Values that the user may give for this flag."""


def server_flags(
    model: Mapping[str, Any], dtype: str, machine: Machine, *, routes: bool, seeded_sets: bool = False
) -> list[ServerFlag]:
    """Return the flags by which a server on this machine gets the right kernels.

    The list is empty on a machine without GPU, where the package sglang_on_cpu chooses the kernels.
    model: content of config.json ({}: a model without experts); dtype: value of precision.rollout; routes: whether requests ask
    for routes or router features; seeded_sets: whether requests with a seed are sampled under top-p or top-k. For attention in
    bf16, SGLang chooses the kernel. All its choices for our model families (fa3, trtllm_mha, trtllm_mla, flashinfer, triton)
    support the sliding windows and attention sinks of these families.
    """
    if machine.gpu is None:
        return []
    found = []
    if dtype == "fp32":
        found.append(ServerFlag("--attention-backend", "triton", "others compute in 16 bits", TAKES_FP32))
    if seeded_sets:
        found.append(ServerFlag("--sampling-backend", "pytorch", "flashinfer's samplers take no seeds", ("pytorch",)))
    # A folder of quantized weights is never pushed to, so SGLang may choose its kernel if no request asks for routes.
    if dtype == "fp8" or (has_experts(model) and (routes or not model.get("quantization_config"))):
        reason = "others capture no routes, or store the experts in another layout than a push"
        found.append(ServerFlag("--moe-runner-backend", "triton", reason, AS_PUSHED[:1]))
    if dtype == "fp8":
        # Other kernels may change the layout of weights and scales (UE8M0 on Blackwell), so that a push fails.
        found.append(ServerFlag("--fp8-gemm-backend", "triton", "others change the layout of weights", ("triton",)))
    return found


def asks_routes(rollout: RolloutConfig, routing: RoutingConfig) -> bool:
    """Return whether replies contain the routes (indices of the chosen experts) of every token."""
    return rollout.routes or routing.source in FROM_ENGINE


def has_experts(model: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a MoE model."""
    from megatron_rl.models.families import family_named  # imports torch, which the first checks do not need

    family = family_named(model.get("architectures"))
    return family is not None and family.moe is not None


def check_extra_args(extra_args: Sequence[str], chosen: Sequence[ServerFlag]) -> None:
    """Raise UserError for a flag of rollout.server.extra_args that the run does not allow.

    Not allowed are flags with their own config key, kernels that `chosen` excludes, and --trust-remote-code, which runs code
    from the model's folder.
    """
    given = dict(_pairs(extra_args))
    if trusts := [
        flag for flag in given if len(flag) > 3 and "--trust-remote-code".startswith(flag)
    ]:  # argparse accepts unique prefixes
        raise UserError(
            f"config: rollout.server.extra_args has {trusts[0]}, which runs code from the model's folder; leave it"
            " out, and save the folder with classes of transformers"
        )
    for flag in given:
        if key := _OWN_KEYS.get(flag):
            raise UserError(f"config: rollout.server.extra_args has {flag}, which is {key}; set that key instead")
    for choice in chosen:
        same = [choice.flag]
        if choice.flag == "--attention-backend":
            same += ["--prefill-attention-backend", "--decode-attention-backend"]
        for flag in same:
            if given.get(flag, choice.value) not in choice.valid:
                raise UserError(
                    f"config: rollout.server.extra_args has {flag} {given[flag]}, but this run needs {choice.value}:"
                    f" {choice.reason}; leave it out"
                )


def speculates(extra_args: Sequence[str]) -> bool:
    """Return whether the flags turn on speculative decoding."""
    return any(flag.startswith("--speculative") for flag, _ in _pairs(extra_args))


def _pairs(extra_args: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for word, following in pairwise([*extra_args, "--"]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            pairs.append((flag, value if equals else "" if following.startswith("--") else following))
    return pairs
