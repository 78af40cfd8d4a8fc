"""The engine's side of dynamic vocabulary pruning: a logit processor that removes the tail before a token is sampled.

It also plants a fault, where an experiment asks for one: a floor below which no token's probability falls.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class PruneTail(CustomLogitProcessor):
    """Keeps {j : z_j >= max(z) + log_rho} with z = logits / temperature (Li et al., "Taming the Tail", eq. 19).

    custom_params of a request: temperature; log_rho, without which all tokens stay; log_floor, by which z <- max(z, max(z) +
    log_floor) before. The sampler divides by the temperature afterwards and takes its log-probs from what is left, so those are
    of the pruned, renormalized policy.

    SGLang keeps one instance for as long as requests stay in a batch and calls it for every token: the parameters of its
    last call stay on the device.
    """

    _found: tuple = ()
    _columns: tuple[torch.Tensor, ...] = ()
    _plain = False
    """True if all temperatures are 1."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """logits: [n, V], changed in place; one entry of custom_param_list for each row."""
        temperature, log_rho, log_floor = self._parameters(custom_param_list, logits.device)
        maximum = logits.amax(-1, keepdim=True).float()
        if any("log_floor" in row for row in custom_param_list):
            logits.copy_(torch.maximum(logits, maximum + log_floor * temperature))
        scaled = logits if self._plain else logits / temperature  # as the trainer's kernel compares, to the last bit
        return logits.masked_fill_(scaled < maximum / temperature + log_rho, -torch.inf)

    def _parameters(self, rows: list[dict[str, Any]], device: torch.device) -> tuple[torch.Tensor, ...]:
        """fp32 temperature, log_rho and log_floor, [n, 1] each; [1, 1] where they are those of all rows."""
        nothing = -torch.inf
        wanted = [(row["temperature"], row.get("log_rho", nothing), row.get("log_floor", nothing)) for row in rows]
        found = (device, *(wanted if len(set(wanted)) > 1 else wanted[:1]))
        if found != self._found:
            columns = torch.tensor(found[1:], dtype=torch.float32).to(device)
            self._found, self._columns = found, tuple(columns.split(1, 1))
            self._plain = all(temperature == 1 for temperature, *_ in wanted)
        return self._columns
