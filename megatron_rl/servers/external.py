"""Checks external servers: compares what each server reports about itself with what the config needs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl_plugin.gates import OVERRIDE as GATES
from megatron_rl_plugin.identical import FLAG as IDENTICAL
from transformers import PreTrainedConfig

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config
from megatron_rl.credentials import WRONG_KEY, hide
from megatron_rl.errors import UserError
from megatron_rl.http_client import NoAnswer, ask_now
from megatron_rl.models.families import architecture, expert_count
from megatron_rl.models.parallel_check import one_line
from megatron_rl.models.precision import ROLLOUT_DTYPES
from megatron_rl.servers.client import with_scheme
from megatron_rl.servers.flags import AS_PUSHED, TAKES_FP32, asks_routes
from megatron_rl.servers.server import asks_gates, feature_stride, serves_adapters
from megatron_rl.sync.engines import FROM_FOLDER, RELEASED, Engines, owner_of

ANSWER_S = 60.0
PHASES = ("prefill", "decode")


class WrongKey(UserError):
    """Raised if a server needs another API key than the given one."""


def workers_of(router: str, timeout_s: float = 10.0, *, key: str = "") -> list[str] | None:
    """Return the servers to which SGLang's router (`sglang_router`) sends requests, from GET /workers.

    None: the address does not answer, or is not a router's. Errors: UserError for a router with separate prefill and decode
    servers, because a weight push needs servers that do both.
    """
    try:
        answer = ask_now("GET", f"{with_scheme(router)}/workers", timeout_s=timeout_s, key=key)
        if answer.status >= 400:
            return None
        workers = answer.json()["workers"]
        found = [with_scheme(worker["url"]) for worker in workers]
        kinds = {worker.get("worker_type", "regular") for worker in workers} - {"regular"}
    except (NoAnswer, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if kinds:
        raise UserError(
            f"rollout.addresses: {router} routes to {' and '.join(sorted(kinds))} servers, but each server must answer alone:"
            " list other servers, or start the router without --pd-disaggregation"
        )
    return found


def check_servers(
    addresses: Iterable[str], config: Config, hf_config: PreTrainedConfig, *, pushes: bool, run: str = "", key: str = ""
) -> None:
    """Raise UserError (one line) for the first of these servers that cannot do what the config needs.

    addresses: servers of rollout.addresses. pushes, run: as for `problems`.
    """
    for address in addresses:
        if found := problems_of(address, config, hf_config, pushes=pushes, run=run, key=key):
            raise UserError(f"rollout.addresses: {hide(with_scheme(address))} {found}")


def server_of(address: str, key: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a server reports about itself: the answers of SGLang's /server_info and /model_info.

    Errors: UserError if the server does not answer.
    """
    return _get(address, "server_info", key), _get(address, "model_info", key)


def asks_for_no_key(address: str) -> bool:
    """Return whether a server answers clients without an API key (GET /model_info)."""
    try:
        return bool(_get(address, "model_info"))
    except UserError:
        return False


def release(addresses: Iterable[str], run: str, key: str = "") -> None:
    """Mark the servers that have weights of run `run` as free for other runs' pushes. Skip servers that do not answer."""
    for address in addresses:
        with contextlib.suppress(UserError):
            if owner_of(_get(address, "model_info", key).get("weight_version")) == run:
                engines = Engines([with_scheme(address)], ANSWER_S, key=key)
                engines.attempt("/update_weight_version", {"new_version": RELEASED, "abort_all_requests": False})
                engines.close()


def problems_of(
    address: str, config: Config, hf_config: PreTrainedConfig, *, pushes: bool, run: str = "", key: str = ""
) -> str:
    """Return one text with all problems of a server and the remedy; '' if there is no problem.

    The caller puts the server's address before the text. pushes, run: as for `problems`.

    Errors: UserError if the server does not answer.
    """
    info, model = server_of(address, key)
    found = problems(info, model, config, hf_config, pushes=pushes, run=run)
    return f"{'; it '.join(found)}; start it through tools/serve.py with this config" if found else ""


def problems(
    info: Mapping[str, Any],
    model: Mapping[str, Any],
    config: Config,
    hf_config: PreTrainedConfig,
    *,
    pushes: bool,
    run: str = "",
) -> list[str]:
    """Return the problems that a server has with the config, each as a predicate ("runs without --enable-lora, ...").

    info, model: answers of SGLang's /server_info (resolved arguments) and /model_info. pushes: whether this run
    pushes weights to the server; otherwise the server answers with the weights of its model folder. run: id of this run. A
    server with weights of another run is a problem.
    """
    try:
        return _problems(info, model, config, hf_config, pushes=pushes, run=run)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # fields of unexpected types
        return [f"does not describe itself as SGLang 0.5.23 does ({type(error).__name__}: {one_line(error)})"]


def _problems(
    info: Mapping[str, Any],
    model: Mapping[str, Any],
    config: Config,
    hf_config: PreTrainedConfig,
    *,
    pushes: bool,
    run: str,
) -> list[str]:
    precision, context, routes = (
        config.precision,
        config.rollout.context_length,
        asks_routes(config.rollout, config.routing),
    )
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    found: list[str] = []

    def refuse(wrong: object, problem: str) -> None:
        if wrong:
            found.append(problem)

    name, served, folder = architecture(hf_config), model.get("architectures") or [], model.get("model_path")
    refuse(name not in served, f"serves {', '.join(served)}, and model.path is {name}")
    if not pushes:
        elsewhere = folder is not None and Path(folder).resolve() != Path(config.model.path).resolve()
        refuse(elsewhere, f"answers with the weights of {folder}: set model.path to it")
        refuse(info.get("load_format") == "dummy", "has random weights (--load-format dummy), and none are pushed")
    version = model.get("weight_version") or FROM_FOLDER
    refuse(
        not pushes and version != FROM_FOLDER, f"has weights that a run pushed ({version!r:.80}), and not its folder's"
    )
    refuse(
        pushes and owner_of(version) not in ("", run),
        f"has weights of another run ({version!r:.80}), which may still push to it",
    )
    dtype, wanted = info.get("dtype"), ROLLOUT_DTYPES[precision.rollout]
    refuse(dtype not in ("auto", wanted), f"runs with --dtype {dtype}, and precision.rollout is {precision.rollout}")
    head = bool(info.get("enable_fp32_lm_head"))
    refuse(
        head != precision.fp32_lm_head,
        f"runs {'with' if head else 'without'} --enable-fp32-lm-head, and precision.fp32_lm_head is {str(not head).lower()}",
    )
    for flag, size in (("--context-length", "context_length"), ("--max-total-tokens", "max_total_num_tokens")):
        tokens = info.get(size) or context
        refuse(tokens < context, f"has room for {tokens} tokens ({flag}), and rollout.context_length is {context}")
    refuse(
        info.get("speculative_algorithm") and (routes or support.has_processor),
        f"runs with --speculative-algorithm {info.get('speculative_algorithm')}, which bypasses the record of routes and the"
        " processor for vocabulary pruning",
    )
    refuse(routes and not info.get("enable_return_routed_experts"), "runs without --enable-return-routed-experts")
    refuse(
        support.has_processor and not info.get("enable_custom_logit_processor"),
        "runs without --enable-custom-logit-processor, which pruning.enabled and rollout.sampling.tail_floor need",
    )
    kept = info.get("sampling_mask_max_tokens") or 0
    refuse(
        support.keeps_sets and kept < support.top_k,
        f"runs with --sampling-mask-max-tokens {kept}, and rollout.sampling.top_k = {support.top_k} keeps more",
    )
    sampler = info.get("sampling_backend")
    refuse(
        support.keeps_sets and config.rollout.seed_requests and sampler not in (None, "pytorch"),
        f"runs with --sampling-backend {sampler}, which takes no seeds (rollout.seed_requests) under top_p or top_k: use"
        " pytorch",
    )
    overrides = json.loads(info.get("json_model_override_args") or "{}")
    identical = bool(overrides.get(IDENTICAL))
    refuse(
        identical != precision.identical,
        f"runs with {'the trainer' if identical else 'SGLang'}'s operators, and precision.identical is"
        f" {str(precision.identical).lower()}",
    )
    stride, needed = overrides.get("router_feature_stride", 0), feature_stride(config.rollout, config.routing)
    refuse(
        stride != needed, f"exports router features with a stride of {stride}, and this config wants {needed} (0: none)"
    )
    gates = asks_gates(config.rollout, config.routing)
    refuse(
        routes and bool(overrides.get(GATES)) != gates,
        f"sends {'no gates' if gates else 'gates'} with its routes, and this config wants {'them' if gates else 'none'}"
        " (routing.replay_gates, rollout.gates)",
    )
    lora = serves_adapters(config.lora, config.sync) and pushes
    refuse(lora and not info.get("enable_lora"), "runs without --enable-lora, which sync.adapters = unmerged needs")
    if pushes:
        ranks = max(info.get("pp_size") or 1, info.get("dp_size") or 1)
        refuse(ranks > 1, "runs with --pp-size or --dp-size above 1, so a push does not reach all ranks")
    if info.get("device") == "cuda":
        experts, runner = expert_count(hf_config) > 0, info.get("moe_runner_backend")
        refuse(
            experts and (pushes or routes) and runner not in AS_PUSHED,
            f"runs with --moe-runner-backend {runner}, which captures no routes or stores experts in another layout than a"
            " push: use triton",
        )
        found_backends = (info.get(f"{phase}_attention_backend") or info.get("attention_backend") for phase in PHASES)
        attention = {str(backend) for backend in found_backends if backend is not None}
        refuse(
            precision.rollout == "fp32" and not attention <= set(TAKES_FP32),
            f"runs with --attention-backend {' and '.join(sorted(attention))}, which does not compute in fp32: use triton",
        )
    return found


def _get(address: str, path: str, key: str = "") -> dict[str, Any]:
    named = f"rollout.addresses: {hide(with_scheme(address))}"
    try:
        answer = ask_now("GET", f"{with_scheme(address)}/{path}", timeout_s=ANSWER_S, key=key)
        if answer.refuses_key:
            raise WrongKey(f"{named}: {WRONG_KEY.format(setting='rollout.api_key')}")
        if answer.status >= 400:
            raise ValueError(f"it {answer}")
        found = answer.json()
        if not isinstance(found, dict):
            raise ValueError(f"it answers a {type(found).__name__}")
        return found
    except (NoAnswer, ValueError, RecursionError) as error:
        raise UserError(
            f"{named}/{path} does not answer as SGLang 0.5.23 ({hide(one_line(str(error)))}); is the server up?"
        ) from None
