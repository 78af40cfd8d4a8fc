"""Checks of the routers' own losses and biases."""

from __future__ import annotations

from types import SimpleNamespace

from transformers import PreTrainedConfig

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.launch.plan import Kind
from megatron_rl.models.bridges import make_bridge
from megatron_rl.models.parallel_check import architecture, expert_count


def check_routers(config: Config, hf_config: PreTrainedConfig, kind: Kind) -> None:
    """Errors: UserError naming a key that does nothing with this model, or must not be set here."""
    for key in ("moe_aux_loss", "moe_z_loss", "moe_bias_update_rate"):
        if getattr(config.model, key) and not expert_count(hf_config):
            raise UserError(
                f"config: model.{key} = {getattr(config.model, key):g} does nothing: {architecture(hf_config)} has no experts;"
                " set it to 0"
            )
    if not config.model.moe_bias_update_rate:
        return
    key = f"model.moe_bias_update_rate = {config.model.moe_bias_update_rate:g}"
    if not make_bridge(hf_config).provider_bridge(SimpleNamespace(config=hf_config)).moe_router_enable_expert_bias:
        raise UserError(
            f"config: {key} does nothing: the routers of {architecture(hf_config)} have no biases of experts, as"
            " DeepSeek-V3's have; set it to 0, and model.moe_aux_loss above"
        )
    if kind == "train":
        raise UserError(
            f"config: {key}: biases that move change the policy apart from its loss, so that its ratio to the policy that"
            " sampled says less and less of what was learned; keep the balance that was found before, with 0"
        )
    if config.lora.rank:
        raise UserError(
            f"config: {key} with lora.rank: the biases are the model's own, and an adapter's folder has none; set one of the"
            " two to 0"
        )
