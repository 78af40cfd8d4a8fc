"""The engine's side of dynamic vocabulary pruning: a logit processor that removes the tail before a token is sampled."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class PruneTail(CustomLogitProcessor):
    """Keeps {j : z_j >= max(z) + log_rho} with z = logits / temperature (papers/000, eq. 19).

    custom_params of a request: log_rho, temperature. The sampler divides by the temperature afterwards and takes its
    log-probs from what is left, so those are of the pruned, renormalised policy.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """logits: [n, V], changed in place; one entry of custom_param_list for each row."""
        log_rho, temperature = (
            torch.tensor([row[key] for row in custom_param_list], dtype=torch.float32).to(logits.device)[:, None]
            for key in ("log_rho", "temperature")
        )
        # The threshold goes to the logits' scale and not the logits to the threshold's: a pass over them less in each step.
        maximum = logits.amax(-1, keepdim=True).float()
        threshold = (maximum / temperature + log_rho) * temperature
        # Rounding may lift it above the maximum, where rho is 1 or next to it.
        threshold = torch.minimum(threshold, maximum)
        return logits.masked_fill_(logits < threshold, -torch.inf)
