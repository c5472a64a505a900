"""DoRA's magnitudes before any training: the norms of the rows of the base's weights."""

from __future__ import annotations

import numpy as np

from coordinator.aggregation.stored_names import stored_parameter
from facility.exchange.checkpoints.adapters import MAGNITUDE, PREFIX
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.model_files import model_file_if_any

COLUMNS = ("gpt2", "openai-gpt", "imagegpt")
"""Families whose linear layers are transformers' Conv1D: a column for each output, not a row."""


def first_magnitudes(base: Checkpoint, name: str) -> Array | None:
    """What the magnitudes of that name begin with at every facility; None where the base lacks the layer."""
    weight = stored_parameter(base, name.removeprefix(PREFIX).removesuffix(MAGNITUDE) + ".weight")
    if weight is None or len(weight.shape) != 2:
        return None
    holds_columns = model_file_if_any(base.directory).get("model_type") in COLUMNS
    return np.asarray(np.linalg.norm(weight.values(), axis=0 if holds_columns else 1))
