"""The engine's side of dynamic vocabulary pruning: a logit processor that removes the tail before a token is sampled."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class PruneTail(CustomLogitProcessor):
    """Keeps {j : z_j >= max(z) + log_rho} with z = logits / temperature (papers/000, eq. 19).

    custom_params of a request: log_rho, temperature. The sampler divides by the temperature afterwards and takes its
    log-probs from what is left, so those are of the pruned, renormalized policy.

    SGLang keeps one instance for as long as requests stay in a batch and calls it for every token: the parameters of its
    last call stay on the device.
    """

    _found: tuple = ()
    _columns: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """logits: [n, V], changed in place; one entry of custom_param_list for each row."""
        log_rho, temperature = self._parameters(custom_param_list, logits.device)
        # The threshold goes to the logits' scale and not the logits to the threshold's: a pass over them less in each step.
        maximum = logits.amax(-1, keepdim=True).float()
        threshold = (maximum / temperature + log_rho) * temperature
        # Rounding may lift it above the maximum, where rho is 1 or next to it.
        threshold = torch.minimum(threshold, maximum)
        return logits.masked_fill_(logits < threshold, -torch.inf)

    def _parameters(self, rows: list[dict[str, Any]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 log_rho and temperature, [n, 1] each; [1, 1] where they are those of all rows."""
        pairs = [(row["log_rho"], row["temperature"]) for row in rows]
        found = (device, *(pairs if len(set(pairs)) > 1 else pairs[:1]))
        if found != self._found:
            columns = torch.tensor(found[1:], dtype=torch.float32).to(device)
            self._found, self._columns = found, (columns[:, :1], columns[:, 1:])
        return self._columns
