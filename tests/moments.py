"""Moments for tests: written value by value in any form, and drawn for every tensor of a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.moments import (
    FIRST,
    FOLDER,
    Moment,
    StoredMoments,
    decoded,
    encoded,
    shapes_in,
    write_moments,
)
from facility.exchange.messages.manifest import read_manifest, write_manifest

Values = dict[Moment, np.ndarray]


def write_values(directory: Path, values: Mapping[Moment, np.ndarray], *, steps: float, kept: float = 0.0) -> Values:
    """Write `directory`/moments; returns the values as their forms keep them."""
    rows = {moment: lambda first, count, v=value: v[first : first + count] for moment, value in values.items()}
    write_moments(directory, rows, steps=steps, kept=kept)
    return {m: decoded(m.form, encoded(m.form, value)).reshape(value.shape) for m, value in values.items()}


def of_all(directory: Path, form: str) -> list[Moment]:
    """A moment of every tensor that can have it in this form."""
    shapes = shapes_in(open_checkpoint(directory))
    return [Moment(name=n, form=form, shape=s) for n, s in shapes.items() if form == FIRST or len(s) > 1]


def with_moments(
    directory: Path, *forms: str, seed: int = 0, scale: float = 1.0, kept: float = 0.0, steps: float = 5.0
) -> Values:
    """Give every tensor moments of its own, and the manifest its files; returns them as they are stored."""
    rng, found = np.random.default_rng(seed), {}
    for form in forms:
        for moment in of_all(directory, form):
            drawn = rng.standard_normal((moment.rows, moment.width)) * scale
            found[moment] = np.asarray(drawn if form == FIRST else np.square(drawn), np.float32)
    shutil.rmtree(directory / FOLDER, ignore_errors=True)
    kept_as = write_values(directory, found, steps=steps, kept=kept)
    write_manifest(directory, read_manifest(directory))
    return kept_as


def stored(directory: Path) -> StoredMoments:
    """Those that lie beside a checkpoint."""
    return StoredMoments(directory, shapes_in(open_checkpoint(directory)))
