"""Pseudorandom permutations of range(n), for any n, in O(1) memory."""

import hashlib

import numpy as np
import numpy.typing as npt

FEISTEL_ROUNDS = 6
IndexArray = npt.NDArray[np.int64]


def permute(positions: IndexArray, size: int, seed: int, epoch: int) -> IndexArray:
    """Map positions by a pseudorandom permutation of range(size), in O(1) memory.

    Any permutation of range(size) would work, so the details can be skipped on a first reading. A
    Feistel network permutes the range of the smallest power of four that is at least `size`.
    Results outside range(size) are permuted again until they fall inside, which keeps the map
    one-to-one ("cycle walking": Black & Rogaway 2002, Ciphers with Arbitrary Finite Domains,
    section 4). Seed and epoch select the permutation.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    result = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half_bits, keys)
    return result.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        # Multiplying by odd constants mixes the bits; the products wrap around on purpose.
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right
