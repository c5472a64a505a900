"""Adapters of which a facility trains the leading components, or B, alone (`lora.trained_rank`, `lora.freeze_a`).

Facilities of different ranks share adapters of one shape, the largest rank. One of rank r trains the first r rows of A
and columns of B; the others keep their values in its forward passes and in its update. So nothing is truncated, and an
update is exactly B A as it was trained (unlike truncation and zero padding: Y. J. Cho et al., "Heterogeneous LoRA for
federated fine-tuning of on-device foundation models", EMNLP 2024, arXiv 2401.06432). Under `aggregation.lora: product`
the components go on from round to round as well, in place of being sorted by their singular values (J. Bai et al.,
"Federated fine-tuning of large language models under heterogeneous tasks and client resources", NeurIPS 2024, arXiv
2402.11505): what an optimizer keeps of a component stays its own.

Where A is frozen, all facilities have the same one, and the mean of their B times A is exactly the mean of what their
adapters stand for (FFA-LoRA: Y. Sun et al., "Improving LoRA in privacy-preserving federated learning", ICLR 2024, arXiv
2403.12313).
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
    """Holds what is not trained of the adapters: components beyond a rank, or A."""

    def __init__(self, parts: Sequence[LocalShard], lora: LoraSettings) -> None:
        self._beyond = [_held(part, lora) for part in parts]
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
    some = 0 < lora.trained_rank < lora.rank
    held = [factor for factor, is_held in ((A, some or lora.freeze_a), (B, some)) if is_held]
    return {name: shape for name, shape in shapes.items() if not any(factor in name for factor in held)}


def _held(part: LocalShard, lora: LoraSettings) -> tuple[slice, ...] | None:
    """Index of what is held among the rows that lie here, or None for nothing: A is (rank, in), B is (out, rank)."""
    if A in part.name:
        first = 0 if lora.freeze_a else lora.trained_rank or lora.rank
        return (slice(max(0, first - part.first), None),) if first < lora.rank else None
    if B in part.name and 0 < lora.trained_rank < lora.rank:
        return slice(None), slice(lora.trained_rank, None)
    return None
