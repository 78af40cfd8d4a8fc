"""Whether what was written is what is read back: a checksum of each tensor's bits, dtype and shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.sync.pythonpath.megatron_rl_plugin.fingerprint import describe


class Checksums:
    """Checksums of tensors by name, taken where they are written, and compared where they are read."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def watch(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on, and take the checksum of each."""
        for name, tensor in named_tensors:
            self.of[name] = describe(tensor)
            yield name, tensor

    def take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take the checksums of all."""
        for _ in self.watch(named_tensors):
            pass

    def compare(self, named_tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
        """Read tensors to the end. Errors: UserError naming the first that is missing, or another than was written."""
        found = Checksums()
        found.take(named_tensors)
        if wrong := sorted({name for name, _ in self.of.items() ^ found.of.items()}):
            raise UserError(
                f"{where}: tensor {wrong[0]} was not read back as it was written ({len(wrong)} of {len(self.of)} tensors);"
                " check the disk, and convert again"
            )

    @classmethod
    def of_ranks(cls, ranks: Sequence[Checksums]) -> Checksums:
        """Those of all ranks, by names that tell of the rank where there are several."""
        whole = cls()
        for rank, checksums in enumerate(ranks):
            whole.of |= {name if len(ranks) == 1 else f"{rank}.{name}": value for name, value in checksums.of.items()}
        return whole

    def __str__(self) -> str:
        """One digest of all: 16 hexadecimal digits."""
        return hashlib.sha256(repr(sorted(self.of.items())).encode()).hexdigest()[:16]
