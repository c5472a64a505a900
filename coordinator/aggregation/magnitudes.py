"""DoRA's magnitudes before any training: the norms of the rows of the base's weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from coordinator.aggregation.stored_names import stored_tensor
from facility.exchange.checkpoints.adapters import MAGNITUDE, PREFIX
from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry
from facility.exchange.checkpoints.floats import STORAGE, Array, widen

COLUMNS = ("gpt2", "openai-gpt", "imagegpt")
"""Families whose linear layers are transformers' Conv1D: a column for each output, not a row."""


def first_magnitudes(base: Checkpoint, name: str) -> Array | None:
    """What the magnitudes of that name begin with at every facility; None where the base lacks the layer."""
    weight = stored_tensor(base, name.removeprefix(PREFIX).removesuffix(MAGNITUDE) + ".weight")
    if weight is None or len(weight.shape) != 2:
        return None
    return np.asarray(np.linalg.norm(value_of(weight), axis=0 if _holds_columns(base.directory) else 1))


def _holds_columns(base: Path) -> bool:
    try:
        return json.loads((base / "config.json").read_text(encoding="utf-8")).get("model_type") in COLUMNS
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def value_of(entry: TensorEntry) -> Array:
    """A stored tensor in float64."""
    raw = np.fromfile(entry.file, STORAGE[entry.dtype], entry.elements, offset=entry.start)
    out = np.empty(entry.elements, np.float64)
    widen(raw, entry.dtype, out)
    return out.reshape(entry.shape)
