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

MOST_GROWN = 10.0
"""Norm of B over the largest of the updates' own, at most: it grows where A lacks a direction of the product."""
LEAST_KEPT = 0.1
"""Smallest singular value that the mean of A keeps in the directions of the mean product's rows, as a share of its own:
below it B would have to be that much larger."""


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

    Of all factors with that product those that go on from the updates' own (`continued`), where these have any such.
    Where the mean is zero, as while nobody has moved a layer, A is its own mean: with both factors zero neither would
    ever have a gradient again.
    """
    left, right = stacked(a, b, weights)
    q1, r1 = np.linalg.qr(left)
    q2, r2 = np.linalg.qr(right.T)
    u, s, v = np.linalg.svd(r1 @ r2.T)
    least = np.finfo(np.float64).eps * np.linalg.norm(left) * np.linalg.norm(right)
    count = min(rank, int((s > least).sum()))
    mean = np.tensordot(np.asarray(weights), np.stack(a).astype(np.float64), 1)
    if not count:
        return mean, np.zeros(b[0].shape)
    u, s, v = q1 @ u[:, :count], s[:count], v[:count] @ q2.T
    if len(mean) == rank and (found := continued(mean, u * s, v)) is not None:
        if np.linalg.norm(found[1]) <= MOST_GROWN * max(map(np.linalg.norm, b)):
            return found
    row = np.sqrt(np.mean([np.square(x, dtype=np.float64).sum(axis=1) for x in a]))
    return balanced(u, s, v, rank, row)


def continued(mean: Array, left: Array, rows: Array) -> tuple[Array, Array] | None:
    """The factors of `left` times `rows`, of which A is nearest to the `mean` of the updates' own: what they have in
    the directions of the product's rows, and where those are fewer than A has, what is largest of their others.

    So one update is itself, factor by factor, and a component goes on being what facilities trained: an optimizer's
    moments, which they keep between rounds, are of that component, as are those that a facility does not train
    (`trained_rank`). None where some component of A is all but gone. `rows`: orthonormal, `left`: of as many columns.
    """
    rank = len(mean)
    if rank > mean.shape[1]:
        return None
    if len(rows) < rank:
        others = mean - (mean @ rows.T) @ rows
        rows = np.concatenate([rows, np.linalg.svd(others, full_matrices=False)[2][: rank - len(rows)]])
    own = mean @ rows.T
    if np.linalg.norm(own, -2) <= LEAST_KEPT * np.linalg.norm(mean, -2):
        return None
    padded = np.pad(left, ((0, 0), (0, rank - left.shape[1])))
    return own @ rows, np.linalg.solve(own.T, padded.T).T


def balanced(u: Array, s: Array, v: Array, rank: int, row: float) -> tuple[Array, Array]:
    """The factors of u, the diagonal of s, and v that share the singular values evenly; signs make each column of B
    have its largest entry positive. Rows of A beyond them are of the length `row`, beside columns of zeros in B."""
    signs = np.where(np.take_along_axis(u, np.abs(u).argmax(axis=0)[None], axis=0)[0] < 0, -1.0, 1.0)
    root = np.sqrt(s) * signs
    more = rank - s.size
    others = np.linalg.svd(v)[2][s.size : rank] * row
    return (
        np.pad(np.concatenate([root[:, None] * v, others]), ((0, more - len(others)), (0, 0))),
        np.pad(u * root[None, :], ((0, 0), (0, more))),
    )


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
