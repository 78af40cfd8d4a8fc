"""Every kernel of csrc/ once on small, uneven shapes: what compute-sanitizer watches. Prints 'ran' at the end."""

from __future__ import annotations

import torch

from megatron_rl.ops import masked_log_softmax, sink_attention

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
for dtype in (torch.float32, torch.bfloat16):
    for rows, columns in ((1, 1), (3, 7), (5, 1000), (2, 40_003)):
        for log_rho in (None, -3.0):
            logits = torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
            targets = torch.randint(0, columns, (rows,), device=device)
            targets[-1] = -100
            found = masked_log_softmax(logits, targets, log_rho=log_rho, with_entropy=True)
            (found.log_probs.nan_to_num(neginf=0.0).sum() + found.entropy.sum()).backward()
for lengths, window in (([1, 7, 130], None), ([65, 3], 17)):
    borders = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(int(borders[-1]), h, 64, device=device).bfloat16().requires_grad_() for h in (4, 2, 2))
    sinks = torch.randn(4, device=device).requires_grad_()
    sink_attention(q, k, v, sinks, cu_seqlens=borders, window=window).sum().backward()
if device.type == "cuda":
    torch.cuda.synchronize()
print("ran")
