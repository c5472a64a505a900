"""The second moments of a late update, as if it had begun with those of the round that averages it.

A facility returns kept * v + (1 - kept) * g, with v the second moments that came with the model that it started from
(`facility.exchange.checkpoints.second_moments.kept_share`). Beside updates in time v would count once more, as it was
rounds ago, and be judged by limits that are those of the present v (`coordinator.aggregation.moment_limits`). So the
present one takes its place: kept * (v now - v then) is added. What was not received in both rounds, or not in the same
form, stays as it was sent; the file names the parameters whose row and column means did not, since of them alone the
facility's own gradients can be computed (`coordinator.aggregation.squared_gradients`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.moments import (
    FIRST,
    Moment,
    Rows,
    StoredMoments,
    has_moments,
    shapes_in,
    write_moments,
)
from facility.exchange.checkpoints.moments import FOLDER as BY_VALUE
from facility.exchange.checkpoints.second_moments import FOLDER as FACTORS
from facility.exchange.checkpoints.second_moments import Factors, has_factors, kept_of, read_factors, write_factors


def rebase_moments(trained: Checkpoint, started: Checkpoint, present: Checkpoint, out: Path) -> set[str]:
    """Write the moments of the update `trained` below `out`; returns the folders that were written: others stay as they
    are. Raises `CheckpointError` for what no moments are."""
    written, all_of = set(), (trained, started, present)
    if (kept := _kept(trained.directory)) and all(has_factors(one.directory) for one in all_of):
        (sent, steps), (then, _), (now, _) = (read_factors(one.directory, shapes_in(one)) for one in all_of)
        moved = {name: _moved(one, then.get(name), now.get(name), kept) for name, one in sent.items()}
        rebased = [name for name, one in moved.items() if one is not sent[name]]
        write_factors(out, moved, steps=steps, kept=kept, rebased=rebased)
        written.add(FACTORS)
    if all(has_moments(one.directory) for one in all_of):
        stored = [StoredMoments(one.directory, shapes_in(one)) for one in all_of]
        if stored[0].kept:
            moments = {moment: _rows(moment, *stored) for moment in stored[0].moments.values()}
            write_moments(out, moments, steps=stored[0].steps, kept=stored[0].kept)
            written.add(BY_VALUE)
    return written


def _kept(directory: Path) -> float:
    return kept_of(directory) if has_factors(directory) else 0.0


def _moved(sent: Factors, then: Factors | None, now: Factors | None, kept: float) -> Factors:
    """`sent` with `now` in place of `then`; itself where rounding leaves too little of the difference."""
    if then is None or now is None or not sent.shapes == then.shapes == now.shapes:
        return sent
    columns = sent.columns
    if columns is not None and then.columns is not None and now.columns is not None:
        columns = _shifted(columns, then.columns, now.columns, kept)
    moved = Factors(_shifted(sent.rows, then.rows, now.rows, kept), columns)
    return moved if moved.agree else sent


def _rows(moment: Moment, sent: StoredMoments, then: StoredMoments, now: StoredMoments) -> Rows:
    """What reads the rows of a moved moment; a first one is its facility's own, and stays."""
    if moment.form == FIRST or not (then.has(moment) and now.has(moment)):
        return lambda first, count: sent.read(moment, first, count)

    def moved(first: int, count: int) -> Array:
        found, before, present = (one.read(moment, first, count) for one in (sent, then, now))
        return _shifted(found, before, present, sent.kept)

    return moved


def _shifted(sent: Array, then: Array, now: Array, kept: float) -> Array:
    """Values that begin with `now` in place of `then`; an honest one is no less than its part of `now`."""
    return np.maximum(sent + kept * (now.astype(np.float64) - then), kept * now).astype(np.float32)
