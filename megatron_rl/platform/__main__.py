"""`python -m megatron_rl.platform` prints every replaced part of Megatron with the reason."""

from __future__ import annotations

from megatron_rl.platform.megatron.coverage import megatron_root, table

if __name__ == "__main__":
    print(table(megatron_root()))
