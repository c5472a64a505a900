"""Bytes of state that an inner optimizer keeps of weights, from their names and shapes: in memory and on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

from facility.exchange.messages.optimizers import OPTIMIZERS, InnerOptimizer
from facility.exchange.messages.settings import TrainingSettings

VALUE_BYTES = 4
"""States are kept in float32."""
EXPERTS = ".experts."
"""In the name of an expert's matrix. A model may hold all experts in one parameter of three dimensions: no matrix."""


def state_bytes(training: TrainingSettings, weights: Iterable[tuple[str, tuple[int, ...]]]) -> float:
    """Of trained weights, each a name in the checkpoint and a shape; a weight without a name counts by the optimizer's
    bytes a parameter. Beside these bytes lie counts of steps, a few bytes a tensor."""
    optimizer = OPTIMIZERS.get(training.optimizer)
    values = optimizer.values(training.optimizer_parameters)
    patterns = str(values[optimizer.moments_of]).split() if optimizer.moments_of else []
    return sum(_bytes(optimizer, patterns, name, shape) for name, shape in weights)


def _bytes(optimizer: InnerOptimizer, patterns: list[str], name: str, shape: tuple[int, ...]) -> float:
    count = math.prod(shape)
    if not name or optimizer.matrices == "moments":
        return optimizer.state_bytes * count
    if optimizer.matrices == "momentum":
        matrix = len(shape) == 2 and EXPERTS not in name and not any(fnmatchcase(name, pattern) for pattern in patterns)
        return VALUE_BYTES * count if matrix else 2 * VALUE_BYTES * count
    if len(shape) < 2:
        return VALUE_BYTES * count
    rows, columns = math.prod(shape[:-1]), math.prod(shape[:-2]) * shape[-1]
    return VALUE_BYTES * (rows + columns)
