"""How far the mean of adapters' factors is from the mean of their products, found as the updates are averaged.

Both factors of a layer are needed at once, of all updates: what the pass reads of them is kept until the layer is
whole. The factors of a layer lie beside each other on disk, so that few layers wait at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.aggregation import lora
from facility.exchange.checkpoints.adapters import PREFIX, A, adapts_parameter
from facility.exchange.checkpoints.checkpoint import TensorEntry
from facility.exchange.checkpoints.floats import Array, widen


class FactorErrors:
    """Relative errors of all layers of a round."""

    def __init__(
        self, entries: Sequence[Mapping[str, TensorEntry]], weights: Sequence[float], parameters: Sequence[str] = ()
    ) -> None:
        """`entries`: the tensors of each update. `parameters`: whose factors are those of many experts, whose product
        means nothing."""
        self._weights = weights
        self._shapes = [{name: entry.shape for name, entry in update.items()} for update in entries]
        pairs = [
            pair
            for pair in lora.pairs(entries[0])
            if not adapts_parameter(pair[0].removeprefix(PREFIX).partition(A)[0], parameters)
        ]
        self._pair_of = {name: pair for pair in pairs for name in pair}
        self._found: dict[tuple[str, str], tuple[float, float] | None] = dict.fromkeys(pairs)
        self._waiting: dict[str, list[Array]] = {}
        """Values of each update, in float64."""
        self._missing: dict[tuple[str, str], int] = {}
        """Elements that are still to come, of both factors."""
        self._lock = threading.Lock()

    def take(self, name: str, begin: int, values: Sequence[Array], dtypes: Sequence[str]) -> None:
        """The elements of a tensor from `begin` on, of each update as stored in its dtype; from any thread."""
        if (pair := self._pair_of.get(name)) is None:
            return
        count = len(values[0])
        with self._lock:
            for factor in pair:
                if factor not in self._waiting:
                    self._waiting[factor] = [np.empty(shapes[factor], np.float64) for shapes in self._shapes]
            self._missing.setdefault(pair, sum(self._waiting[factor][0].size for factor in pair))
            targets = self._waiting[name]
        for target, stored, dtype in zip(targets, values, dtypes, strict=True):
            widen(stored, dtype, target.reshape(-1)[begin : begin + count])
        with self._lock:
            self._missing[pair] -= count
            if self._missing[pair]:
                return
            first, second = (self._waiting.pop(factor) for factor in pair)
        best = lora.mean_of_products(first, second, self._weights, first[0].shape[0])
        self.add(*pair, first, second, best)

    def add(self, a: str, b: str, first: Sequence[Array], second: Sequence[Array], best: tuple[Array, Array]) -> None:
        """The factors of one layer of each update, and the factors of the best product of the same rank."""
        if (a, b) not in self._found:
            return
        mean_a, mean_b = (np.tensordot(np.asarray(self._weights), np.stack(values), 1) for values in (first, second))
        of_factors = lora.relative_error(mean_a, mean_b, first, second, self._weights)
        self._found[a, b] = of_factors, lora.relative_error(*best, first, second, self._weights)

    def describe(self) -> dict[str, Any]:
        """What round.json says; nothing where there is no pair of factors."""
        found = [one for one in self._found.values() if one is not None]
        if not found:
            return {}
        factors, products = zip(*found, strict=True)
        return {
            "error_of_factors": {"mean": float(np.mean(factors)), "largest": max(factors)},
            "error_of_product": {"mean": float(np.mean(products)), "largest": max(products)},
        }
