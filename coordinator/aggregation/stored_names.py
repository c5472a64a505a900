"""The parameters of a base model by the names that they have in the model, in which adapters are named.

transformers 5 stores some models under other names than their parameters have (a ViT's `vit.layers.0.attention.q_proj`
as `vit.encoder.layer.0.attention.attention.query`), or several parameters in one tensor (Nomic BERT's `q_proj`,
`k_proj` and `v_proj` as `Wqkv`), and an adapter is named after the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry
from facility.exchange.checkpoints.conversion import Pieces, check_names
from facility.exchange.checkpoints.floats import STORAGE, Array, widen
from facility.exchange.checkpoints.task_class import model_of
from facility.exchange.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A floating-point parameter as a base model stores it."""

    shape: Shape
    tensors: Mapping[str, TensorEntry]
    """That hold its values, by name."""
    pieces: Pieces | None = None
    """Where in them; None: one holds it as it is."""

    def values(self) -> Array:
        """The parameter in float64."""
        found = {name: value_of(entry) for name, entry in self.tensors.items()}
        if self.pieces is None:
            return next(iter(found.values()))
        runs = self.pieces.between(0, int(np.prod(self.shape)))
        parts = [found[run.tensor].reshape(-1)[run.start : run.start + run.count] for run in runs]
        return np.concatenate(parts).reshape(self.shape)


def stored_parameter(base: Checkpoint, name: str) -> Stored | None:
    """Where the base holds the parameter of that name; None where it has none, or none of floating-point numbers.

    transformers is asked, which takes seconds, only where no tensor has the name itself.
    """
    found = Stored(shape=base.tensors[name].shape, tensors={name: base.tensors[name]}) if name in base.tensors else None
    if found is None and (place := _places(base.directory).get(name)) is not None:
        names, shape, pieces = place
        if all(one in base.tensors for one in names):
            found = Stored(shape=shape, tensors={one: base.tensors[one] for one in names}, pieces=pieces)
    if found is None or any(entry.dtype not in FLOATS for entry in found.tensors.values()):
        return None
    return found


@lru_cache(maxsize=4)
def _places(directory: Path) -> Mapping[str, tuple[tuple[str, ...], Shape, Pieces | None]]:
    """Name of a parameter -> the tensors that hold it, its shape, and its pieces; {} where config.json describes no
    model that can be built."""
    try:
        model = model_of(directory)
        conversion = check_names(directory, model)
    except (CheckpointError, ImportError, OSError, ValueError):
        return {}
    shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    whole = {name: ((stored,), shapes[name], None) for name, stored in conversion.same.items()}
    return whole | {name: (one.tensors, shapes[name], one) for name, one in conversion.pieces.items()}


def value_of(entry: TensorEntry) -> Array:
    """A stored tensor in float64."""
    raw = np.fromfile(entry.file, STORAGE[entry.dtype], entry.elements, offset=entry.start)
    out = np.empty(entry.elements, np.float64)
    widen(raw, entry.dtype, out)
    return out.reshape(entry.shape)
