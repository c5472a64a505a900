"""Moments of an inner optimizer as they travel value by value, beside the row and column means of `second_moments`.

    DIRECTORY/moments/model.safetensors
        NAME::first     BF16, of the parameter's shape: AdamW's first moment, Muon's momentum
        NAME::full      F32 (rows, width): a matrix's second moment
        NAME::codes     U8 (rows, width), with NAME::largest F32 (rows): the same, a byte a value
        NAME::blocks    F32 (rows, ceil(width / 64)): the same, the means of 64 values of a row (as Adam-mini has one
                        second moment for a block of parameters: Zhang et al. 2024, arXiv 2406.16793)

A code c below 255 stands for the row's largest value times 2^(-c / 8), 255 for zero; what is smaller than 2^-31.75 of
the largest counts as that. So a value is within 4.5 % of what it was, and its root, by which AdamW divides, within
2.2 %. Moments are corrected for bias, and tensors of more than two dimensions count as matrices, as in
`second_moments`. All is written and read in pieces of whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry, open_checkpoint, read_tensor
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.checkpoints.second_moments import PIECE_VALUES
from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_of_shards
from facility.exchange.errors import CheckpointError

FOLDER = "moments"
FIRST, FULL, INT8, BLOCKS = "first", "full", "int8", "blocks"
BLOCK = 64
OCTAVE = 8.0
"""Codes of a factor of two."""
SMALLEST, ZERO = 254, 255
PARTS = {
    FIRST: {"::first": "BF16"},
    FULL: {"::full": "F32"},
    INT8: {"::codes": "U8", "::largest": "F32"},
    BLOCKS: {"::blocks": "F32"},
}
"""Tensors of each form, and their dtypes."""
Rows = Callable[[int, int], Array]
"""So many rows of a matrix in float32 from one on, (count, width)."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and width of a tensor as a matrix; a vector has the width 1."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape) // max(1, rows)


def columns(form: str, width: int) -> int:
    """Values of a row in a form."""
    return -(-width // BLOCK) if form == BLOCKS else width


def spread(blocks: Array, width: int) -> Array:
    """Every block's mean for each of its values."""
    return np.repeat(blocks, BLOCK, axis=1)[:, :width]


def block_means(values: Array) -> Array:
    """Means of 64 values of a row, (rows, blocks)."""
    width = values.shape[1]
    sums = np.add.reduceat(values, np.arange(0, width, BLOCK), axis=1, dtype=np.float64)
    counts = np.full(sums.shape[1], BLOCK)
    counts[-1] = width - BLOCK * (len(counts) - 1)
    return np.asarray(sums / counts, np.float32)


def encoded(form: str, values: Array) -> list[Array]:
    """Rows of a form as its tensors hold them. `values`: float32 (count, columns)."""
    if form == FIRST:
        out = np.empty(values.shape, STORAGE["BF16"])
        narrow(values.ravel(), "BF16", out.reshape(-1), np.empty(values.size, np.uint32))
        return [out]
    if form != INT8:
        return [values]
    largest = values.max(axis=1, initial=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.round(OCTAVE * (np.log2(largest)[:, None] - np.log2(values)))
    codes = np.where(values > 0, np.clip(codes, 0, SMALLEST), ZERO)
    return [codes.astype(np.uint8), largest]


def decoded(form: str, parts: list[Array]) -> Array:
    """What `encoded` made tensors of, float32 (count, columns)."""
    if form == FIRST:
        out = np.empty(parts[0].shape, np.float32)
        widen(parts[0].ravel(), "BF16", out.reshape(-1))
        return out
    if form != INT8:
        return parts[0]
    scale = np.exp2(-np.arange(256) / OCTAVE)
    scale[ZERO] = 0.0
    return np.asarray(scale[parts[0]] * parts[1][:, None], np.float32)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One parameter's moment in one form."""

    name: str
    form: str
    shape: tuple[int, ...]
    """Shape of the parameter, which the moment need not have."""

    @property
    def rows(self) -> int:
        return matrix_shape(self.shape)[0]

    @property
    def width(self) -> int:
        """Values of a row as they are stored."""
        return columns(self.form, matrix_shape(self.shape)[1])

    def planned(self) -> list[Planned]:
        """Tensors that a moment is stored as."""
        sizes = {"::first": self.shape, "::largest": (self.rows,)}
        return [
            Planned(name=self.name + mark, dtype=dtype, shape=sizes.get(mark, (self.rows, self.width)))
            for mark, dtype in PARTS[self.form].items()
        ]

    @property
    def bytes(self) -> int:
        """Bytes of these tensors together."""
        return sum(one.size for one in self.planned())

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First row and count of each piece."""
        step = max(1, PIECE_VALUES // max(1, matrix_shape(self.shape)[1]))
        for first in range(0, self.rows, step):
            yield first, min(step, self.rows - first)


def write_moments(directory: Path, moments: Mapping[Moment, Rows], *, steps: float, kept: float = 0.0) -> None:
    """Write `directory`/moments; nothing where there are none. `moments`: where the rows of each come from.

    `steps`: steps that they have seen. `kept`: as in `second_moments.write_factors`.
    """
    if not moments:
        return
    folder = Path(directory) / FOLDER
    folder.mkdir()
    layout = layout_of_shards([one for moment in moments for one in moment.planned()], 2**31)
    metadata = {"format": "pt", "steps": repr(float(steps))} | ({"kept": repr(float(kept))} if kept else {})
    with TensorWriter(folder, layout, metadata) as writer:
        for moment, rows in moments.items():
            for first, count in moment.pieces():
                for one, value in zip(moment.planned(), encoded(moment.form, rows(first, count)), strict=True):
                    stored = np.ascontiguousarray(value)
                    writer.write(one.name, first * (stored.nbytes // max(1, count)), stored.data.cast("B"))


def shapes_in(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of its tensors by name."""
    return {name: tuple(entry.shape) for name, entry in checkpoint.tensors.items()}


def has_moments(directory: Path) -> bool:
    """Whether moments lie beside a checkpoint."""
    return (Path(directory) / FOLDER).is_dir()


class StoredMoments:
    """The moments beside a checkpoint, read piece by piece."""

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: parameters by name. Raises `CheckpointError` where a tensor belongs to none of them or has another
        form, and where a parameter has two second moments."""
        self.checkpoint: Checkpoint = open_checkpoint(Path(directory) / FOLDER)
        self.moments: dict[tuple[str, bool], Moment] = {}
        """By parameter, and whether it is the first moment."""
        marks = {mark: form for form, parts in PARTS.items() for mark in parts}
        for stored in self.checkpoint.tensors:
            name, mark, part = stored.rpartition("::")
            shape, form = shapes.get(name), marks.get(mark + part)
            if shape is None or form is None or (form != FIRST and len(shape) < 2):
                raise CheckpointError(
                    f"{self.checkpoint.directory} holds {stored!r:.80}, which is not a parameter's moment"
                )
            moment = Moment(name=name, form=form, shape=tuple(shape))
            if self.moments.setdefault((name, form == FIRST), moment) != moment:
                raise CheckpointError(f"{self.checkpoint.directory} holds two second moments of {name!r:.80}")
        for moment in self.moments.values():
            self._check(moment)
        self.steps, self.kept = self._number("steps", 1e12), self._number("kept", 1.0)

    def _check(self, moment: Moment) -> None:
        for one in moment.planned():
            entry = self.checkpoint.tensors.get(one.name)
            if entry is None or (entry.dtype, tuple(entry.shape)) != (one.dtype, one.shape):
                found = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise CheckpointError(
                    f"{self.checkpoint.directory}: {one.name!r:.80} is {found}, expected {one.dtype} {list(one.shape)}"
                )

    def has(self, moment: Moment) -> bool:
        """Whether it is here, in this form."""
        return self.moments.get((moment.name, moment.form == FIRST)) == moment

    def check(self) -> None:
        """Read all of it. Raises `CheckpointError` for values that no moment has."""
        for moment in self.moments.values():
            for first, count in moment.pieces():
                self.read(moment, first, count)

    def _number(self, key: str, most: float) -> float:
        try:
            value = float(self.checkpoint.metadata.get(key, "0"))
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise CheckpointError(f"{self.checkpoint.directory} states no plausible {key}")
        return value

    def read(self, moment: Moment, first: int, count: int) -> Array:
        """Rows as they are stored, float32 (count, columns). Raises `CheckpointError` for what no moment is."""
        parts = []
        for one in moment.planned():
            entry = self.checkpoint.tensors[one.name]
            parts.append(_rows(entry, moment.rows, first, count))
        if moment.form == FIRST:
            parts[0] = parts[0].reshape(count, -1)
        values = decoded(moment.form, parts)
        if not np.isfinite(values).all() or (moment.form != FIRST and (values < 0).any()):
            raise CheckpointError(f"{self.checkpoint.directory}: {moment.name!r:.80} holds values that no moment has")
        return values

    def whole(self, moment: Moment, first: int, count: int) -> Array:
        """Rows with a value for each of the parameter's."""
        values, width = self.read(moment, first, count), matrix_shape(moment.shape)[1]
        return spread(values, width) if moment.form == BLOCKS else values

    def size_of(self, moment: Moment) -> float:
        """The mean of a second moment, the L2 norm of a first one. Reads all of it."""
        total = 0.0
        for first, count in moment.pieces():
            values = self.read(moment, first, count).astype(np.float64)
            total += float(np.square(values).sum() if moment.form == FIRST else values.sum())
        return math.sqrt(total) if moment.form == FIRST else total / max(1, moment.rows * moment.width)


def _rows(entry: TensorEntry, rows: int, first: int, count: int) -> Array:
    """Rows of a stored tensor in its own dtype."""
    each = entry.elements // max(1, rows)
    stored = np.empty(count * each, np.uint8 if entry.dtype == "U8" else STORAGE[entry.dtype])
    read_tensor(entry, stored.data.cast("B"), first * each * stored.itemsize)
    return stored if len(entry.shape) == 1 and each == 1 else stored.reshape(count, each)


def sent_bytes(
    second: Iterable[tuple[int, ...]], first: Iterable[tuple[int, ...]] = (), *, form: str = "factors"
) -> int:
    """Bytes of the moments that travel, without headers: second moments of parameters of the shapes `second`, matrices'
    in `form` (`factors`: row and column means), and first moments of parameters of the shapes `first`."""
    total = sum(Moment(name="", form=FIRST, shape=shape).bytes for shape in first)
    for shape in second:
        rows, width = matrix_shape(shape)
        if len(shape) < 2:
            total += 4 * rows
        else:
            total += 4 * (rows + width) if form == "factors" else Moment(name="", form=form, shape=shape).bytes
    return total
