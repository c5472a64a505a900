"""The streaming kernel: one pass over the tensors of all updates, in memory that grows with neither model nor updates.

For every piece of every federated tensor, with b the half-precision base that was sent, m the float32 master
(b itself in the first round) and u_k the updates in the order of their facilities' names:

    d_k = u_k - b          each update's step
    c   = combine(d)       one step for the round (a weighted sum, or a function of all d_k value by value)
    m'  = outer(m, c)      server optimiser
    out = round(m')        once, to the tensor's own dtype

Elementwise IEEE operations in a fixed order: the bits of the result depend on neither arrival, threads, read size nor
sharding. What half precision cannot represent stays in m, and is sent once it has grown large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coordinator.aggregation.read_size import elements_read
from coordinator.aggregation.reading import WIDEST, TensorReader
from coordinator.aggregation.steps import Steps, add_products
from coordinator.aggregation.streams import PIECE, Files, Span, pieces, spans_of
from coordinator.aggregation.sums import PartSums, Sums
from coordinator.aggregation.turns import Turns
from coordinator.aggregation.unmasking import Unmasking
from coordinator.aggregation.work import NotFinite, Passed, Work
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.checkpoints.running_statistics import is_running_statistic
from facility.exchange.checkpoints.writer import TensorWriter
from facility.exchange.errors import InputError
from facility.exchange.malloc import share_one_arena

STRIDE = PIECE // 4
"""Elements that the server optimizer moves at a time."""
SAMPLE = 16
"""With sampled statistics, every N-th piece of each tensor counts, from its first on."""
FAR = 1e-3
"""Of the largest number of a dtype: longer steps are to blame where a result does not fit, such as that of a rule which
lengthens them."""


class _Buffers:
    """One thread's memory."""

    def __init__(self, sources: int, elements: int, *, masked: bool) -> None:
        self.raw = [np.empty(elements * WIDEST, np.uint8).data for _ in range(sources)]
        """What each source is read into, sized for the widest dtype: pages that a narrower one spares take none."""
        self.output = np.empty(elements * WIDEST, np.uint8)
        self.masked = [np.empty(elements * WIDEST, np.uint8).data for _ in range(2 if masked else 0)]
        """What masked updates are read into: where they are hashed in turn, one while the next is read."""
        self.reader: TensorReader | None = None
        """Reads the tensor that is under way."""
        self.blocks: dict[tuple[str, str], Array] = {}
        self._steps: dict[str, Steps] = {}

    def steps(self, updates: int, dtype: str) -> Steps:
        if dtype not in self._steps:
            self._steps[dtype] = Steps(updates, PIECE, dtype)
        return self._steps[dtype]

    def block(self, key: str, dtype: str) -> Array:
        if (key, dtype) not in self.blocks:
            self.blocks[key, dtype] = np.empty(PIECE, dtype)
        return self.blocks[key, dtype]


def run(work: Work, *, threads: int) -> Passed:
    """Do one pass. Raises `NotFinite` when the result does not fit."""
    share_one_arena()
    spans = spans_of(dict(work.base))
    sources, elements = work.sources, elements_read(work)
    sums = Sums(len(work.updates), by_tensor=work.by_tensor, apart=threads > 1)
    with Files(work.hashed) as files:
        for entries in (*sources, *work.masked):
            files.open(list(entries.values()))

        def worker() -> Callable[[_Cut], PartSums]:
            buffers = _Buffers(len(sources), elements, masked=work.unmasking is not None)

            def one(cut: _Cut) -> PartSums:
                if cut.begins and cut.number + 1 < len(spans):
                    ahead = spans[cut.number + 1]
                    for source in (work.base, *work.updates):
                        files.will_need(source[ahead.name], ahead.start, ahead.count)
                with np.errstate(all="ignore"):
                    result = sums.part(cut.name, cut.count, begins_span=cut.begins)
                    _part(work, cut, files, buffers, result)
                return result

            return one

        Turns(_cuts(spans, elements), sums.take, ahead=threads + 1).run(threads, worker)
    return sums.passed()


@dataclass(frozen=True)
class _Cut:
    """What is read at a time: a part of a span."""

    number: int
    """Place of its span among all spans."""
    name: str
    begin: int
    """First element, within the tensor."""
    count: int
    begins: bool
    """Whether it is the first part of its span."""


def _cuts(spans: Sequence[Span], elements: int) -> Iterator[_Cut]:
    for number, span in enumerate(spans):
        end = span.start + span.count
        for begin in range(span.start, end, elements):
            yield _Cut(number, span.name, begin, min(elements, end - begin), begin == span.start)


@dataclass
class _Part:
    """One part of a span, as read, and what its pieces are computed with."""

    work: Work
    name: str
    begin: int
    """First element, within the tensor."""
    dtype: str
    """Dtype that the piece is computed in."""
    dtypes: list[str]
    """As stored, of the base and the updates."""
    sources: list[Array]
    reader: TensorReader
    """Knows where the elements of every source lie."""
    master: Array | None
    slots: list[Array | None]
    buffers: _Buffers
    coefficients: Sequence[float] | None
    """Of the weighted sum; None: the steps are combined value by value, or not at all."""
    added: bool
    """The weighted sum is added to the base in one go."""
    masked: Array | None = None
    """The sum of masked updates, without their masks."""

    def take(self, piece: slice, **wanted: Any) -> tuple[Array, Array | None, Array]:
        """(base, steps, weighted sum) of a piece (`Steps.take`)."""
        steps = self.buffers.steps(len(self.work.updates), self.dtype)
        places, scales = self.reader.addresses(piece.start, len(self.sources))
        given = [source[piece] for source in self.sources]
        return steps.take(given, self.dtypes, places=places, scales=scales, **wanted)


def _part(work: Work, cut: _Cut, files: Files, buffers: _Buffers, result: PartSums) -> None:
    """Read one part of a span, and work on it in pieces."""
    part = _read(work, cut, files, buffers, result)
    if work.values is not None:
        work.values.take(cut.name, cut.begin, part.sources[1:], part.dtypes[1:])
    outputs = _Outputs(work, cut, buffers)
    for piece in pieces(cut.count):
        step = _combined(part, piece, result)
        if work.model is not None:
            _move(part, piece, step, outputs, result)
    outputs.flush()
    result.bytes_written += outputs.bytes_written
    files.settle()


def _read(work: Work, cut: _Cut, files: Files, buffers: _Buffers, result: PartSums) -> _Part:
    """Read the elements of one cut from every source."""
    name, begin, count, updates = cut.name, cut.begin, cut.count, len(work.plain)
    if buffers.reader is None or buffers.reader.name != name:
        as_stored = work.as_stored(name)
        buffers.reader = TensorReader(name, work.sources, files, buffers.raw, as_stored=as_stored)
    arrays, reader = buffers.reader.read(begin, count), buffers.reader
    result.bytes_read += reader.bytes_of(count)
    coefficients = work.coefficients(name) if work.coefficients is not None else None
    masked = _sum_of_masked(work, cut, files, buffers) if work.masked else None
    if masked is not None:
        result.bytes_read += masked.nbytes * len(work.masked)
    master = arrays[1 + updates]
    return _Part(
        work=work,
        name=name,
        begin=begin,
        dtype=work.arithmetic(name),
        dtypes=reader.dtypes[: 1 + updates],
        sources=[array for array in arrays[: 1 + updates] if array is not None],
        reader=reader,
        master=master,
        slots=arrays[2 + updates :],
        buffers=buffers,
        coefficients=coefficients,
        added=work.model is not None and coefficients is not None and work.step is None and master is None,
        masked=masked,
    )


def _sum_of_masked(work: Work, cut: _Cut, files: Files, buffers: _Buffers) -> Array:
    """The masked updates' sum without their masks, whole numbers modulo a power of two: one update after the other."""
    assert work.unmasking is not None
    total: Array | None = None
    for number, update in enumerate(work.masked):
        buffer = buffers.masked[number % 2 if files.hashes else 0]
        if number and number % 2 == 0:
            files.settle()  # what lies in both is hashed
        found = files.read(update[cut.name], cut.begin, cut.count, buffer)
        if total is None:
            total = buffers.block("masked", found.dtype.str)[: cut.count]
            np.copyto(total, found)
        else:
            np.add(total, found, out=total)
    assert total is not None
    work.unmasking.unmask(cut.name, cut.begin, total)
    return total


class _Step(NamedTuple):
    """What the updates make of one piece."""

    base: Array
    combined: Array
    """The combined step from the base."""
    counted: bool
    """Whether the piece counts for the statistics."""


def _combined(part: _Part, piece: slice, result: PartSums) -> _Step:
    """Combine the updates' steps of one piece; adds to the statistics."""
    work, number = part.work, (part.begin + piece.start) // PIECE
    if work.unmasking is not None:
        return _Step(*_unmasked(part, piece, work.unmasking), counted=False)
    counted = work.statistics == "exact" or (work.statistics == "sample" and number % SAMPLE == 0)
    combine = work.combine if part.coefficients is None else None
    base, steps, combined = part.take(
        piece,
        gram=result.gram(len(work.updates), piece.stop - piece.start) if counted and work.products else None,
        coefficients=part.coefficients,
        rows=work.observe is not None or combine is not None or work.momentum or work.walk is not None,
        add=part.added,
    )
    if counted:
        result.counted += piece.stop - piece.start
    elif combine is not None:  # a sum carries NaN to the result, a median may hide it
        _refuse_not_finite(part.name, part.dtypes[0], steps)
    if work.observe:
        assert steps is not None
        work.observe(steps)
    if work.walk is not None and steps is not None:
        work.walk.take(part.name, part.begin + piece.start, steps)
    if work.momentum and steps is not None:
        steps = _with_momentum(part, piece, steps)
        if work.model is None:
            pairs = np.zeros((len(steps), len(steps)))
            add_products(pairs, steps)
            result.along_momentum.append(pairs[-1])
    if work.model is not None and part.coefficients is None:
        if combine is None:
            raise InputError(f"the rule has neither coefficients nor a function for tensor {part.name!r}, expected one")
        assert steps is not None
        combined = combine(steps, part.name, part.begin + piece.start)
    return _Step(base, combined, counted)


def _with_momentum(part: _Part, piece: slice, steps: Array) -> Array:
    """The steps and, as one row more, the momentum at the same place."""
    stored = part.slots[0]
    row = np.full(steps.shape[1], part.work.slot_starts[0]) if stored is None else stored[piece]
    return np.concatenate([steps, row[None].astype(steps.dtype)])


def _unmasked(part: _Part, piece: slice, unmasking: Unmasking) -> tuple[Array, Array]:
    """(base, step of the round) of masked updates."""
    n = piece.stop - piece.start
    base, step = part.buffers.block("base", part.dtype)[:n], part.buffers.block("unmasked", part.dtype)[:n]
    widen(part.sources[0][piece], part.dtypes[0], base)
    assert part.masked is not None
    unmasking.decode(part.name, part.masked[piece], step)
    return base, step


def _move(part: _Part, piece: slice, step: _Step, outputs: _Outputs, result: PartSums) -> None:
    """Move the master by the combined step, and round the result into the outputs."""
    base, combined, counted = step
    work, buffers, n = part.work, part.buffers, piece.stop - piece.start
    master = base if part.master is None else _stored(part.master[piece], buffers.block("master", part.dtype)[:n])
    slots: list[Array] = []
    for number, (stored, start) in enumerate(zip(part.slots, work.slot_starts, strict=True)):
        slot = buffers.block(f"slot{number}", part.dtype)[:n]
        if stored is None:
            slot[:] = start
        slots.append(slot if stored is None else _stored(stored[piece], slot))
    bits = buffers.block("bits", "uint32")[:n]
    if work.step is None or is_running_statistic(part.name):
        if counted and work.step is not None:
            result.step_squared.append(_squared(combined))
        put = outputs.put(piece, master if part.added else np.add(master, combined, out=base), slots, bits)
    else:
        moved = buffers.block("scratch", part.dtype)[:n] if master is base else base
        put = True
        for some in pieces(n, STRIDE):  # what the step allocates is small
            after, new_slots = work.step(master[some], combined[some], [slot[some] for slot in slots])
            np.subtract(after, master[some], out=moved[some])
            put = put and outputs.put(_within(piece, some), after, new_slots, bits[some])
        if counted:
            result.step_squared.append(_squared(moved))
    if not put:
        _blame(part, piece, outputs.dtype)


def _within(piece: slice, some: slice) -> slice:
    return slice(piece.start + some.start, piece.start + some.stop)


def _stored(values: Array, block: Array) -> Array:
    """Values of the state in the dtype of the arithmetic, to be read only: they may still be hashed."""
    if values.dtype != block.dtype:
        np.copyto(block, values, casting="same_kind")
        return block
    values.flags.writeable = False
    return values


def _squared(moved: Array) -> float:
    """Squared L2 norm of a change."""
    square = np.zeros((1, 1))
    add_products(square, moved[None])
    return float(square[0, 0])


def _blame(part: _Part, piece: slice, dtype: str) -> None:
    """Raise `NotFinite`, naming the update whose own values do not fit, if one's do not."""
    if part.work.unmasking is not None:
        raise NotFinite(part.name, dtype, None)
    base, steps, _ = part.take(piece, gram=None, coefficients=None, rows=True)
    _refuse_not_finite(part.name, dtype, steps)
    assert steps is not None
    for number, row in enumerate(steps):
        values, bits = base + row, np.empty(len(row), np.uint32)
        if not narrow(values, dtype, np.empty(len(row), STORAGE[dtype]), bits):
            raise NotFinite(part.name, dtype, number)
    largest, most = np.abs(steps).max(axis=1), float("inf")
    if len(steps) > 1:  # of one alone the error says that the server's learning rate may be too large
        most = FAR * float(np.finfo(np.float16 if dtype == "F16" else np.float32).max)
    if part.slots:  # a finite step whose square, which an optimizer keeps, may not be finite
        most = min(most, float(np.sqrt(np.finfo(steps.dtype).max)))
    raise NotFinite(part.name, dtype, int(largest.argmax()) if largest.max() > most else None)


def _refuse_not_finite(name: str, dtype: str, steps: Array | None) -> None:
    assert steps is not None
    for number, row in enumerate(steps):
        if not np.isfinite(row).all():
            raise NotFinite(name, dtype, number)


class _Outputs:
    """What one part of a span writes: the model in its dtype, the master and the slots in float32 or float64."""

    def __init__(self, work: Work, cut: _Cut, buffers: _Buffers) -> None:
        self._cut, self._model, self.bytes_written = cut, work.model, 0
        self._states = (*([work.new_master] if work.new_master else []), *work.new_slots)
        if work.model is not None:
            self.dtype = work.model.places[cut.name][2].dtype
            self._block = buffers.output.view(STORAGE[self.dtype])[: cut.count]

    def put(self, piece: slice, master: Array, slots: Sequence[Array], scratch: Array) -> bool:
        """Round the model into its block and write the state; False when a value of either is not finite."""
        finite = narrow(master, self.dtype, self._block[piece], scratch)
        if not finite or not all(np.isfinite(values).all() for values in slots):
            return False
        for writer, values in zip(self._states, (master, *slots), strict=False):
            dtype = writer.places[self._cut.name][2].dtype
            self._write(writer, piece.start, values.astype(STORAGE[dtype], order="C", casting="same_kind", copy=False))
        return True

    def flush(self) -> None:
        """Write the model."""
        if self._model is not None:
            self._write(self._model, 0, self._block)

    def _write(self, writer: TensorWriter, start: int, values: Array) -> None:
        """`values`: of the cut from its element `start` on, in the dtype of the file."""
        writer.write(self._cut.name, (self._cut.begin + start) * values.itemsize, values.data.cast("B"))
        self.bytes_written += values.nbytes
