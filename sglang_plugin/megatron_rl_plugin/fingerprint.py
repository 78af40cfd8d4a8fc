"""Fingerprint: a checksum of a weight that can be computed from its parts. The trainer and SGLang both compute it.

SGLang's `/weights_checker` hashes SGLang's own parameters. In these, q, k and v are one tensor, and all experts of a layer are
one tensor. The fingerprint of a fused tensor is the sum of the fingerprints of its row blocks, each multiplied by a power of
`ROW_BASE`. The trainer can therefore compute the expected value from the Hugging Face tensors one by one, without building the
fused tensor.

The trainer imports this module too.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MODULUS = 1 << 64
ROW_BASE = 0x9E3779B97F4A7C15
"""Base of the row weights: row i has the weight ROW_BASE**i. ROW_BASE is 5 modulo 8, so its multiplicative order modulo 2**64
is the largest possible."""
PREFIX = "multilinear64"
"""First field of the result of `describe`. If a checksum has another first field, the server lacks this plugin."""
_GPU_CHUNK = 1 << 24
"""Number of words that one operation on a GPU multiplies at most."""


@lru_cache
def _powers(count: int, device: torch.device) -> Tensor:
    """Return [count] int64: ROW_BASE**i modulo 2**64, in two's complement. count must be a power of two."""
    powers = torch.tensor([1], dtype=torch.int64)
    while len(powers) < count:
        factor = pow(ROW_BASE, len(powers), MODULUS)
        powers = torch.cat([powers, powers * (factor - MODULUS if factor >= MODULUS // 2 else factor)])
    return powers.to(device)


@lru_cache
def _keys(count: int, device: torch.device) -> Tensor:
    """Return [count] int64: odd random factors, one per column."""
    generator = torch.Generator().manual_seed(0x5EED)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator, dtype=torch.int64)
    return keys.bitwise_or_(1).to(device)


def _ceil_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def as_matrix(tensor: Tensor) -> Tensor:
    """Reshape [..., C] to [R, C], and [N] to [N, 1]. SGLang concatenates fused tensors along these rows."""
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor.reshape(-1, tensor.shape[-1])


def _words(matrix: Tensor) -> Tensor:
    """Return the bits of [R, C] as [R, words] integers of at most 32 bits (two words per 64-bit element)."""
    size = matrix.element_size()
    if size >= 4 or (size == 2 and matrix.shape[1] % 2 == 0):
        return matrix.contiguous().view(torch.int32)
    return matrix.contiguous().view(torch.int16 if size == 2 else torch.int8)


def fingerprint(tensor: Tensor) -> int:
    """Return a tensor's fingerprint as a Python number in [0, 2**64). On a GPU, this waits for the device."""
    return to_integers([fingerprint_tensor(tensor)])[0]


def to_integers(fingerprints: list[Tensor]) -> list[int]:
    """Convert scalar int64 tensors on one device to numbers in [0, 2**64), with one wait for the device."""
    return [value % MODULUS for value in torch.stack(fingerprints).tolist()] if fingerprints else []


def fingerprint_tensor(tensor: Tensor) -> Tensor:
    """Return the fingerprint of a tensor as a scalar int64 tensor on the same device, in two's complement.

    The value is sum_i ROW_BASE**i * sum_j key_j * word_ij modulo 2**64, over the bits of `as_matrix(tensor)`.

    This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014) with 32-bit characters
    along a row, and a polynomial over the rows. A change of one word always changes the fingerprint. A change of several words
    stays undetected with a probability of about 2**-32 in the worst case (only sign bits change), and far less in general.
    Zeros add nothing, so the engine may pad tensors with zeros.
    """
    words = _words(as_matrix(tensor.detach()))
    rows, width = words.shape
    if not words.numel():
        return torch.zeros((), dtype=torch.int64, device=words.device)
    keys = _keys(_ceil_power_of_two(width), words.device)[:width]
    powers = _powers(_ceil_power_of_two(rows), words.device)[:rows]
    return (_row_sums(words, keys) * powers).sum()


def _row_sums(words: Tensor, keys: Tensor) -> Tensor:
    """Return words @ keys modulo 2**64: [R, W] integers of at most 32 bits, [W] int64 -> [R] int64."""
    if words.device.type == "cpu":
        # einsum widens and multiplies in one pass over the memory, several times as fast as torch's int64 kernels.
        return torch.from_numpy(np.einsum("ij,j->i", words.numpy(), keys.numpy()))
    # CUDA has no integer matrix product; chunks keep the 64-bit products small.
    step = max(1, _GPU_CHUNK // words.shape[1])
    return torch.cat([(chunk * keys).sum(1) for chunk in words.split(step)])


def below(value: int, rows: int) -> int:
    """Return what a row block with fingerprint `value` adds to the fingerprint of a tensor in which it starts at row `rows`."""
    return value * pow(ROW_BASE, rows, MODULUS) % MODULUS


def describe(tensor: Tensor) -> str:
    """Return the checksum 'multilinear64:<hex>:<dtype>:<shape>', for example 'multilinear64:00ab...:bfloat16:8,512,256'."""
    shape = ",".join(str(size) for size in tensor.shape)
    return f"{PREFIX}:{fingerprint(tensor):016x}:{str(tensor.dtype).removeprefix('torch.')}:{shape}"
