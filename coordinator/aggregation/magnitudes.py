"""DoRA's magnitudes before any training: the norms of the rows of the base's weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from coordinator.aggregation.stored_names import stored_parameter
from facility.exchange.checkpoints.adapters import MAGNITUDE, PREFIX
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.floats import Array

COLUMNS = ("gpt2", "openai-gpt", "imagegpt")
"""Families whose linear layers are transformers' Conv1D: a column for each output, not a row."""


def first_magnitudes(base: Checkpoint, name: str) -> Array | None:
    """What the magnitudes of that name begin with at every facility; None where the base lacks the layer."""
    weight = stored_parameter(base, name.removeprefix(PREFIX).removesuffix(MAGNITUDE) + ".weight")
    if weight is None or len(weight.shape) != 2:
        return None
    return np.asarray(np.linalg.norm(weight.values(), axis=0 if _holds_columns(base.directory) else 1))


def _holds_columns(base: Path) -> bool:
    try:
        return json.loads((base / "config.json").read_text(encoding="utf-8")).get("model_type") in COLUMNS
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
