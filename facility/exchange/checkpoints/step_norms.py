"""The squared norm of an update's step, stated by the facility that made it: `step_norms.json` beside the tensors.

Where steps are clipped to the median norm, all norms must be known before the first step is added. Without this file
the coordinator reads every update twice. The file holds, by tensor, the sum of squares of (update - base) over each
SPAN of elements, in the arithmetic and the order of the coordinator's kernel, so that it gives the same bits.

The coordinator does not trust it: it plans with these numbers, measures the same sums as it averages, and where one bit
differs it discards what it wrote and plans with what it measured. A wrong statement changes no model; it costs a pass.

An update that travels as a difference states the step that it decodes to, as it is encoded. Where the coordinator has
to decode the message to files, it writes this file itself: it has the base and the update in memory then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, Opened, TensorEntry
from facility.exchange.checkpoints.floats import STORAGE, Array
from facility.exchange.checkpoints.spans import PIECE, SPAN
from facility.exchange.errors import ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.messages.strict_json import Fields, read_json

NAME = "step_norms.json"
FORMAT = 1
MOST_BYTES = 4 << 20
"""Of step_norms.json: some 150,000 spans."""
MOST_TENSORS = 100_000
READ = 4 * PIECE
"""Elements of the base read at a time."""

Squares = dict[str, list[float]]
"""By tensor, the sum of squares of each span."""


class StepNorms:
    """Sums of squares of an update's step, as its tensors are written. Use as a context manager.

    Nothing is stated where a tensor does not come from its first element to its last, is not in the base, or has a
    dtype that the compiled kernel does not read, or where there is no compiled kernel.
    """

    def __init__(self, base: Checkpoint) -> None:
        self._base, self._library = base.tensors, native.library()
        self._squares: Squares = {}
        self._position: dict[str, int] = {}
        self._complete = self._library is not None
        self._bytes_of = Opened()
        self._stored = np.empty(READ * 4, np.uint8).data
        self._widened, self._scratch = np.empty(READ, np.float32), np.empty(native.RUN + native.SPARE, np.float32)

    def take(self, name: str, dtype: str, start: int, values: Array, base: Array | None = None) -> None:
        """Add the elements of tensor `name` from `start` on; `values`: as stored in `dtype`.

        `base`: the base's elements from `start` on as stored, as many as `values`, where the caller has read them.
        """
        if not self._complete or dtype not in FLOATS:
            return
        entry = self._base.get(name)
        read = entry is not None and dtype in native.KINDS and entry.dtype in native.KINDS
        if entry is None or not read or not self._follows(name, start):
            self._complete = False
            return
        squares, done = self._squares.setdefault(name, []), 0
        while done < len(values):
            at = start + done
            if at % SPAN == 0:
                squares.append(0.0)
            count = min(READ, len(values) - done, SPAN - at % SPAN)
            old = self._read(entry, at, count) if base is None else base[done : done + count]
            kinds = [native.KINDS[entry.dtype], native.KINDS[dtype]]
            squares[-1] = self._added(squares[-1], [old, values[done : done + count]], kinds)
            done += count
        self._position[name] = start + done

    def unmoved(self, entries: Iterable[TensorEntry]) -> None:
        """Take tensors of the base that the update holds unchanged."""
        for entry in entries:
            if entry.dtype in FLOATS:
                self._squares[entry.name] = [0.0] * math.ceil(entry.elements / SPAN)

    def read(self, update: Checkpoint) -> None:
        """Take all tensors of an update that is on disk."""
        buffer = np.empty(READ * 4, np.uint8).data
        for name, entry in update.tensors.items():
            item = np.dtype(STORAGE[entry.dtype]).itemsize if entry.dtype in native.KINDS else 0
            if entry.dtype not in FLOATS:
                continue
            if not item:
                self._complete = False
                return
            for start in range(0, entry.elements, READ):
                view = buffer[: min(READ, entry.elements - start) * item]
                self._bytes_of(entry, start * item, view)
                self.take(name, entry.dtype, start, np.frombuffer(view, STORAGE[entry.dtype]))

    def write(self, directory: Path) -> None:
        """Write `step_norms.json`; nothing where it would not be the whole step, or a value is not finite."""
        whole = all(position == self._base[name].elements for name, position in self._position.items())
        finite = all(math.isfinite(value) for values in self._squares.values() for value in values)
        if self._complete and self._squares and whole and finite:
            write_json(directory / NAME, {"format": FORMAT, "span": SPAN, "squares": self._squares})

    def _follows(self, name: str, start: int) -> bool:
        return start == self._position.get(name, 0) and start % native.RUN == 0

    def _read(self, base: TensorEntry, start: int, count: int) -> Array:
        """Elements of the base as stored, in a buffer that is used again."""
        item = np.dtype(STORAGE[base.dtype]).itemsize
        view = self._stored[: count * item]
        self._bytes_of(base, start * item, view)
        return np.frombuffer(view, STORAGE[base.dtype])

    def _added(self, total: float, sources: list[Array], kinds: list[int]) -> float:
        """`total` and the squares of the step from the first source to the second, added as the kernel adds them."""
        gram = np.array([[total]])
        widened = self._widened[: len(sources[0])]
        sources = [np.ascontiguousarray(one) for one in sources]
        assert self._library is not None
        places = [native.address(one) for one in sources]
        native.steps(self._library, places, kinds, widened, None, gram, None, widened, False, self._scratch)
        return float(gram[0, 0])

    def __enter__(self) -> StepNorms:
        return self

    def __exit__(self, *error: object) -> None:
        self._bytes_of.__exit__(*error)


def read_step_norms(directory: Path, tensors: Mapping[str, TensorEntry]) -> Squares | None:
    """What an update states of these tensors; None where it states nothing, or not for all that are floating point."""
    try:
        found = Fields(raw=read_json(directory / NAME, most_bytes=MOST_BYTES), where=str(directory / NAME))
        if found.whole("format") != FORMAT or found.whole("span") != SPAN:
            return None
        stated = found.mapping("squares", MOST_TENSORS)
    except ManifestError:
        return None
    squares: Squares = {}
    for name, entry in tensors.items():
        if entry.dtype not in FLOATS:
            continue
        values = stated.get(entry.name, [])  # a tied weight may be in the update under its other name
        if not isinstance(values, list) or len(values) != math.ceil(entry.elements / SPAN):
            return None
        if not all(type(value) is float and 0 <= value < math.inf for value in values):
            return None
        squares[name] = values
    return squares
