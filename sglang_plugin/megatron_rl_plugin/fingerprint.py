"""A checksum of a weight that survives fusing and sharding: the trainer and SGLang both compute it.

SGLang's `/weights_checker` hashes its own parameters, where q, k and v are one tensor and so are a layer's experts. A
fingerprint of such a tensor is the sum of the fingerprints of its row blocks, each times a power of `ROW_BASE`, so the
trainer learns what it must find from the Hugging Face tensors one at a time, without building the fused tensor.

Used on both sides: the trainer imports it from here.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MODULUS = 1 << 64
ROW_BASE = 0x9E3779B97F4A7C15
"""Weight of row i is ROW_BASE**i. Odd, and 5 modulo 8: of the largest order modulo 2**64."""
PREFIX = "multilinear64"
"""First field of what `describe` returns; its absence says that a server lacks this plugin."""
_GPU_CHUNK = 1 << 24
"""Words that are multiplied at once on a GPU."""


@lru_cache
def _powers(count: int, device: torch.device) -> Tensor:
    """[count] int64: ROW_BASE**i modulo 2**64, in two's complement; count is a power of two."""
    powers = torch.tensor([1], dtype=torch.int64)
    while len(powers) < count:
        factor = pow(ROW_BASE, len(powers), MODULUS)
        powers = torch.cat([powers, powers * (factor - MODULUS if factor >= MODULUS // 2 else factor)])
    return powers.to(device)


@lru_cache
def _keys(count: int, device: torch.device) -> Tensor:
    """[count] int64: the odd random weights of the columns."""
    generator = torch.Generator().manual_seed(0x5EED)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator, dtype=torch.int64)
    return keys.bitwise_or_(1).to(device)


def _ceil_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def as_matrix(tensor: Tensor) -> Tensor:
    """[..., C] -> [R, C], rows being all dimensions but the last; [N] -> [N, 1]: both fuse by rows."""
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor.reshape(-1, tensor.shape[-1])


def _words(matrix: Tensor) -> Tensor:
    """Bits of [R, C] as [R, words] integers of at most 32 bits (64-bit elements as two)."""
    size = matrix.element_size()
    if size >= 4 or (size == 2 and matrix.shape[1] % 2 == 0):
        return matrix.contiguous().view(torch.int32)
    return matrix.contiguous().view(torch.int16 if size == 2 else torch.int8)


def fingerprint(tensor: Tensor) -> int:
    """The fingerprint as a number in [0, 2**64): `fingerprint_tensor`, fetched."""
    return to_integers([fingerprint_tensor(tensor)])[0]


def to_integers(fingerprints: list[Tensor]) -> list[int]:
    """Numbers in [0, 2**64) of 0-dim int64 tensors of one device, which is waited for once."""
    return [value % MODULUS for value in torch.stack(fingerprints).tolist()] if fingerprints else []


def fingerprint_tensor(tensor: Tensor) -> Tensor:
    """Fingerprint of a tensor: [] int64 on its device, in two's complement.

    It is sum_i ROW_BASE**i * sum_j key_j * word_ij modulo 2**64, over the bits of `as_matrix(tensor)`.

    Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014) with 32-bit characters
    along a row; a polynomial over the rows. A change of one word always changes it; several go unseen with odds of
    about 2**-32 at worst (all of them sign bits), far less in general. Zeros add nothing, so an engine may pad.
    """
    words = _words(as_matrix(tensor.detach()))
    rows, width = words.shape
    if not words.numel():
        return torch.zeros((), dtype=torch.int64, device=words.device)
    keys = _keys(_ceil_power_of_two(width), words.device)[:width]
    powers = _powers(_ceil_power_of_two(rows), words.device)[:rows]
    return (_row_sums(words, keys) * powers).sum()


def _row_sums(words: Tensor, keys: Tensor) -> Tensor:
    """[R, W] integers of at most 32 bits, [W] int64 -> [R] int64: words @ keys modulo 2**64."""
    if words.device.type == "cpu":
        # Widens and multiplies in one pass over the memory, several times as fast as torch's int64 kernels.
        return torch.from_numpy(np.einsum("ij,j->i", words.numpy(), keys.numpy()))
    # CUDA has no integer matrix product; chunks keep the 64-bit products small.
    step = max(1, _GPU_CHUNK // words.shape[1])
    return torch.cat([(chunk * keys).sum(1) for chunk in words.split(step)])


def below(value: int, rows: int) -> int:
    """Fingerprint of a block with `value` that starts `rows` rows below the top of a tensor of that width."""
    return value * pow(ROW_BASE, rows, MODULUS) % MODULUS


def describe(tensor: Tensor) -> str:
    """'multilinear64:<hex>:<dtype>:<shape>', e.g. 'multilinear64:00ab...:bfloat16:8,512,256'."""
    shape = ",".join(str(size) for size in tensor.shape)
    return f"{PREFIX}:{fingerprint(tensor):016x}:{str(tensor.dtype).removeprefix('torch.')}:{shape}"
