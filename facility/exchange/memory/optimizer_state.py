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
    """Bytes of the optimizer's state for trained weights, each a name in the checkpoint and a shape; one without a name
    counts by the optimizer's bytes a parameter. Beside these bytes lie counts of steps, a few bytes a tensor."""
    optimizer = OPTIMIZERS.get(training.optimizer)
    patterns = _patterns(optimizer, training)
    return sum(_bytes(optimizer, patterns, name, shape) for name, shape in weights)


def with_second_moments(
    training: TrainingSettings, weights: Iterable[tuple[str, tuple[int, ...]]]
) -> list[tuple[int, ...]]:
    """Shapes of the weights of which a second moment is kept for every value: all with AdamW, with Muon no matrix."""
    optimizer = OPTIMIZERS.get(training.optimizer)
    if optimizer.matrices == "factors":
        return []
    patterns = _patterns(optimizer, training)
    momenta = optimizer.matrices == "momentum"
    return [shape for name, shape in weights if not (momenta and _is_matrix(patterns, name, shape))]


def _patterns(optimizer: InnerOptimizer, training: TrainingSettings) -> list[str]:
    values = optimizer.values(training.optimizer_parameters)
    return str(values[optimizer.moments_of]).split() if optimizer.moments_of else []


def _is_matrix(patterns: list[str], name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon keeps a momentum of it alone."""
    return len(shape) == 2 and EXPERTS not in name and not any(fnmatchcase(name, pattern) for pattern in patterns)


def _bytes(optimizer: InnerOptimizer, patterns: list[str], name: str, shape: tuple[int, ...]) -> float:
    count = math.prod(shape)
    if not name or optimizer.matrices == "moments":
        return optimizer.state_bytes * count
    if optimizer.matrices == "momentum":
        return (VALUE_BYTES if _is_matrix(patterns, name, shape) else 2 * VALUE_BYTES) * count
    if len(shape) < 2:
        return VALUE_BYTES * count
    rows, columns = math.prod(shape[:-1]), math.prod(shape[:-2]) * shape[-1]
    return VALUE_BYTES * (rows + columns)
