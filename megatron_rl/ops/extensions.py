"""The compiled extensions of csrc/, or one line that says how to get them."""

from megatron_rl.errors import UserError

try:
    from megatron_rl.ops import _masked_log_softmax as masked_log_softmax
    from megatron_rl.ops import _sink_attention as sink_attention
except ImportError as error:
    raise UserError(
        f"megatron_rl's kernels are not built for this Python and torch ({error}): tools/setup.sh --force builds them"
    ) from None

__all__ = ["masked_log_softmax", "sink_attention"]
