"""What a late update of adapters started from, where the model of its round had none yet."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from coordinator.aggregation.magnitudes import first_magnitudes
from coordinator.aggregation.stored_names import stored_parameter
from facility.exchange.checkpoints.adapters import PREFIX, is_adapter, is_added, is_factor, is_magnitude
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import FLOATS, SINGLE, open_checkpoint
from facility.exchange.checkpoints.delta_parts import as_bytes
from facility.exchange.checkpoints.writer import Planned, TensorWriter


@contextmanager
def started_from(update: Path, model: Path, seed: int, *, scratch: Path) -> Iterator[Path]:
    """The checkpoint whose tensors `update` was trained from: `model`, or for the first adapters of a federation a
    temporary one in `scratch`, with factors drawn from `seed`, and what is saved whole and magnitudes as in `model`."""
    held, trained = open_checkpoint(model), open_checkpoint(update)
    if any(map(is_adapter, held.tensors)) or not any(map(is_adapter, trained.tensors)):
        yield model
        return
    planned = []
    for name, entry in sorted(trained.tensors.items()):
        plain = None if is_added(name) else stored_parameter(held, name.removeprefix(PREFIX))
        if entry.dtype in FLOATS and (is_added(name) or (plain is not None and plain.shape == entry.shape)):
            planned.append(Planned(name=name, dtype="F32", shape=entry.shape))
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".begun.") as begun:
        with TensorWriter(Path(begun), {SINGLE: planned}) as writer:
            for one in planned:
                if is_factor(one.name):
                    writer.write(one.name, 0, as_bytes(begun_factor(seed, one.name, one.shape)))
                    continue
                if is_magnitude(one.name):
                    lengths = first_magnitudes(held, one.name)
                    first = np.zeros(one.shape, np.float32) if lengths is None else lengths.astype(np.float32)
                    writer.write(one.name, 0, as_bytes(first))
                    continue
                whole = stored_parameter(held, one.name.removeprefix(PREFIX))
                assert whole is not None
                writer.write(one.name, 0, as_bytes(whole.values().astype(np.float32)))
        yield Path(begun)
