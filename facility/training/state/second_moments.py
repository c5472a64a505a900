"""Second moments that facilities share (`optimizer_state: shared`): sent with the update, received with the model.

The first moments stay the facility's own. Factors are made from the tensors that one rank holds whole, else from the
state directory that was just written, in which they lie whole: every layout sends the same bytes. Every rank rebuilds
the rows it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import (
    factors_of,
    factors_of_values,
    has_factors,
    read_factors,
    write_factors,
)
from facility.exchange.messages.settings import TrainingSettings
from facility.training.optimizers.protocol import Optimizer
from facility.training.shards import LocalShard
from facility.training.state.leaving import Leaving

SECOND = "exp_avg_sq"
STORED = f"{SECOND}."


def held_whole(parts: Sequence[LocalShard]) -> dict[str, torch.Tensor]:
    """Second moments that this rank holds whole, by the name that they are stored under."""
    return {
        part.name: part.tensor.reshape(-1)
        for part in parts
        if part.name.startswith(STORED) and not part.copy and tuple(part.tensor.shape) == part.shape
    }


def write_outgoing(
    update: Path, leaving: Leaving, training: TrainingSettings, held: Mapping[str, torch.Tensor]
) -> None:
    """Write `update`/second_moments: of matrices row and column means, where the settings have them travel so, else
    vectors' alone (`facility.training.state.moments` has the rest).

    `held`: what was written to the state and is still in memory, so that it is not read again.
    """
    matrices = training.optimizer_state_form == "factors"
    scale = 1.0 / (1.0 - training.beta2**leaving.steps)
    factors = {
        name: factors_of_values(entry.shape, _reader(held[key]), scale)
        if (key := STORED + name) in held
        else factors_of(entry, scale)
        for kind, name, entry in leaving.tensors()
        if f"{kind}." == STORED and (matrices or len(entry.shape) < 2)
    }
    if factors:
        write_factors(update, factors, steps=leaving.steps, kept=leaving.kept(training.beta2))


def _reader(flat: torch.Tensor) -> Callable[[int, int], np.ndarray]:
    def read(start: int, count: int) -> np.ndarray:
        values: np.ndarray = flat[start : start + count].detach().float().cpu().numpy()
        return values

    return read


@torch.no_grad()
def take_over(
    model: Path,
    optimizer: Optimizer,
    parts: Sequence[LocalShard],
    *,
    beta2: float,
    steps: int,
) -> tuple[int, frozenset[str]]:
    """Replace second moments by those received with the model, of the parameters that have one; returns the step count
    and the parameters that the model brings one for.

    A facility without state of its own (`steps` is 0) begins with the others' step count, since a zero step count would
    make AdamW divide the shared moments by 1 - beta2. Parameters that the model brings none for keep their own, or
    begin anew where there are none either, and Muon's matrices have none.
    """
    if not has_factors(model):
        return steps, frozenset()
    factors, seen = read_factors(model, {part.name: part.shape for part in parts} | _unknown_shapes(model, parts))
    own = steps or max(1, round(seen))
    for part in parts:
        if SECOND not in optimizer.kept(part.name, part.shape):
            continue
        optimizer.shards(part)
        state, one = optimizer.state[part.tensor], factors.get(part.name)
        if one is not None or steps:
            state["step"] = torch.tensor(float(own), device=part.tensor.device)
        if one is not None and part.tensor.numel():
            values = one.rebuilt(part.first, len(part.tensor) if part.shape else 1) * np.float32(1.0 - beta2**own)
            state[SECOND].copy_(torch.from_numpy(values).reshape(part.tensor.shape))
    return own, frozenset(factors)


def _unknown_shapes(model: Path, parts: Sequence[LocalShard]) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's parameters that this rank does not hold: other stages' tensors, which it passes over."""
    held = {part.name for part in parts}
    return {name: entry.shape for name, entry in open_checkpoint(model).tensors.items() if name not in held}
