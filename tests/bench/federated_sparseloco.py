"""SparseLoCo's uplink on tensors in memory: of every 4,096 values 64, in 2 bits each, with error feedback that fades.

"SparseLoCo", 2025, arXiv 2508.15706, algorithm 1, with the numbers of Covenant-72B (arXiv 2603.08163): with D a
facility's step of a round and e what it has not sent,

    e <- 0.95 e + D;   sent = Q(the 64 largest of each 4,096 of e);   e <- e - sent

and the server adds the mean of what was sent, without momentum. Training starts from the global model. Q keeps the sign
and one of two magnitudes, the means of the larger and the smaller half: 14 bits a value with its place, 1.4 % of
bfloat16. A facility may have a 64th of its step in the model of the next round, so it takes a hundred rounds to pay.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK, KEPT, FADING = 4096, 64, 0.95


def selected(values: Tensor, *, chunk: int = CHUNK, kept: int = KEPT) -> Tensor:
    """What travels of `values` (flat), as its receiver reads it."""
    padded = torch.zeros(-(-len(values) // chunk) * chunk)
    padded[: len(values)] = values
    rows = padded.view(-1, chunk)
    sizes, places = rows.abs().topk(min(kept, chunk), dim=1)  # largest first
    half = sizes.shape[1] // 2
    levels = torch.cat(
        [
            sizes[:, :half].mean(1, keepdim=True).expand(-1, half),
            sizes[:, half:].mean(1, keepdim=True).expand_as(sizes[:, half:]),
        ],
        dim=1,
    )
    out = torch.zeros_like(rows)
    out.scatter_(1, places, levels * torch.gather(rows, 1, places).sign())
    return out.view(-1)[: len(values)]


class SparseLoCo:
    """The uplink of every facility, as `federated_codecs.DeltaCodec`."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}

    def __call__(self, sender: int, reference: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        steps = [(new - old).reshape(-1) for old, new in zip(reference, values, strict=True)]
        if sender in self.kept:
            steps = [step + FADING * old for step, old in zip(steps, self.kept[sender], strict=True)]
        sent = [selected(step) for step in steps]
        self.kept[sender] = [step - part for step, part in zip(steps, sent, strict=True)]
        return [old + part.reshape(old.shape) for old, part in zip(reference, sent, strict=True)]

    def start(self, sender: int, received: list[Tensor]) -> list[Tensor]:
        """Training starts from the global model."""
        return received
