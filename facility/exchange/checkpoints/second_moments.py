"""AdamW's second moments as they travel: row and column means of each matrix, vectors whole.

Where each facility's AdamW scales coordinates by second moments of its own, facilities step in different metrics, and
their steps partly cancel in the mean. With one shared metric they add up (DES-LOC, arXiv 2505.22549, synchronises each
moment with a period of its own). A matrix v of n x m values is sent as n + m numbers, its row means r and column means
c, and is rebuilt as r c^T / mean(v), as in Adafactor (Shazeer and Stern, arXiv 1804.04235, section 3).

    DIRECTORY/second_moments/model.safetensors      NAME::rows (n), NAME::columns (m), or NAME::values for a vector; F32

Values are corrected for AdamW's bias, v / (1 - beta2^t), so that facilities of different step counts t can be averaged.
Tensors of more than two dimensions count as matrices of their first dimension by all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry, open_checkpoint, read_tensor
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_of_shards
from facility.exchange.errors import CheckpointError

FOLDER = "second_moments"
ROWS, COLUMNS, VALUES = "::rows", "::columns", "::values"
AGREEMENT = 1e-2
"""Relative difference of the mean of row means and that of column means, which rounding alone makes."""
REBASED = "rebased"
"""In the header of a late update's, once they were moved to the present round: the parameters, one a line."""
PIECE_VALUES = 4 << 20
"""Values read at once."""


@dataclass(frozen=True)
class Factors:
    """One parameter's second moment as it travels: `columns` is None for a vector, whose values `rows` are."""

    rows: Array
    columns: Array | None = None

    @property
    def mean(self) -> float:
        """Mean of all values, which is that of the row means and that of the column means."""
        return float(self.rows.mean(dtype=np.float64)) if len(self.rows) else 0.0

    @property
    def agree(self) -> bool:
        """Row means and column means can be those of one matrix."""
        if self.columns is None or not len(self.columns):
            return True
        other = float(self.columns.mean(dtype=np.float64))
        return math.isclose(self.mean, other, rel_tol=AGREEMENT, abs_tol=np.finfo(np.float32).tiny)

    def at_most(self, mean: float) -> Factors:
        """These factors scaled down to a mean; `self` where their own is no larger."""
        if self.mean <= mean:
            return self
        scale = mean / self.mean
        columns = None if self.columns is None else (self.columns * scale).astype(np.float32)
        return Factors((self.rows * scale).astype(np.float32), columns)

    def at_least(self, other: Factors, share: float) -> Factors:
        """These factors with no value below `share` of another's; `self` where none is, or where shapes differ."""
        if share <= 0 or self.shapes != other.shapes:
            return self
        rows = np.maximum(self.rows, (other.rows * share).astype(np.float32))
        columns = self.columns
        if columns is not None and other.columns is not None:
            columns = np.maximum(columns, (other.columns * share).astype(np.float32))
        if np.array_equal(rows, self.rows) and (columns is None or np.array_equal(columns, np.asarray(self.columns))):
            return self
        return Factors(rows, columns)

    @property
    def shapes(self) -> tuple[int, int | None]:
        """Lengths of rows and columns."""
        return len(self.rows), None if self.columns is None else len(self.columns)

    def rebuilt(self, first: int, count: int) -> Array:
        """Rows `first` to `first` + `count` of the matrix (count, m), or of the vector (count,)."""
        rows = self.rows[first : first + count]
        if self.columns is None:
            return rows
        mean = float(self.rows.mean(dtype=np.float64))
        return np.outer(rows, self.columns / mean if mean > 0 else np.zeros_like(self.columns)).astype(np.float32)


def factors_of(entry: TensorEntry, scale: float = 1.0) -> Factors:
    """Row and column means of a stored float32 tensor, times `scale`; read once, in pieces."""
    assert entry.dtype == "F32", entry

    def read(start: int, values: int) -> Array:
        piece = np.empty(values, np.float32)
        read_tensor(entry, piece.data.cast("B"), start * 4)
        return piece

    return factors_of_values(entry.shape, read, scale)


def factors_of_values(shape: tuple[int, ...], read: Callable[[int, int], Array], scale: float) -> Factors:
    """Row means and column means of a tensor that `read(start, count)` gives piece by piece, float32, row by row."""
    count = shape[0] if shape else 1
    width = max(1, math.prod(shape) // max(1, count))
    rows, columns = np.zeros(count, np.float32), np.zeros(width, np.float64)
    step = max(1, PIECE_VALUES // width)
    for first in range(0, count, step):
        piece = read(first * width, min(step, count - first) * width).reshape(-1, width)
        rows[first : first + len(piece)] = piece.mean(axis=1, dtype=np.float64) * scale
        columns += piece.sum(axis=0, dtype=np.float64)
    if len(shape) < 2:
        return Factors(rows)
    return Factors(rows, (columns * (scale / max(1, count))).astype(np.float32))


def kept_share(beta2: float, *, before: int, steps: int) -> float:
    """The share of received second moments that is left in those of a facility, both corrected for AdamW's bias.

    `before`: steps that the received ones counted as here; `steps`: steps since the beginning, the round's included.
    """
    if not 0 < before < steps:
        return 0.0
    return beta2 ** (steps - before) * (1 - beta2**before) / (1 - beta2**steps)


def write_factors(
    directory: Path,
    factors: Mapping[str, Factors],
    *,
    steps: float,
    kept: float = 0.0,
    rebased: Collection[str] | None = None,
) -> None:
    """Write `directory`/second_moments. `steps`: steps that the moments have seen (their mean, where averaged).

    `kept`: `kept_share` of the received ones in an update's; `rebased`: parameters of a late update whose received ones
    are those of the round that averages it (`coordinator.aggregation.rebase_moments`).
    """
    folder = Path(directory) / FOLDER
    folder.mkdir()
    values = {}
    for name, one in factors.items():
        if one.columns is None:
            values[name + VALUES] = one.rows
        else:
            values[name + ROWS], values[name + COLUMNS] = one.rows, one.columns
    planned = [Planned(name=name, dtype="F32", shape=value.shape) for name, value in values.items()]
    stated = manifest_header(steps, kept) | ({} if rebased is None else {REBASED: "\n".join(sorted(rebased))})
    with TensorWriter(folder, layout_of_shards(planned, 2**31), stated) as writer:
        for name, value in values.items():
            writer.write(name, 0, np.ascontiguousarray(value, np.float32).data.cast("B"))


def manifest_header(steps: float, kept: float = 0.0) -> dict[str, str]:
    """What the file states beside its tensors."""
    return {"format": "pt", "steps": repr(float(steps))} | ({"kept": repr(float(kept))} if kept else {})


def has_factors(directory: Path) -> bool:
    """Whether second moments lie beside a checkpoint."""
    return (Path(directory) / FOLDER).is_dir()


def steps_of(directory: Path) -> float:
    """Steps that `directory`/second_moments states to have seen. Raises `CheckpointError` for what cannot be."""
    checkpoint = open_checkpoint(Path(directory) / FOLDER)
    try:
        steps = float(checkpoint.metadata.get("steps", "0"))
    except ValueError:
        steps = -1.0
    if not 0 <= steps < 1e12:
        raise CheckpointError(f"{checkpoint.directory} states no plausible number of steps")
    return steps


def kept_of(directory: Path) -> float:
    """What `directory`/second_moments states as its share of received moments, in [0, 1]; 0 where nothing possible."""
    try:
        kept = float(open_checkpoint(Path(directory) / FOLDER).metadata.get("kept", "0"))
    except ValueError:
        return 0.0
    return kept if 0 <= kept <= 1 else 0.0


def rebased_of(directory: Path) -> frozenset[str]:
    """The parameters whose received moments in `directory`/second_moments are those of the present round."""
    return frozenset(open_checkpoint(Path(directory) / FOLDER).metadata.get(REBASED, "").split("\n"))


def read_factors(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Factors], float]:
    """The factors in `directory`/second_moments and the steps they have seen.

    `shapes`: parameters of the model by name. Raises `CheckpointError` where a tensor belongs to none of them, has
    another length, or holds a value that no second moment has (negative, not finite).
    """
    checkpoint = open_checkpoint(Path(directory) / FOLDER)
    read = {name: _read(entry) for name, entry in checkpoint.tensors.items()}
    found: dict[str, Factors] = {}
    for stored in read:
        name, mark, part = stored.rpartition("::")
        shape = shapes.get(name)
        if shape is None or mark + part not in (ROWS, COLUMNS, VALUES) or (len(shape) < 2) != (mark + part == VALUES):
            raise CheckpointError(f"{checkpoint.directory} holds {stored!r:.80}, which is not a factor of a parameter")
        if name in found:
            continue
        pair = [read.get(name + VALUES)] if len(shape) < 2 else [read.get(name + ROWS), read.get(name + COLUMNS)]
        count = shape[0] if shape else 1
        wanted = [count, int(np.prod(shape[1:], dtype=np.int64))][: len(pair)]
        if [None if one is None else len(one) for one in pair] != wanted:
            raise CheckpointError(f"{checkpoint.directory}: the factors of {name!r:.80} do not fit its shape {shape}")
        found[name] = Factors(*pair)  # type: ignore[arg-type]
    return found, steps_of(directory)


def rows_in(checkpoint: Checkpoint, name: str) -> Array | None:
    """The row means of one parameter in a `second_moments` directory, a vector's values; None where it has none.

    Raises `CheckpointError` for what no second moment is.
    """
    entry = checkpoint.tensors.get(name + ROWS) or checkpoint.tensors.get(name + VALUES)
    return None if entry is None else _read(entry)


def _read(entry: TensorEntry) -> Array:
    if entry.dtype != "F32" or len(entry.shape) != 1:
        raise CheckpointError(
            f"{entry.file}: {entry.name!r:.80} is {entry.dtype} {list(entry.shape)}, expected a float32 vector"
        )
    value = np.empty(entry.elements, np.float32)
    read_tensor(entry, value.data.cast("B"))
    if not (np.isfinite(value).all() and (value >= 0).all()):
        raise CheckpointError(f"{entry.file}: {entry.name!r:.80} holds values that no second moment has")
    return value


def mean_of(every: Iterable[tuple[Mapping[str, Factors], float]]) -> dict[str, Factors]:
    """Weighted mean of factors, parameter by parameter, over those that hold it, in float64."""
    totals: dict[str, tuple[Array, Array | None, float]] = {}
    for factors, weight in every:
        for name, one in factors.items():
            rows, columns, total = totals.get(name, (np.zeros(len(one.rows)), None, 0.0))
            more = None if one.columns is None else one.columns * np.float64(weight)
            columns = more if columns is None or more is None else columns + more
            totals[name] = (rows + one.rows * np.float64(weight), columns, total + weight)
    return {
        name: Factors(
            (rows / total).astype(np.float32), None if columns is None else (columns / total).astype(np.float32)
        )
        for name, (rows, columns, total) in totals.items()
        if total > 0
    }
