"""Which sequences a replica sees when replicas proceed at different speeds: explicit, since data are not alike.

- contiguous: replica r has the r-th of N shares, one after the other: most unlike (a corpus in order of source);
- strided: replica r has sequences r, r + N, r + 2N, ...: alike, and no sequence twice in an epoch;
- reshuffled: every replica goes through everything in an order of its own: alike, sequences meet several replicas
  (what the convergence proofs of gossip assume).

A share is shuffled again every epoch, and followed by the next epoch without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from facility.exchange.errors import ConfigurationError

Policy = Literal["contiguous", "strided", "reshuffled"]


@dataclass(frozen=True, kw_only=True)
class ReplicaOrder:
    """Order of one replica's sequences: a function of its own position only."""

    policy: Policy
    sequences: int
    """Sequences of the facility's training split."""
    replica: int
    replicas: int
    seed: int

    def __post_init__(self) -> None:
        if self.policy != "reshuffled" and self.sequences < self.replicas:
            raise ConfigurationError(
                f"samples {self.policy!r} needs at least one sequence for each of {self.replicas} replicas, found "
                f"{self.sequences}; prepare more data or choose 'reshuffled'"
            )

    def share(self) -> np.ndarray:
        """Indices of the sequences that this replica ever sees, in rising order."""
        every = np.arange(self.sequences)
        if self.policy == "strided":
            return every[self.replica :: self.replicas]
        if self.policy == "contiguous":
            begin = self.sequences * self.replica // self.replicas
            return every[begin : self.sequences * (self.replica + 1) // self.replicas]
        return every

    def take(self, position: int, count: int) -> np.ndarray:
        """The `count` indices from `position` (sequences this replica has seen before) on."""
        share = self.share()
        taken: list[np.ndarray] = []
        missing = count
        while missing:
            epoch, within = divmod(position, len(share))
            order = np.random.Generator(np.random.PCG64([self.seed, self.replica, epoch])).permutation(share)
            piece = order[within : within + missing]
            taken.append(piece)
            position, missing = position + len(piece), missing - len(piece)
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)
