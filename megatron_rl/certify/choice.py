"""The config of a certificate: the model as it is in its folder, on a server that is started here. No torch."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config import Config, LoRAConfig, RoutingConfig
from megatron_rl.errors import UserError


def certified(config: Config, prompts: int, tokens: int) -> Config:
    """The config without what no certificate has. Errors: UserError naming the key of what cannot be certified."""
    if config.rollout.external:
        raise UserError(
            "certify: rollout.addresses lists servers, which do not tell what their operators put out; set rollout.addresses:"
            " [], and a server is started here"
        )
    if prompts < 1 or tokens < 2:
        raise UserError(f"certify: --prompts {prompts} --tokens {tokens}: at least 1 and 2")
    # Neither side replays routes or has adapters.
    rollout = replace(config.rollout, routes=False)
    return replace(config, routing=RoutingConfig(), lora=LoRAConfig(), rollout=rollout)
