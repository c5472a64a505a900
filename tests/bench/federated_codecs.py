"""The delta codecs of `facility.exchange.codecs` between tensors in memory, with error feedback at the sender."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from facility.exchange.codecs import PART, int4, int8, sparse


class DeltaCodec:
    """What a receiver reconstructs of `values` when only the coded difference to `reference` travels."""

    def __init__(self, encoding: str, *, density: float = 0.05, model: bool = False) -> None:
        self.encoding, self.density, self.model = encoding, density, model
        self.residuals: dict[int, list[numpy.ndarray]] = {}

    def __call__(self, sender: int, reference: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        if sender not in self.residuals:
            self.residuals[sender] = [numpy.zeros(v.numel(), numpy.float32) for v in values]
        received = []
        for position, (old, new) in enumerate(zip(reference, values, strict=True)):
            difference = (new - old).reshape(-1).numpy() + self.residuals[sender][position]
            decoded = self._travel(difference)
            result = old + torch.from_numpy(decoded).reshape(old.shape)
            if self.model:  # decoded to the dtype that is trained from; the next difference to it holds what was lost
                result = result.to(torch.bfloat16).float()
            else:
                self.residuals[sender][position] = difference - decoded
            received.append(result)
        return received

    def _travel(self, values: numpy.ndarray) -> numpy.ndarray:
        encode, decode = self._functions(values)
        parts = [values[start : start + PART] for start in range(0, len(values), PART)]
        return numpy.concatenate([decode(encode(part), len(part)) for part in parts]).astype(numpy.float32)

    def _functions(self, values: numpy.ndarray) -> tuple[Callable, Callable]:
        if self.encoding == "sparse":
            limit = sparse.threshold(sparse.histogram(numpy.ascontiguousarray(values)), self.density)
            return (lambda part: sparse.encode(part, limit)), sparse.decode
        codec = {"delta-int8": int8, "delta-int4": int4}[self.encoding]
        return codec.encode, codec.decode
