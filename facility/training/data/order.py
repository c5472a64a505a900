"""Which sequences a step trains on: a fresh permutation each epoch, and a position counted since round 0."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from facility.exchange.seeds import derive_seed


def evenly_spread(total: int, count: int) -> np.ndarray:
    """`count` of the numbers below `total`, in rising order: of data that lie in the order of their sources or classes,
    some of each."""
    return np.arange(count, dtype=np.int64) * total // max(count, 1)


@dataclass(kw_only=True)
class SampleOrder:
    """Order in which a facility goes through its training sequences, the same for any number of ranks."""

    sequences: int
    """Sequences in the training split."""
    seed: int
    """The federation's seed."""
    facility: str
    _epoch: int = -1
    _permutation: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def take(self, position: int, count: int) -> np.ndarray:
        """Indices of the `count` sequences from `position` on; epochs follow each other without a gap."""
        indices = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, within = divmod(position + filled, self.sequences)
            if epoch != self._epoch:
                seed = derive_seed(self.seed, "order", self.facility, epoch)
                self._permutation = np.random.Generator(np.random.PCG64(seed)).permutation(self.sequences)
                self._epoch = epoch
            piece = self._permutation[within : within + count - filled]
            indices[filled : filled + len(piece)] = piece
            filled += len(piece)
        return indices
