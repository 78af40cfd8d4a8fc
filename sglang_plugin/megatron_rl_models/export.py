"""Router features of sampled tokens, sent along with the reply where the server is asked for it."""

from __future__ import annotations

import base64

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from torch import Tensor

KEY = "router_features"
"""Field of meta_info: one entry per response token, None where none was asked for."""
STRIDE = "router_feature_stride"
"""Field of the model's config, set with --json-model-override-args."""
ASKS = ("router-features-", "router-logits-")
"""Prefixes of the ids of requests that want them, or the logits alone (as in the trainer's client)."""
MAX_REQUESTS = 1 << 16


class FeatureExport:
    """Router inputs h and logits z (before prediction) under which response tokens 0, s, 2s, ... were predicted.

    Only requests that want them have some. Response token i comes out of the input token at position prompt_length - 1 + i.
    Its entry is base64 of h of all MoE layers [layers, hidden] in the model's dtype, where it is wanted, then z
    [layers, experts] in fp32, little-endian.
    """

    def __init__(self, stride: int):
        """Errors: NotImplementedError for server options under which rows of a router are not those of the batch."""
        self.stride = stride
        parallel, execution = get_parallel(), get_exec()
        refused = {
            "CUDA graphs (--cuda-graph-backend-decode, --cuda-graph-backend-prefill)": not cuda_graph_fully_disabled(),
            "pipeline parallelism": parallel.pp_size > 1,
            "data-parallel attention": is_dp_attention_enabled(),
            "--moe-a2a-backend": not get_moe_a2a_backend().is_none(),
            "two-batch overlap": execution.overlap.enable_two_batch_overlap,
            "speculative decoding": get_spec().speculative_algorithm is not None,
        }
        for what, found in refused.items():
            if found:
                raise NotImplementedError(f"export of router features does not go with {what}")
        self._sends = parallel.tp_rank == 0  # the rank whose outputs SGLang returns
        self._prompt_lengths: dict[str, int] = {}

    @classmethod
    def from_config(cls, config) -> FeatureExport | None:
        stride = getattr(config, STRIDE, 0)
        return cls(stride) if stride else None

    def begin(self, batch) -> None:
        """Choose the rows of a forward pass. batch: SGLang's ForwardBatch."""
        if batch.forward_mode.is_decode():
            rows, lengths = range(batch.batch_size), batch.seq_lens.tolist()
        elif batch.forward_mode.is_extend():
            rows = [end - 1 for end in torch.as_tensor(batch.extend_seq_lens_cpu).cumsum(0).tolist()]
            lengths = batch.seq_lens.tolist()
            for rid, length in zip(batch.rids, batch.orig_seq_lens.tolist(), strict=True):
                # The first prefill tells the prompt's length; one after a retraction has response tokens too.
                if rid.startswith(ASKS):
                    self._prompt_lengths.setdefault(rid, length)
            while len(self._prompt_lengths) > MAX_REQUESTS:
                del self._prompt_lengths[next(iter(self._prompt_lengths))]
        else:
            rows, lengths = [], []
        self._requests = batch.batch_size
        self._chosen = []
        self._whole = []  # whether such a request wants more than logits
        for request, (rid, length) in enumerate(zip(batch.rids or [], lengths, strict=False)):
            response = length - self._prompt_lengths.get(rid, length + 1)
            if response >= 0 and response % self.stride == 0:
                self._chosen.append(request)
                self._whole.append(rid.startswith(ASKS[0]))
        self._rows = torch.tensor([rows[request] for request in self._chosen], device=batch.seq_lens.device)
        self._hidden: list[Tensor] = []
        self._logits: list[Tensor] = []

    def keep(self, layer: int, h: Tensor, z: Tensor) -> None:
        """Take h [T, hidden], z [T, experts] of MoE layer `layer`."""
        if self._chosen and self._sends:
            assert layer == len(self._hidden), "routers ran in another order than that of the layers"
            self._hidden.append(h[self._rows])
            self._logits.append(z[self._rows].float())

    def finish(self) -> dict[str, list[str | None]]:
        """The entries of the pass, one per request."""
        entries: list[str | None] = [None] * self._requests
        if self._hidden:
            hidden, logits = torch.stack(self._hidden, 1).cpu(), torch.stack(self._logits, 1).cpu()
            for index, (request, whole) in enumerate(zip(self._chosen, self._whole, strict=True)):
                wanted = (hidden, logits) if whole else (logits,)
                data = b"".join(t[index].contiguous().view(torch.uint8).numpy().tobytes() for t in wanted)
                entries[request] = base64.b64encode(data).decode()
        return {KEY: entries}
