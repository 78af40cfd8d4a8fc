"""Route prediction in a served model. A router with input h and logits z uses the logits z + W_p h instead.

All steps after the logits (top-k, gates, the record of the chosen experts) are the model's own code. W_p is a parameter of the
router module, so SGLang loads, hashes and updates it like every other weight. Next to `...mlp.gate.weight` there is
`...mlp.gate.predictor.weight` [experts, hidden] fp32. Hugging Face folders do not contain W_p, so it is zero until the trainer
pushes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.utils import is_cpu, is_cuda
from torch import Tensor, nn

from megatron_rl_models.export import FeatureExport

SUFFIX = ".predictor.weight"


class Predictor(nn.Module):
    """Predictor weights W_p [experts, hidden], fp32, initially zero."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, hidden, dtype=torch.float32), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        """Return W_p h for h [T, hidden]: [T, experts] fp32."""
        return nn.functional.linear(h.float(), self.weight)


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: router} of a model in layer order. A router is the linear layer in the same block as a top-k module."""
    routers = {}
    for name, block in model.named_modules():
        topk = getattr(block, "topk", None)
        if topk is None:
            continue
        # Another kind of top-k module may not route by logits (DeepSeek-V4 hashes tokens).
        if not isinstance(topk, TopK):
            raise NotImplementedError(f"route prediction: {name} routes with {type(topk).__name__}")
        router = "gate" if hasattr(block, "gate") else "router"
        routers[f"{name}.{router}"] = getattr(block, router)
    return routers


def check_platform() -> None:
    """Check the hardware.

    Errors: NotImplementedError if SGLang's kernels would use a router's weight without calling its forward.
    """
    if not (is_cuda() or is_cpu()):
        raise NotImplementedError(
            "route prediction needs an NVIDIA GPU or a CPU: SGLang's fused routers for other devices would ignore it"
        )
    if get_moe_a2a_backend().is_megamoe():
        raise NotImplementedError(
            "route prediction: --moe-a2a-backend megamoe may fuse router and top-k, which would ignore the prediction"
        )


def with_predictors(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `base` with the same name, in which each router has a predictor."""

    class WithPredictors(base):
        def __init__(self, *args, **kwargs):
            check_platform()
            super().__init__(*args, **kwargs)
            self._routers = routers_of(self)
            if not self._routers:
                raise NotImplementedError(f"route prediction: found no router in {base.__name__}")
            self._export = FeatureExport.from_config(self.config)
            for layer, router in enumerate(self._routers.values()):
                router.predictor = Predictor(*router.weight.shape)
                router.register_forward_hook(functools.partial(self._predict, layer))

        def _predict(self, layer: int, router: nn.Module, args: tuple, output: Tensor | tuple) -> Tensor | tuple:
            """Return z + W_p h in fp32 (forward hook of a router). In bf16, rounding would remove a small prediction."""
            h = args[0]
            z, *rest = output if isinstance(output, tuple) else (output,)
            if self._export is not None:
                self._export.keep(layer, h, z)
            z = z.float() + router.predictor(h)
            return (z, *rest) if isinstance(output, tuple) else z

        @functools.wraps(base.forward)
        def forward(self, input_ids, positions, forward_batch, *args, **kwargs):
            if self._export is None:
                return super().forward(input_ids, positions, forward_batch, *args, **kwargs)
            self._export.begin(forward_batch)
            output = super().forward(input_ids, positions, forward_batch, *args, **kwargs)
            output.customized_info = self._export.finish()
            return output

        def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args, **kwargs):
            return super().load_weights(self._load_predictors(weights), *args, **kwargs)

        def _load_predictors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            """Load the predictors' weights and yield all others, because not all model loaders accept unknown weights."""
            for name, weight in weights:
                if not name.endswith(SUFFIX):
                    yield name, weight
                elif (router := self._routers.get(name.removesuffix(SUFFIX))) is not None:
                    held = router.predictor.weight
                    if weight.shape != held.shape:
                        raise ValueError(f"{name} is {list(weight.shape)}, but the router has {list(held.shape)}")
                    held.data.copy_(weight)
                else:
                    raise ValueError(f"{name}: the served model has no such router")

    WithPredictors.__name__ = WithPredictors.__qualname__ = base.__name__
    WithPredictors.__module__ = __name__
    return WithPredictors
