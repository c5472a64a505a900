"""What of an optimizer's state may leave its facility with an update, where moments are shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import TensorEntry, open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.second_moments import kept_share


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """The moments that go with the update of a round, in which a step was taken or before it."""

    state: Path
    """Directory that the optimizer's state of the round was written to."""
    sent: Mapping[str, tuple[int, ...]]
    """Shapes of the update's tensors."""
    federated: Patterns
    steps: int
    """That the moments have seen."""
    before: int
    """Those of them before this round."""

    def tensors(self) -> Iterator[tuple[str, str, TensorEntry]]:
        """(kind of moment, parameter, tensor in the state directory), in the order of their names.

        Only parameters that are federated leave, as with the weights, and only those that the update holds by the same
        name and shape: experts that are fused here and apart on disk keep moments of their own.
        """
        for key, entry in sorted(open_checkpoint(self.state).tensors.items()):
            kind, _, name = key.partition(".")
            if self.federated.federated(name) and self.sent.get(name) == entry.shape:
                yield kind, name, entry

    def kept(self, beta2: float) -> float:
        """The share of the second moments that the round began with that is left in them."""
        return kept_share(beta2, before=self.before, steps=self.steps)
