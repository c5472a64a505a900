"""Moments that facilities average value by value: sent with the update, taken over from the received model.

Second moments of matrices where `optimizer_state_form` is not `factors`; first moments where `first_moments` is `mean`.
They are made from the state directory that was just written, in which they lie whole, and every rank takes over the
rows that it holds: every layout sends and reads the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from facility.exchange.checkpoints.checkpoint import TensorEntry, open_checkpoint, read_tensor
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.moments import (
    BLOCKS,
    FIRST,
    Moment,
    Rows,
    StoredMoments,
    block_means,
    has_moments,
    matrix_shape,
    shapes_in,
    write_moments,
)
from facility.exchange.messages.optimizers import OPTIMIZERS
from facility.exchange.messages.settings import TrainingSettings
from facility.training.optimizers.protocol import Optimizer
from facility.training.shards import LocalShard
from facility.training.state.leaving import Leaving
from facility.training.state.second_moments import SECOND

DECAYS = {"exp_avg": "beta1", SECOND: "beta2"}
"""Which setting each kind of AdamW's state decays by; another kind's is its optimizer's own `momentum`."""


def decay(training: TrainingSettings, kind: str) -> float:
    """By which a kind of the optimizer's state decays in a step."""
    if kind in DECAYS:
        return float(getattr(training, DECAYS[kind]))
    return float(OPTIMIZERS.get(training.optimizer).values(training.optimizer_parameters)["momentum"])


def first_kinds(training: TrainingSettings) -> tuple[str, ...]:
    """The kinds of state that first moments are, where they are averaged; empty: they are not."""
    return OPTIMIZERS.get(training.optimizer).first_moments if training.first_moments == "mean" else ()


def write_outgoing(update: Path, leaving: Leaving, training: TrainingSettings) -> None:
    """Write `update`/moments."""
    by_value = training.optimizer_state == "shared" and training.optimizer_state_form != "factors"
    forms = dict.fromkeys(first_kinds(training), FIRST)
    forms |= {SECOND: training.optimizer_state_form} if by_value else {}
    found: dict[Moment, Rows] = {}
    for kind, name, entry in leaving.tensors():
        if (form := forms.get(kind)) is not None and (form == FIRST or len(entry.shape) > 1):
            moment = Moment(name=name, form=form, shape=tuple(entry.shape))
            found[moment] = _rows_of(entry, moment, 1.0 / (1.0 - decay(training, kind) ** leaving.steps))
    write_moments(update, found, steps=leaving.steps, kept=leaving.kept(training.beta2) if by_value else 0.0)


def _rows_of(entry: TensorEntry, moment: Moment, scale: float) -> Rows:
    """Rows of a stored float32 tensor, times `scale`, as the moment's form has them."""
    width = matrix_shape(moment.shape)[1]

    def read(first: int, count: int) -> Array:
        values = np.empty((count, width), np.float32)
        read_tensor(entry, values.data.cast("B"), first * width * 4)
        values *= np.float32(scale)
        return block_means(values) if moment.form == BLOCKS else values

    return read


@torch.no_grad()
def take_over(
    model: Path,
    optimizer: Optimizer,
    parts: Sequence[LocalShard],
    training: TrainingSettings,
    *,
    steps: int,
    brought: Collection[str] = (),
) -> int:
    """Put the moments that came with the model in the place of this facility's own; returns the step count.

    Only those that the settings ask for. A facility without state of its own (`steps` is 0) begins with the others'
    second moments and step count, as with row and column means; its first moments begin at zero where it has no second
    ones, which would be too small for them, and such a parameter counts its steps from zero.

    `brought`: parameters whose second moments came as factors. Beside second moments of this facility's own, others'
    first ones are no larger than those allow (`largest_first`): of what its text hardly holds, such as a rare token,
    its own are next to nothing, and AdamW divides by their root.
    """
    if not has_moments(model):
        return steps
    found = StoredMoments(model, shapes_in(open_checkpoint(model)) | {part.name: part.shape for part in parts})
    shared = training.optimizer_state == "shared" and any(not first for _, first in found.moments)
    own = steps or (max(1, round(found.steps)) if shared else 0)
    kinds = dict.fromkeys(first_kinds(training), True) | ({SECOND: False} if shared else {})
    if own == 0:
        return 0
    for part in parts:
        rows, state = optimizer.shards(part), optimizer.state[part.tensor]
        if "step" in state:
            second = found.moments.get((part.name, False)) if shared else None
            if second is None and not float(state["step"]):
                continue
            state["step"].fill_(float(own))
        for held in rows:
            kind = held.name.partition(".")[0]
            moment = found.moments.get((part.name, kinds[kind])) if kind in kinds else None
            if moment is not None and held.tensor.numel():
                count = len(held.tensor) if part.shape else 1
                values = found.whole(moment, part.first, count) * np.float32(1.0 - decay(training, kind) ** own)
                held.tensor.copy_(torch.from_numpy(values).reshape(held.tensor.shape))
        theirs = part.name in brought or (SECOND in kinds and (part.name, False) in found.moments)
        if "exp_avg" in kinds and SECOND in state and not theirs and math.isfinite(most := largest_first(training)):
            bound = state[SECOND].sqrt().mul_(most)
            state["exp_avg"].clamp_(-bound, bound)
    return own


def largest_first(training: TrainingSettings) -> float:
    """Times the root of a value's second moment that its first one is at most, whatever its gradients were: by the
    inequality of Cauchy and Schwarz over the two sums that they are. Infinite where second moments forget sooner."""
    share = training.beta1**2 / training.beta2 if training.beta2 else math.inf
    return (1 - training.beta1) / math.sqrt((1 - training.beta2) * (1 - share)) if share < 1 else math.inf
