"""Run with SGLang's Python: what the pruning processor makes anew at each token, and what it returns.

stdout: JSON {made: tensors made from Python numbers in each call, kept: whether each call kept what its formula says}.
"""

from __future__ import annotations

import json
import math

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch.utils._python_dispatch import TorchDispatchMode

NAMED = json.dumps({"callable": b"cmegatron_rl_plugin.pruning\nPruneTail\n.".hex()})


class Made(TorchDispatchMode):
    """Counts tensors that are made on the host."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.lift_fresh.default
        return function(*args, **kwargs or {})


def kept(logits: torch.Tensor, rows: list[dict]) -> torch.Tensor:
    scores = logits.double() / torch.tensor([[row["temperature"]] for row in rows], dtype=torch.float64)
    return scores >= scores.amax(-1, keepdim=True) + torch.tensor([[row["log_rho"]] for row in rows]).double()


torch.manual_seed(torch.seed() % 2**31)
alike = [{"log_rho": math.log(0.3), "temperature": 0.7}] * 8
mixed = [{"log_rho": math.log(0.1 + 0.1 * i), "temperature": 0.5 + 0.2 * i} for i in range(8)]
calls = [alike, alike, alike[:5], alike[:1], mixed, mixed, mixed[2:], mixed[2:], alike]
processor = CustomLogitProcessor.from_str(NAMED)  # as SGLang makes it, once for a batch
made, right = [], []
for rows in calls:
    logits = torch.randn(len(rows), 97) * 2
    expected = kept(logits, rows)
    with Made() as counted:
        pruned = processor(logits, rows)
    made.append(counted.count)
    right.append(bool((pruned.isfinite() == expected).all()) and bool((pruned == logits)[expected].all()))
print(json.dumps({"made": made, "right": right}))
