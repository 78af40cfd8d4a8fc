"""SGLang external model package: MoE models with a route predictor inside each router.

A server finds this package through SGLANG_EXTERNAL_MODEL_PACKAGE=megatron_rl_models. For all other architectures, SGLang uses
its own classes. This package imports torch, numpy and SGLang, but not the trainer.
"""

from __future__ import annotations

# SGLang skips a module that fails to import and would then serve its own class of the same name, without a predictor. This
# import makes such a failure visible.
from megatron_rl_models import entry_classes  # noqa: F401
