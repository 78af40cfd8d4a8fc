"""Router features (inputs and logits) of sampled tokens, which a reply contains if the request asks for them."""

from __future__ import annotations

import base64

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from torch import Tensor

KEY = "router_features"
"""Field of a reply's meta_info: one entry per response token, None for tokens without features."""
STRIDE = "router_feature_stride"
"""Field of the model's config (set with --json-model-override-args): distance between the tokens that have features."""
ASKS = ("router-features-", "router-logits-")
"""Prefixes of request ids. The first asks for router inputs and logits, the second for logits only. The client has a copy."""
MAX_REQUESTS = 1 << 16
"""Largest number of requests whose prompt length is remembered."""


class FeatureExport:
    """Router inputs h and router logits z (before route prediction) of the forward passes that sampled tokens 0, s, 2s, ...

    s is the stride. Only requests that ask for features get them. Response token i is sampled from the input token at position
    prompt_length - 1 + i. Its entry is the base64 code of two little-endian arrays. The first is h of all MoE layers, [layers,
    hidden], in the model's dtype. It is left out if the request asks only for logits. The second is z, [layers, experts], in
    fp32.
    """

    def __init__(self, stride: int):
        """Errors: NotImplementedError for server options with which the rows of a router's input are not the batch's rows."""
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
                raise NotImplementedError(f"export of router features does not work with {what}")
        self._sends = parallel.tp_rank == 0  # the rank whose outputs SGLang returns
        self._prompt_lengths: dict[str, int] = {}

    @classmethod
    def from_config(cls, config) -> FeatureExport | None:
        stride = getattr(config, STRIDE, 0)
        return cls(stride) if stride else None

    def begin(self, batch) -> None:
        """Select the rows of a forward pass whose features are kept. batch: SGLang's ForwardBatch."""
        if batch.forward_mode.is_decode():
            rows, lengths = range(batch.batch_size), batch.seq_lens.tolist()
        elif batch.forward_mode.is_extend():
            rows = [end - 1 for end in torch.as_tensor(batch.extend_seq_lens_cpu).cumsum(0).tolist()]
            lengths = batch.seq_lens.tolist()
            for rid, length in zip(batch.rids, batch.orig_seq_lens.tolist(), strict=True):
                # The first prefill has the prompt's length. A prefill after a retraction includes response tokens.
                if rid.startswith(ASKS):
                    self._prompt_lengths.setdefault(rid, length)
            while len(self._prompt_lengths) > MAX_REQUESTS:
                del self._prompt_lengths[next(iter(self._prompt_lengths))]
        else:
            rows, lengths = [], []
        self._requests = batch.batch_size
        self._chosen = []
        self._whole = []  # True for each selected request that also asks for router inputs
        for request, (rid, length) in enumerate(zip(batch.rids or [], lengths, strict=False)):
            response = length - self._prompt_lengths.get(rid, length + 1)
            if response >= 0 and response % self.stride == 0:
                self._chosen.append(request)
                self._whole.append(rid.startswith(ASKS[0]))
        self._rows = torch.tensor([rows[request] for request in self._chosen], device=batch.seq_lens.device)
        self._hidden: list[Tensor] = []
        self._logits: list[Tensor] = []

    def keep(self, layer: int, h: Tensor, z: Tensor) -> None:
        """Store the selected rows of h [T, hidden] and z [T, experts] of MoE layer `layer`."""
        if self._chosen and self._sends:
            assert layer == len(self._hidden), "routers did not run in the order of the layers"
            self._hidden.append(h[self._rows])
            self._logits.append(z[self._rows].float())

    def finish(self) -> dict[str, list[str | None]]:
        """Return the entries of the forward pass, one per request."""
        entries: list[str | None] = [None] * self._requests
        if self._hidden:
            hidden, logits = torch.stack(self._hidden, 1).cpu(), torch.stack(self._logits, 1).cpu()
            for index, (request, whole) in enumerate(zip(self._chosen, self._whole, strict=True)):
                wanted = (hidden, logits) if whole else (logits,)
                data = b"".join(t[index].contiguous().view(torch.uint8).numpy().tobytes() for t in wanted)
                entries[request] = base64.b64encode(data).decode()
        return {KEY: entries}
