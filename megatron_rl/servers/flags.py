"""Flags that SGLang must be given on a GPU, where it would choose kernels that know nothing of routes, pushes or fp32.

As found in SGLang 0.5.23 (`sglang/srt/arg_groups`); tests/servers/test_choices.py has its own resolution of these flags.
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
"""MoE runners that hold the experts as they are pushed and take their top-k from SGLang, which is where routes are captured;
`auto` after resolution is Triton's. By itself gpt-oss gets triton_kernel, whose own top-k captures nothing, and Blackwell
flashinfer_trtllm, which routes inside its kernel (old rows of the capture buffer stay) and lays the experts out anew."""
FP32_PRODUCTS = {"TRITON_F32_DEFAULT": "ieee"}
"""Environment of an fp32 server: without it Triton multiplies fp32 in TF32, which has bf16's range and 10 bits of mantissa."""
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
"""Flags that have a key of their own, which the rest of a run reads."""


@dataclass(frozen=True)
class ServerFlag:
    """One flag of the server."""

    flag: str
    value: str
    reason: str
    valid: tuple[str, ...]
    """Values that do as well."""


def server_flags(
    model: Mapping[str, Any], dtype: str, machine: Machine, *, routes: bool, seeded_sets: bool = False
) -> list[ServerFlag]:
    """The kernels that a server on this machine has to take; none without a GPU, where the platform folder chooses.

    model: content of config.json ({}: a model without experts); dtype: of precision.rollout; routes: they, or router features,
    are asked for; seeded_sets: requests with a seed are sampled under top-p or top-k. Attention in bf16 stays SGLang's choice:
    all that it takes for our families (fa3, trtllm_mha, trtllm_mla, flashinfer, triton) know their windows and sinks.
    """
    if machine.gpu is None:
        return []
    found = []
    if dtype == "fp32":
        found.append(ServerFlag("--attention-backend", "triton", "the others compute in 16 bits", TAKES_FP32))
    if seeded_sets:
        found.append(ServerFlag("--sampling-backend", "pytorch", "flashinfer's samplers take no seeds", ("pytorch",)))
    # A folder of quantized weights is served and never pushed to: there SGLang may choose while nobody asks for routes.
    if dtype == "fp8" or (has_experts(model) and (routes or not model.get("quantization_config"))):
        reason = "others capture no routes, or hold the experts in another order than they are pushed in"
        found.append(ServerFlag("--moe-runner-backend", "triton", reason, AS_PUSHED[:1]))
    if dtype == "fp8":
        # The other kernels may lay weights and scales out anew (UE8M0 on Blackwell), where no push would find them.
        found.append(ServerFlag("--fp8-gemm-backend", "triton", "others lay weights and scales out anew", ("triton",)))
    return found


def asks_routes(rollout: RolloutConfig, routing: RoutingConfig) -> bool:
    """True where replies have the experts of every token."""
    return rollout.routes or routing.source in FROM_ENGINE


def has_experts(model: Mapping[str, Any]) -> bool:
    """True if config.json is of a MoE model."""
    from megatron_rl.models.families import family_named  # brings torch, which the first checks do without

    family = family_named(model.get("architectures"))
    return family is not None and family.moe is not None


def check_extra_args(extra_args: Sequence[str], chosen: Sequence[ServerFlag]) -> None:
    """Errors: UserError for a flag that has a key of its own, another kernel than the run can use, or its model's code."""
    given = dict(_pairs(extra_args))
    if trusts := [
        flag for flag in given if len(flag) > 3 and "--trust-remote-code".startswith(flag)
    ]:  # as argparse reads it
        raise UserError(
            f"config: rollout.server.extra_args has {trusts[0]}, which runs what a model's folder brings along; leave it"
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
    """True if the flags ask for speculative decoding."""
    return any(flag.startswith("--speculative") for flag, _ in _pairs(extra_args))


def _pairs(extra_args: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for word, following in pairwise([*extra_args, "--"]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            pairs.append((flag, value if equals else "" if following.startswith("--") else following))
    return pairs
