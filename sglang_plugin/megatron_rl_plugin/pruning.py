"""The engine's part of dynamic vocabulary pruning: a logit processor that removes the tail before a token is sampled.

For experiments, it can also add a fault: a lower bound on every token's probability.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class PruneTail(CustomLogitProcessor):
    """Keeps the tokens {j : z_j >= max(z) + log_rho}, z = logits / temperature (Li et al., "Taming the Tail", eq. 19).

    custom_params of a request: temperature; log_rho (without it, all tokens stay); log_floor, which first sets z to max(z,
    max(z) + log_floor). Afterwards, the sampler divides the remaining logits by the temperature and computes the log-probs from
    them. The log-probs therefore belong to the pruned, renormalized policy.

    SGLang keeps one instance as long as requests stay in a batch, and calls the instance for every token. The instance keeps
    the parameters of the last call on the device.
    """

    _found: tuple = ()
    """Device and parameters of the last call."""
    _columns: tuple[torch.Tensor, ...] = ()
    """The parameters of the last call as tensors."""
    _plain = False
    """True if all temperatures are 1."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Prune logits [n, V] in place. custom_param_list: one entry per row."""
        temperature, log_rho, log_floor = self._parameters(custom_param_list, logits.device)
        maximum = logits.amax(-1, keepdim=True).float()
        if any("log_floor" in row for row in custom_param_list):
            logits.copy_(torch.maximum(logits, maximum + log_floor * temperature))
        scaled = logits if self._plain else logits / temperature  # as in the trainer's kernel, to the last bit
        return logits.masked_fill_(scaled < maximum / temperature + log_rho, -torch.inf)

    def _parameters(self, rows: list[dict[str, Any]], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return fp32 temperature, log_rho and log_floor, each [n, 1], or [1, 1] if all rows have the same parameters."""
        nothing = -torch.inf
        wanted = [(row["temperature"], row.get("log_rho", nothing), row.get("log_floor", nothing)) for row in rows]
        found = (device, *(wanted if len(set(wanted)) > 1 else wanted[:1]))
        if found != self._found:
            columns = torch.tensor(found[1:], dtype=torch.float32).to(device)
            self._found, self._columns = found, tuple(columns.split(1, 1))
            self._plain = all(temperature == 1 for temperature, *_ in wanted)
        return self._columns
