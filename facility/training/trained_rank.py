"""Adapters of which a facility trains the leading components alone (`training.lora.trained_rank`).

Facilities of different ranks share adapters of one shape, the largest rank. One of rank r trains the first r rows of A
and columns of B; the others keep their values in its forward passes and in its update. So nothing is truncated, and an
update is exactly B A as it was trained (unlike truncation and zero padding: Y. J. Cho et al., "Heterogeneous LoRA for
federated fine-tuning of on-device foundation models", EMNLP 2024, arXiv 2401.06432). Under `aggregation.lora: product`
the components go on from round to round as well, in place of being sorted by their singular values (J. Bai et al.,
"Federated fine-tuning of large language models under heterogeneous tasks and client resources", NeurIPS 2024, arXiv
2402.11505): what an optimizer keeps of a component stays its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from facility.exchange.checkpoints.adapters import A, B
from facility.exchange.messages.layout import LoraSettings
from facility.training.shards import LocalShard


class TrainedRank:
    """Holds the components beyond a rank."""

    def __init__(self, parts: Sequence[LocalShard], rank: int) -> None:
        """`rank` 0: everything is trained."""
        self._beyond = [_beyond(part, rank) if rank and (A in part.name or B in part.name) else None for part in parts]
        self.held = [(part, beyond) for part, beyond in zip(parts, self._beyond, strict=True) if beyond is not None]

    @torch.no_grad()
    def drop_gradients(self) -> None:
        """No gradient of what is held: neither the norm nor the optimizer sees it."""
        for part, beyond in self.held:
            if (gradient := part.gradient) is not None:
                gradient[beyond] = 0.0

    @torch.no_grad()
    def without_held(self, of_records: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of single records, a tensor for each part with a leading dimension of records, with zeros in what
        is held, which may be written into those given: what is not trained takes nothing of a record's clip."""
        found = []
        for gradient, beyond in zip(of_records, self._beyond, strict=True):
            if beyond is not None:
                gradient = gradient.contiguous()  # of a layer that is not used, one zero stands for all
                gradient[(slice(None), *beyond)] = 0.0
            found.append(gradient)
        return found

    @contextmanager
    def unchanged(self) -> Any:
        """What is held has the same values after the block (weight decay would move it)."""
        before = [part.tensor.detach()[beyond].clone() for part, beyond in self.held]
        yield
        with torch.no_grad():
            for (part, beyond), values in zip(self.held, before, strict=True):
                part.tensor.detach()[beyond] = values


def trained_whole(shapes: Mapping[str, tuple[int, ...]], lora: LoraSettings) -> dict[str, tuple[int, ...]]:
    """The tensors of which every component is trained. The moments of the others are 0 where nothing is
    trained: in the mean over facilities they would make the steps of those that train it too long."""
    if not 0 < lora.trained_rank < lora.rank:
        return dict(shapes)
    return {name: shape for name, shape in shapes.items() if A not in name and B not in name}


def _beyond(part: LocalShard, rank: int) -> tuple[slice, ...]:
    """Index of what is held among the rows that lie here: A is (rank, in), B is (out, rank)."""
    if A in part.name:
        return (slice(max(0, rank - part.first), None),)
    return slice(None), slice(rank, None)
