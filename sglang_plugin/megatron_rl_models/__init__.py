"""SGLang external model package: MoE models with a route predictor inside each router.

A server finds it through SGLANG_EXTERNAL_MODEL_PACKAGE=megatron_rl_models;
architectures that it does not have are SGLang's own as before. It imports torch, numpy and SGLang, and nothing of the
trainer.
"""

from __future__ import annotations

# SGLang skips a module that fails to import and would serve its own class of that name, without a predictor.
from megatron_rl_models import entry_classes  # noqa: F401
