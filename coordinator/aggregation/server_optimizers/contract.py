"""What a server optimizer is: one file, of this package or of any other, with a declaration and a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from facility.exchange.registry import Declaration

A = Any
"""A numpy array or a torch tensor."""
Step = Callable[[A, A, Sequence[A]], tuple[A, list[A]]]
"""(master, step, slots) -> (next master, next slots).

Pieces of one tensor, of equal shape; a step is called for every piece, from several threads. It changes none of its
arguments: in an aggregation they are read-only arrays, and one that works in place (`master += step`) ends it with an
error. It returns new arrays, or an argument as it is.
"""


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Declaration):
    """One way to move the float32 master by the aggregated step.

    `implementation` names a function (number of the round, *, parameters) -> (Step, first value of each slot).
    """

    slots: tuple[str, ...] = ()
    """Names of the tensors that it keeps between rounds, each of the model's size."""
    own: tuple[str, ...] = ()
    """Those of them that mean something else under the same name of another optimizer: after a change from one to the
    other they begin anew."""

    def goes_on_from(self, before: ServerOptimizer | None) -> list[str]:
        """Slots that it takes over from what `before` kept; None: an optimizer that is not known."""
        if before is None or before.name == self.name:
            return list(self.slots)
        return [name for name in self.slots if name not in (*self.own, *before.own)]
