"""Averaging low-rank adapters: of the factors, or of the products they stand for.

E. Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022, arXiv 2106.09685: W + s B A, with A of
shape (rank, in) and B (out, rank). The mean of the factors is not the mean of the products, since
mean(B) mean(A) != mean(B A) (Y. Sun et al., "Improving LoRA in privacy-preserving federated learning", ICLR 2024,
arXiv 2403.12313, section 3). The mean of K products has rank K * rank at most; its best approximation at the adapters'
rank is its truncated singular value decomposition (Eckart & Young 1936), which follows from two thin QR
decompositions of the stacked factors, without ever forming a whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from facility.exchange.checkpoints.adapters import A, B, is_factor
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names of (A, B) of each adapted layer; modules that are saved whole are not among them.

    Raises `InputError` for one without the other.
    """
    names = set(filter(is_factor, names))
    found = [(name, name.replace(A, B)) for name in sorted(names) if A in name]
    together = {name for pair in found for name in pair}
    if together != names:
        raise InputError(
            f"adapters must come in pairs lora_A and lora_B; without its other half: {sorted(together ^ names)[:3]}"
        )
    return found


def stacked(a: Sequence[Array], b: Sequence[Array], weights: Sequence[float]) -> tuple[Array, Array]:
    """(out, K rank) and (K rank, in) matrices in float64, whose product is the weighted mean of the products."""
    left = np.concatenate([np.asarray(x, np.float64) * w for x, w in zip(b, weights, strict=True)], axis=1)
    return left, np.concatenate([np.asarray(x, np.float64) for x in a], axis=0)


def mean_of_products(
    a: Sequence[Array], b: Sequence[Array], weights: Sequence[float], rank: int
) -> tuple[Array, Array]:
    """Factors (A, B) of the given rank, closest in Frobenius norm to the weighted mean of the products B_k A_k.

    The singular values are shared evenly between both; signs make each column of B have its largest entry positive.
    Where the mean is zero, as while nobody has moved a layer, A is its own mean: with both factors zero neither would
    ever have a gradient again.
    """
    left, right = stacked(a, b, weights)
    q1, r1 = np.linalg.qr(left)
    q2, r2 = np.linalg.qr(right.T)
    u, s, v = np.linalg.svd(r1 @ r2.T)
    least = np.finfo(np.float64).eps * np.linalg.norm(left) * np.linalg.norm(right)
    if s.max(initial=0.0) <= least:
        return np.tensordot(np.asarray(weights), np.stack(a).astype(np.float64), 1), np.zeros(b[0].shape)
    u, v = q1 @ u[:, : len(s)], v[: len(s)] @ q2.T
    if len(s) < rank:
        u = np.pad(u, ((0, 0), (0, rank - len(s))))
        v, s = np.pad(v, ((0, rank - len(s)), (0, 0))), np.pad(s, (0, rank - len(s)))
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    signs = np.where(np.take_along_axis(u, np.abs(u).argmax(axis=0)[None], axis=0)[0] < 0, -1.0, 1.0)
    none, root = s <= least, np.sqrt(s) * signs
    row = np.sqrt(np.mean([np.square(x, dtype=np.float64).sum(axis=1) for x in a]))
    return np.where(none, row, root)[:, None] * v, u * np.where(none, 0.0, root)[None, :]


def relative_error(
    mean_a: Array, mean_b: Array, a: Sequence[Array], b: Sequence[Array], weights: Sequence[float]
) -> float:
    """Frobenius norm of mean_b mean_a minus the exact mean of the products, over that of the exact mean."""
    left, right = stacked(a, b, weights)
    more_left = np.concatenate([left, -np.asarray(mean_b, np.float64)], axis=1)
    more_right = np.concatenate([right, np.asarray(mean_a, np.float64)], axis=0)

    def squared(p: Array, q: Array) -> float:
        return max(float(np.sum((p.T @ p) * (q @ q.T))), 0.0)

    exact = squared(left, right)
    return math.sqrt(squared(more_left, more_right) / exact) if exact else 0.0
