"""The mean walk of a round, made in the pass that writes the model, and stored beside it and in the state.

The state keeps it in float32. What its 8-bit form leaves out is thereby in the next round's, and nothing adds up.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.walk_plan import Members, WalkPlan, plan_walk, weights_in
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, Checkpoint, TensorEntry, open_checkpoint, read_exactly
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.mean_walk import (
    DTYPE,
    FOLDER,
    byte_values,
    has_mean_walk,
    metadata_of,
    open_mean_walk,
    round_to_bytes,
)
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.errors import CheckpointError
from facility.exchange.files import present


@dataclass(frozen=True, kw_only=True)
class LastMean:
    """The mean walk that was sent with the model of the round, and what it was rounded from."""

    exact: Checkpoint | None = None
    sent: Checkpoint | None = None
    members: Members = Members()


class MeanWalk:
    """Makes the next mean walk of the steps that the pass reads, piece by piece, from any thread."""

    def __init__(
        self, plan: WalkPlan, last: LastMean, *, state: TensorWriter, model: TensorWriter, files: ExitStack
    ) -> None:
        self.plan, self.last, self.state, self.model = plan, last, state, model
        self._files: dict[Path, int] = {}
        for checkpoint in (last.exact, last.sent):
            for entry in checkpoint.tensors.values() if checkpoint is not None else ():
                if entry.file not in self._files:
                    self._files[entry.file] = os.open(entry.file, os.O_RDONLY)
                    files.callback(os.close, self._files[entry.file])

    def take(self, name: str, begin: int, steps: Array) -> None:
        """Make and write the values of a tensor from `begin` on; `steps`: of each update, (updates, n)."""
        count = steps.shape[1]
        mean = np.zeros(count, np.float64)
        for factor, step in zip(self.plan.coefficients, steps, strict=True):
            if factor:
                mean += factor * step.astype(np.float64)
        if self.last.exact is not None and self.last.sent is not None:
            mean += self.plan.kept * self._read(self.last.exact.tensors[name], begin, count).view("<f4")
            mean -= self.plan.sent * byte_values()[self._read(self.last.sent.tensors[name], begin, count)]
        exact = mean.astype("<f4")
        self.state.write(name, begin * 4, exact.data.cast("B"))
        self.model.write(name, begin, round_to_bytes(exact).data.cast("B"))

    def _read(self, entry: TensorEntry, begin: int, count: int) -> Array:
        item = ITEM_BYTES[entry.dtype]
        raw = np.empty(count * item, np.uint8)
        read_exactly(self._files[entry.file], raw.data, entry.start + begin * item, entry.file)
        return raw


def last_mean(aggregation: Aggregation) -> LastMean:
    """The mean walk that the facilities of this round received; nothing where there was none, or it is of no use now.

    It is of no use where the state was lost, or other tensors are federated than before.
    """
    base, state = Path(aggregation.request.base), aggregation.request.state_in
    if state is None or not has_mean_walk(base) or not present.is_dir(Path(state) / FOLDER):
        return LastMean()
    exact = open_checkpoint(Path(state) / FOLDER)
    sent, rounds = open_mean_walk(base)
    weights = weights_in(exact.metadata)
    if weights.keys() != rounds.keys() or not all(math.isfinite(one) and one > 0 for one in weights.values()):
        raise CheckpointError(
            f"{exact.directory} is the mean walk of {', '.join(sorted(weights))}, expected that of the facilities in "
            f"{sent.directory}, each with a weight above 0: {', '.join(sorted(rounds))}"
        )
    for checkpoint in (exact, sent):
        if {name: entry.shape for name, entry in checkpoint.tensors.items()} != _shapes(aggregation):
            return LastMean()
    return LastMean(exact=exact, sent=sent, members=Members(rounds=rounds, weights=weights))


def _shapes(aggregation: Aggregation) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in aggregation.floats.items()}


def make_mean_walk(aggregation: Aggregation, model: Path, state: Path | None, stack: ExitStack) -> MeanWalk | None:
    """What makes the next mean walk below `model` and `state`; None where there is none to make.

    Adapters that begin in this round have no step, and a mean needs a state to be kept in.
    """
    begun = any(name not in aggregation.whole.tensors for name in aggregation.floats)
    if begun or state is None or aggregation.request.unmasking is not None:
        return None
    last = last_mean(aggregation)
    norms = _norms(aggregation)
    plan = plan_walk(
        aggregation.opened,
        aggregation.weights,
        last.members,
        number=aggregation.number,
        norms=norms,
        facilities=aggregation.request.facilities,
    )
    if plan is None:
        return None
    aggregation.walk = details_of(plan)
    if not plan.makes_mean:
        return None
    writers = []
    metadata = (plan.members.metadata(), metadata_of(plan.members.rounds))
    for directory, dtype, each in zip((state, model), ("F32", DTYPE), metadata, strict=True):
        (directory / FOLDER).mkdir()
        layout = layout_like(aggregation.source, dict.fromkeys(aggregation.floats, dtype))
        writers.append(stack.enter_context(TensorWriter(directory / FOLDER, layout, each)))
    return MeanWalk(plan, last, state=writers[0], model=writers[1], files=stack)


def _norms(aggregation: Aggregation) -> list[float] | None:
    """L2 norms of the updates' steps, measured or stated; None where nothing needs them before the pass that writes."""
    if aggregation.measured is not None:
        squares = aggregation.measured.gram.diagonal()
    elif aggregation.stated is not None:  # should another be measured, all is planned anew
        squares = aggregation.stated
    else:
        return None
    return [math.sqrt(max(0.0, float(square))) for square in squares]


def details_of(plan: WalkPlan) -> dict[str, Any]:
    """What round.json says."""
    return {"mean_walk": {"facilities": dict(sorted(plan.members.rounds.items())), "reason": plan.reason}}
