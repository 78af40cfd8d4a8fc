"""Config of a certificate: the model is the one in model.path, on a server that this process starts. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config import Config, LoRAConfig, RoutingConfig
from megatron_rl.errors import UserError


def certified(config: Config, prompts: int, tokens: int) -> Config:
    """Return the config without route replay and adapters. Errors: UserError that names the key, if it cannot be certified."""
    if config.rollout.external:
        raise UserError(
            "certify: rollout.addresses lists external servers, which do not record the outputs of their operators; set"
            " rollout.addresses: [], so that certify starts a server"
        )
    if prompts < 1 or tokens < 2:
        raise UserError(f"certify: --prompts {prompts} --tokens {tokens}: must be at least 1 and 2")
    # A certificate is made without route replay and adapters on both sides.
    rollout = replace(config.rollout, routes=False)
    return replace(config, routing=RoutingConfig(), lora=LoRAConfig(), rollout=rollout)
