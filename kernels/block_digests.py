"""Digests of rows where they lie, by the rules of `kernels.cpu.row_digest`, equal on every device.

XXH3 takes a part in rounds of 16 stripes of 8 words. Within a round the words' products are summed in any order;
between rounds the 8 sums are mixed:

    stripe:  s[i] += word[i ^ 1] + low(x) * high(x)          x = word[i] ^ secret[stripe + i], halves of 32 bits
    round:   s[i]  = (s[i] ^ s[i] >>> 47 ^ secret[16 + i]) * PRIME32_1"""

import functools
import struct

import torch
from torch import Tensor

from kernels.cpu.row_digest import LEAST_BYTES, MIX, PART_BYTES, PLACE, WORD_BYTES
from kernels.gpu_dispatch import fused_kernels, on_device

LANES, STRIPES = 8, 16
ROUND_WORDS, PART_WORDS, LEAST_WORDS = LANES * STRIPES, PART_BYTES // WORD_BYTES, LEAST_BYTES // WORD_BYTES
PRIME32_1, PRIME64_1 = 0x9E3779B1, 0x9E3779B185EBCA87
_PRIME32_2, _PRIME32_3 = 0x85EBCA77, 0xC2B2AE3D
_PRIME64 = (PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_FIRST = (_PRIME32_3, *_PRIME64[:4], _PRIME32_2, _PRIME64[4], PRIME32_1)
LAST_MIX = 0x165667919E3779F9
_LAST_KEY, _MERGE_KEY = 121, 11  # bytes of the secret
_HALF = (1 << 32) - 1
_CHUNK_WORDS = 2 << 20  # of rows for which plain PyTorch allocates intermediate results

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def listed_digests(rows: Tensor, row_ids: Tensor) -> Tensor:
    """Compute the digests of some of the rows where they lie.

    rows      [num_rows, any multiple of 8] uint8, contiguous
    row_ids   [count] int64, on the same device -> int64 [count], there too"""
    kernels = fused_kernels("row_digests", rows.device, rows.dtype)
    if kernels is None:
        return row_digests(rows[row_ids])
    with on_device(rows.device):
        digests: Tensor = kernels.row_digests(rows.view(torch.int64), row_ids)
    return digests


def row_digests(rows: Tensor) -> Tensor:
    """Compute rows uint8 [count, any multiple of 8], contiguous -> their digests, int64 [count], on the same device."""
    words = rows.view(torch.int64)
    kernels = fused_kernels("row_digests", rows.device, rows.dtype)
    if kernels is not None:
        with on_device(rows.device):
            digests: Tensor = kernels.row_digests(words)
        return digests
    size = max(1, _CHUNK_WORDS // words.shape[1])
    parts = [words[first : first + size] for first in range(0, len(words), size)] or [words]
    return torch.cat([_plain_digests(part) for part in parts])


def signed(constant: int) -> int:
    constant &= (1 << 64) - 1
    return constant - (1 << 64) if constant >> 63 else constant


@functools.cache
def constants(device: torch.device) -> Tensor:
    """Return what the sums begin with, the keys of the last stripe and those of merging: int64 [3, 8]."""
    words = [
        [signed(constant) for constant in _FIRST],
        *(struct.unpack_from(f"<{LANES}q", SECRET, at) for at in (_LAST_KEY, _MERGE_KEY)),
    ]
    return torch.tensor(words, dtype=torch.int64, device=device)


@functools.cache
def secret_words(device: torch.device) -> Tensor:
    return torch.tensor(struct.unpack("<24q", SECRET), dtype=torch.int64, device=device)


def _plain_digests(words: Tensor) -> Tensor:
    count, width = words.shape
    num_whole, terms = width // PART_WORDS, []
    if num_whole:
        whole = words[:, : num_whole * PART_WORDS].reshape(count * num_whole, PART_WORDS)
        terms.append(_placed(_part_digests(whole).view(count, num_whole), 0))
    if width % PART_WORDS:
        last = words[:, num_whole * PART_WORDS :]
        last = torch.nn.functional.pad(last, (0, max(0, LEAST_WORDS - last.shape[1])))
        terms.append(_placed(_part_digests(last)[:, None], num_whole))
    return torch.cat(terms, dim=1).sum(dim=1)


def _placed(digests: Tensor, first: int) -> Tensor:
    numbers = torch.arange(first + 1, first + 1 + digests.shape[1], device=digests.device)
    return _mix(digests ^ _mix(numbers * signed(PLACE)))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 32)) * signed(MIX[0])
    x = (x ^ _shifted(x, 29)) * signed(MIX[1])
    return x ^ _shifted(x, 32)


def _part_digests(words: Tensor) -> Tensor:
    num_bytes = words.shape[1] * WORD_BYTES
    num_rounds, num_stripes = (num_bytes - 1) // (ROUND_WORDS * WORD_BYTES), (num_bytes - 1) // (LANES * WORD_BYTES)
    secret, (first, last_keys, merge_keys) = secret_words(words.device), constants(words.device)
    keys = torch.stack([secret[stripe : stripe + LANES] for stripe in range(STRIPES)])
    sums = first.expand(len(words), LANES)
    whole = words[:, : num_rounds * ROUND_WORDS].reshape(len(words), num_rounds, STRIPES, LANES)
    totals = _terms(whole, keys).sum(dim=2)
    for number in range(num_rounds):
        sums = sums + totals[:, number]
        sums = (sums ^ _shifted(sums, 47) ^ secret[STRIPES:]) * PRIME32_1
    num_rest = num_stripes - num_rounds * STRIPES
    rest = words[:, num_rounds * ROUND_WORDS : num_stripes * LANES].reshape(len(words), num_rest, LANES)
    sums = sums + _terms(rest, keys[:num_rest]).sum(dim=1) + _terms(words[:, -LANES:], last_keys)
    keyed = sums ^ merge_keys
    pairs = keyed.reshape(len(keyed), LANES // 2, 2)
    low, high = _wide_product(pairs[..., 0], pairs[..., 1])
    result = (low ^ high).sum(dim=-1) + signed(num_bytes * PRIME64_1)
    result = (result ^ _shifted(result, 37)) * LAST_MIX
    return result ^ _shifted(result, 32)


def _terms(words: Tensor, keys: Tensor) -> Tensor:
    mixed = words ^ keys
    neighbours = words.reshape(*words.shape[:-1], LANES // 2, 2).flip(-1).reshape(words.shape)
    return (mixed & _HALF) * _shifted(mixed, 32) + neighbours


def _wide_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a_low, a_high, b_low, b_high = a & _HALF, _shifted(a, 32), b & _HALF, _shifted(b, 32)
    low, first, second = a_low * b_low, a_low * b_high, a_high * b_low
    middle = _shifted(low, 32) + (first & _HALF) + (second & _HALF)
    high = a_high * b_high + _shifted(first, 32) + _shifted(second, 32) + _shifted(middle, 32)
    return (low & _HALF) | (middle << 32), high


def _shifted(words: Tensor, count: int) -> Tensor:
    return (words >> count) & ((1 << (64 - count)) - 1)
