"""The kernel's work on each piece of each update: steps from the base, their inner products, their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.aggregation.rules import mean
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.floats import Array, widen

BLOCK = 8192
"""Values of one dot product."""


class Steps:
    """One thread's memory for pieces of at most `piece` values of one base and `updates` updates."""

    def __init__(self, updates: int, piece: int, dtype: str) -> None:
        self.base, self.total = np.empty(piece, dtype), np.empty(piece, dtype)
        self._rows: Array | None = None
        self._shape, self._dtype = (updates, piece), dtype
        self._scratch = np.empty(max(piece, updates * native.RUN + native.SPARE), dtype)
        self._native = native.library() if dtype == "float32" else None

    def take(
        self,
        sources: Sequence[Array],
        dtypes: Sequence[str],
        *,
        gram: Array | None,
        coefficients: Sequence[float] | None,
        rows: bool,
        add: bool = False,
        places: Sequence[int] | None = None,
        scales: Sequence[int] | None = None,
    ) -> tuple[Array, Array | None, Array]:
        """(base, steps or None, weighted sum) of one piece; `sources`: the base and the updates as stored in `dtypes`.

        `gram`: the steps' inner products are added to it, or to blocks of it (`add_products`). `coefficients`: of the
        sum, else undefined. `rows`: whether the steps themselves are wanted. `add`: the sum is added to the base in its
        place. `places`: the addresses of the sources, where they are known; `scales`: and of the scales of those that
        are stored in blocks, which only the compiled code reads.
        """
        n = len(sources[0])
        base, total = self.base[:n], self.total[:n]
        if self._native is not None and all(dtype in native.NUMBERS for dtype in dtypes):
            steps = self._block(n) if rows else None
            weights = None if coefficients is None else np.array(coefficients, np.float32)
            kinds = [native.NUMBERS[dtype] for dtype in dtypes]
            places = [native.address(source) for source in sources] if places is None else places
            native.steps(self._native, places, kinds, base, steps, gram, weights, total, add, self._scratch, scales)
            return base, steps, total
        steps = self._block(n)
        widen(sources[0], dtypes[0], base)
        for row, stored, dtype in zip(steps, sources[1:], dtypes[1:], strict=True):
            widen(stored, dtype, row)
            np.subtract(row, base, out=row)
        if gram is not None:
            add_products(gram, steps)
        if coefficients is not None:
            mean.combine(steps, coefficients, total, self._scratch[:n])
        if add:
            np.add(base, total, out=base)
        return base, steps, total

    def _block(self, n: int) -> Array:
        if self._rows is None:
            self._rows = np.empty(self._shape, self._dtype)
        return self._rows[:, :n]


def add_products(gram: Array, steps: Array) -> None:
    """Add the inner products of the rows, each row contiguous: the same bits whatever the number of threads.

    `gram`: (rows, rows), or (blocks, rows, rows), one for every `native.RUN` values: then what would be added one after
    the other to one is in blocks, to be added later in their order.

    numpy: dot products of at most BLOCK values, which BLAS never shares among threads.
    """
    count, n = steps.shape
    found = native.library()
    if found is not None and steps.dtype == np.float32 and steps.strides[1] == 4:
        apart = 0 if gram.ndim == 2 else count * count
        found.crossfed_products(n, count, native.address(steps), steps.strides[0] // 4, native.address(gram), apart)
        return
    whole = n // BLOCK * BLOCK
    parts = [steps[:, :whole].reshape(count, -1, BLOCK)] if whole else []
    if whole < n:
        parts.append(steps[:, None, whole:])
    for number, part in enumerate(parts):
        into = gram if gram.ndim == 2 else gram[number]
        for i in range(count):
            products = np.matmul(part[: i + 1, :, None, :], part[i][None, :, :, None])
            sums = products.reshape(i + 1, -1).sum(axis=1, dtype=np.float64)
            into[i, : i + 1] += sums
            into[:i, i] += sums[:i]
