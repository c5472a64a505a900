"""The delta codecs of `facility.exchange.checkpoints.codecs` on tensors in memory, with the sender's residual."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from coordinator.steps.send import FORGOTTEN
from facility.exchange.checkpoints.codecs import PART, int4, int8, sparse
from facility.exchange.checkpoints.magnitudes import BINS, histogram, threshold_for
from facility.exchange.messages.settings import SPARSE_DENSITY


class DeltaCodec:
    """What a receiver reconstructs of `values` when only the coded difference to `reference` travels.

    `model`: the coordinator's direction, where what was lost is part of the next difference of itself.
    """

    def __init__(self, encoding: str, *, density: float = SPARSE_DENSITY, model: bool = False) -> None:
        self.encoding, self.density, self.model = encoding, density, model
        self.residuals: dict[int, list[Tensor]] = {}

    def __call__(self, sender: int, reference: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        differences = [(new - old).reshape(-1).numpy() for old, new in zip(reference, values, strict=True)]
        travel = self._travel(differences)
        decoded = [
            torch.from_numpy(travel(d)).reshape(old.shape) for d, old in zip(differences, reference, strict=True)
        ]
        received = [old + step for old, step in zip(reference, decoded, strict=True)]
        if self.model:  # decoded to the dtype that is trained from
            return [value.to(torch.bfloat16).float() for value in received]
        self.residuals[sender] = [new - got for new, got in zip(values, received, strict=True)]
        return received

    def start(self, sender: int, received: list[Tensor]) -> list[Tensor]:
        """Where a facility's training begins: the received model and what of its steps was not sent."""
        rest = self.residuals.get(sender)
        return received if rest is None else [value + kept for value, kept in zip(received, rest, strict=True)]

    def master(self, master: Tensor, sent: Tensor) -> Tensor:
        """What the coordinator goes on from."""
        return master + FORGOTTEN * (sent - master) if self.encoding == "sparse" else master

    def _travel(self, differences: list[numpy.ndarray]) -> Callable[[numpy.ndarray], numpy.ndarray]:
        codec = {"delta-int8": int8, "delta-int4": int4, "sparse": sparse}[self.encoding]
        more: tuple[float, ...] = ()
        if codec is sparse:
            counts = sum((histogram(d) for d in differences), numpy.zeros(BINS))
            more = (threshold_for(counts, self.density),)

        def travel(values: numpy.ndarray) -> numpy.ndarray:
            parts = [values[start : start + PART] for start in range(0, len(values), PART)]
            return numpy.concatenate([codec.decode(codec.encode(part, *more), len(part)) for part in parts])

        return travel
