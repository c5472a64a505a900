"""The uplink of `sparseloco` on tensors in memory: what is not sent fades and is added to the next step.

Training starts from the global model. A facility has a fiftieth of its step in the model of the next round, so it takes
hundreds of rounds to pay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from facility.exchange.checkpoints.codecs import PART, sparseloco


def selected(values: Tensor) -> Tensor:
    """What travels of `values` (flat), as its receiver reads it."""
    parts = [part.numpy() for part in values.split(PART)]
    return torch.cat([torch.from_numpy(sparseloco.decode(sparseloco.encode(part), len(part))) for part in parts])


class SparseLoCo:
    """The uplink of every facility, as `federated_codecs.DeltaCodec`."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}

    def __call__(self, sender: int, reference: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        fading = sparseloco.DECLARATION.fading
        steps = [(new - old).reshape(-1) for old, new in zip(reference, values, strict=True)]
        if sender in self.kept:
            steps = [step + fading * old for step, old in zip(steps, self.kept[sender], strict=True)]
        sent = [selected(step) for step in steps]
        self.kept[sender] = [step - part for step, part in zip(steps, sent, strict=True)]
        return [old + part.reshape(old.shape) for old, part in zip(reference, sent, strict=True)]

    def start(self, sender: int, received: list[Tensor]) -> list[Tensor]:
        """Training starts from the global model."""
        return received
