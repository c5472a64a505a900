"""The uplink of `sparseloco` on tensors in memory: what is not sent fades and is added to the next step.

Training starts from the global model and a share of what was not sent. A facility has a fiftieth of its step in the
model of the next round, so it takes a hundred rounds and more to pay.
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

    def __init__(self, unsent_share: float) -> None:
        """`unsent_share`: of what was not sent, what training begins with."""
        self.share = unsent_share
        self.kept: dict[int, list[Tensor]] = {}

    def __call__(self, sender: int, reference: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        rest = sparseloco.DECLARATION.fading - self.share
        steps = [(new - old).reshape(-1) for old, new in zip(reference, values, strict=True)]
        if sender in self.kept:
            steps = [step + rest * old for step, old in zip(steps, self.kept[sender], strict=True)]
        sent = [selected(step) for step in steps]
        self.kept[sender] = [step - part for step, part in zip(steps, sent, strict=True)]
        return [old + part.reshape(old.shape) for old, part in zip(reference, sent, strict=True)]

    def start(self, sender: int, received: list[Tensor]) -> list[Tensor]:
        """Where a facility's training begins."""
        rest = self.kept.get(sender)
        if rest is None:
            return received
        return [value + self.share * kept.reshape(value.shape) for value, kept in zip(received, rest, strict=True)]
