"""Weight stashing: a micro-batch's backward pass sees the weights that its forward pass saw.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3. A schedule
that never flushes has several micro-batches in flight between which weights change; stage s of S keeps at most S - s
versions. A version is copied only when weights have changed since the last one was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from facility.sync.runtime.flat import local_shard


class WeightStash:
    """Versions of a stage's parameters by micro-batch."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._originals = tuple(parameters)
        self._parameters = [local_shard(p.detach()) for p in parameters]
        self._version = 0
        self._versions: dict[int, list[torch.Tensor]] = {}
        self._of: dict[int, int] = {}

    def __len__(self) -> int:
        """Copies held."""
        return len(self._versions)

    def remember(self, micro_batch: int) -> None:
        """`micro_batch`'s forward pass runs on the weights as they are."""
        if self._version not in self._versions:
            self._versions[self._version] = [p.clone() for p in self._parameters]
        self._of[micro_batch] = self._version

    def changed(self) -> None:
        """The weights have been updated."""
        self._version += 1

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the optimizer's step: autograd, which holds forward passes on earlier versions, does not see it."""
        with torch.autograd._unsafe_preserve_version_counter(self._originals):
            yield
        self.changed()

    @contextmanager
    def as_seen_by(self, micro_batch: int) -> Iterator[None]:
        """Put the weights of `micro_batch`'s forward pass in place for its backward pass, then the latest again."""
        version = self._of.pop(micro_batch)
        stashed = self._versions[version]
        swap = version != self._version
        latest = [p.clone() for p in self._parameters] if swap else []
        try:
            if swap:
                for parameter, value in zip(self._parameters, stashed, strict=True):
                    parameter.data.copy_(value)
            yield
        finally:
            for parameter, value in zip(self._parameters, latest, strict=False):
                parameter.data.copy_(value)
            if version not in self._of.values():
                del self._versions[version]
