"""The streaming kernel: one pass over the tensors of all updates, in memory that grows with neither model nor updates.

For every piece of every federated tensor, with b the half-precision base that was sent, m the float32 master
(b itself in the first round) and u_k the updates in the order of their facilities' names:

    d_k = u_k - b          each update's step
    c   = combine(d)       one step for the round (a weighted sum, or a function of all d_k value by value)
    m'  = outer(m, c)      server optimiser
    out = round(m')        once, to the tensor's own dtype

Elementwise IEEE operations in a fixed order: the bits of the result depend on neither arrival, threads, read size nor
sharding. What half precision cannot carry stays in m and is sent when it has grown.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordinator.aggregation.steps import Steps, add_products
from coordinator.aggregation.streams import PIECE, Files, Span, pieces, spans_of
from coordinator.aggregation.unmasking import Unmasking
from coordinator.aggregation.work import Malformed, NotFinite, Passed, Work
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry
from facility.exchange.checkpoints.encoded import EncodedTensor
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.checkpoints.running_statistics import is_running_statistic
from facility.exchange.checkpoints.writer import TensorWriter
from facility.exchange.errors import CheckpointError

READ = 4 * PIECE
"""Elements read at a time from each source: few enough that they are still in the cache when they are worked on."""
READ_BYTES = 8 << 20
"""Buffer bytes of one thread for what it reads, whatever the number of updates (a piece of each at least)."""
SAMPLE = 16
"""With sampled statistics, every N-th piece of each tensor counts, from its first on."""


class _Buffers:
    """One thread's memory."""

    def __init__(self, sources: int) -> None:
        self.elements = max(PIECE, min(READ, READ_BYTES // (4 * max(1, sources)) // PIECE * PIECE))
        """Elements read at a time from each source."""
        self.raw = [np.empty(self.elements * 8, np.uint8).data for _ in range(sources)]
        """Of the widest dtype: what a narrower one does not touch takes no memory."""
        self.blocks: dict[tuple[str, str], Array] = {}
        self.outputs: dict[int, Array] = {}
        self._steps: dict[str, Steps] = {}

    def steps(self, updates: int, dtype: str) -> Steps:
        if dtype not in self._steps:
            self._steps[dtype] = Steps(updates, PIECE, dtype)
        return self._steps[dtype]

    def block(self, key: str, dtype: str) -> Array:
        if (key, dtype) not in self.blocks:
            self.blocks[key, dtype] = np.empty(PIECE, dtype)
        return self.blocks[key, dtype]

    def output(self, number: int, count: int, dtype: str) -> Array:
        if number not in self.outputs:
            self.outputs[number] = np.empty(self.elements * 8, np.uint8)
        return self.outputs[number].view(STORAGE[dtype])[:count]


def run(work: Work, *, threads: int) -> Passed:
    """Do one pass. Raises `NotFinite` when the result does not fit."""
    jobs = spans_of(dict(work.base))
    local = threading.local()
    reads = 1 + len(work.updates) + 1 + len(work.slots)
    with Files(work.hashed) as files:
        for entries in (work.base, work.master, *work.updates, *work.slots):
            files.open(list(entries.values()))

        def one(index: int) -> Passed:
            if not hasattr(local, "buffers"):
                local.buffers = _Buffers(reads)
            if index + threads < len(jobs):
                ahead = jobs[index + threads]
                for source in (work.base, *work.updates):
                    files.will_need(source[ahead.name], ahead.start, ahead.count)
            with np.errstate(all="ignore"):
                return _span(work, jobs[index], files, local.buffers)

        if threads == 1:
            results = [one(index) for index in range(len(jobs))]
        else:
            with ThreadPoolExecutor(threads) as pool:
                results = list(pool.map(one, range(len(jobs))))
    total = Passed(gram=np.zeros((len(work.updates), len(work.updates))))
    for job, result in zip(jobs, results, strict=True):  # in the jobs' order: floating-point sums depend on it
        total.gram += result.gram
        if work.by_tensor:
            total.by_tensor[job.name] = total.by_tensor.get(job.name, 0.0) + result.gram
        for name, products in result.along_momentum.items():
            total.along_momentum[name] = total.along_momentum.get(name, 0.0) + products
        total.step_squared += result.step_squared
        total.elements += result.elements
        total.counted += result.counted
        total.bytes_read += result.bytes_read
        total.bytes_written += result.bytes_written
    return total


@dataclass
class _Part:
    """One part of a span, as read: what its pieces are worked on with."""

    work: Work
    name: str
    begin: int
    """First element, within the tensor."""
    dtype: str
    """Of the arithmetic."""
    dtypes: list[str]
    """As stored, of the base and the updates."""
    sources: list[Array]
    master: Array | None
    slots: list[Array | None]
    buffers: _Buffers
    added: bool
    """The weighted sum is added to the base in one go."""

    def take(self, piece: slice, **wanted: Any) -> tuple[Array, Array | None, Array]:
        """(base, steps, weighted sum) of a piece (`Steps.take`)."""
        steps = self.buffers.steps(len(self.work.updates), self.dtype)
        return steps.take([source[piece] for source in self.sources], self.dtypes, **wanted)


def _span(work: Work, span: Span, files: Files, buffers: _Buffers) -> Passed:
    """One span, read in parts of the buffers' size, worked on in pieces."""
    result = Passed(gram=np.zeros((len(work.updates), len(work.updates))), elements=span.count)
    for begin in range(span.start, span.start + span.count, buffers.elements):
        count = min(buffers.elements, span.start + span.count - begin)
        part = _read(work, span.name, begin, count, files, buffers, result)
        if work.values is not None:
            work.values.take(span.name, begin, part.sources[1:], part.dtypes[1:])
        outputs = _Outputs(work, span.name, begin, count, buffers)
        for piece in pieces(count):
            step = _combined(part, piece, result)
            if work.model is not None:
                _move(part, piece, *step, outputs, result)
        result.bytes_written += outputs.flush()
        files.settle()
    return result


def _read(work: Work, name: str, begin: int, count: int, files: Files, buffers: _Buffers, result: Passed) -> _Part:
    """The same elements of every source."""
    base, updates = work.base[name], len(work.updates)
    entries = [source.get(name) for source in (work.base, *work.updates, work.master, *work.slots)]
    arrays: list[Array | None] = []
    for number, (entry, buffer) in enumerate(zip(entries, buffers.raw, strict=True)):
        if isinstance(entry, EncodedTensor):
            arrays.append(_decoded(entry, begin, number - 1, arrays[0], files, buffer))
        else:
            arrays.append(None if entry is None else files.read(entry, begin, count, buffer))
    result.bytes_read += sum(_bytes_of(entry, count) for entry in entries if entry is not None)
    master = arrays[1 + updates]
    return _Part(
        work=work,
        name=name,
        begin=begin,
        dtype="float64" if work.float64 or base.dtype == "F64" else "float32",
        dtypes=[base.dtype, *(update[name].dtype for update in work.updates)],
        sources=[array for array in arrays[: 1 + updates] if array is not None],
        master=master,
        slots=arrays[2 + updates :],
        buffers=buffers,
        added=work.model is not None and work.coefficients is not None and work.step is None and master is None,
    )


def _decoded(
    entry: EncodedTensor, begin: int, update: int, base: Array | None, files: Files, buffer: memoryview
) -> Array:
    """Elements of an update that travelled as a difference to the base. Raises `Malformed`."""
    assert base is not None
    try:
        return files.decode(entry, begin, base, buffer)
    except CheckpointError as error:
        raise Malformed(update, str(error)) from None


def _bytes_of(entry: TensorEntry, count: int) -> int:
    """Bytes in a file of `count` elements of a tensor; of an encoded one on average."""
    if isinstance(entry, EncodedTensor):
        return sum(one.size for one in entry.fields.values()) * count // max(1, entry.elements)
    return count * ITEM_BYTES[entry.dtype]


def _combined(part: _Part, piece: slice, result: Passed) -> tuple[Array, Array, bool]:
    """(base, combined step, whether the piece counts for the statistics); adds to the statistics."""
    work, number = part.work, (part.begin + piece.start) // PIECE
    if work.unmasking is not None:
        return *_unmasked(part, piece, work.unmasking), False
    counted = work.statistics == "exact" or (work.statistics == "sample" and number % SAMPLE == 0)
    base, steps, combined = part.take(
        piece,
        gram=result.gram if counted and work.products else None,
        coefficients=work.coefficients,
        rows=work.observe is not None or work.combine is not None or work.momentum or work.walk is not None,
        add=part.added,
    )
    if counted:
        result.counted += piece.stop - piece.start
    elif work.combine is not None:  # a sum carries NaN to the result, a median may hide it
        _refuse_not_finite(part.name, part.dtypes[0], steps)
    if work.observe:
        assert steps is not None
        work.observe(steps)
    if work.walk is not None and steps is not None:
        work.walk.take(part.name, part.begin + piece.start, steps)
    if work.momentum and steps is not None:
        steps = _with_momentum(part, piece, steps)
        if work.model is None:
            total = result.along_momentum.setdefault(part.name, np.zeros(len(steps)))
            pairs = np.zeros((len(steps), len(steps)))
            add_products(pairs, steps)
            total += pairs[-1]
    if work.model is not None and work.combine is not None:
        assert steps is not None
        combined = work.combine(steps, part.name, part.begin + piece.start)
    return base, combined, counted


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
    unmasking.combine(part.name, part.begin + piece.start, [source[piece] for source in part.sources[1:]], step)
    return base, step


def _move(
    part: _Part, piece: slice, base: Array, combined: Array, counted: bool, outputs: _Outputs, result: Passed
) -> None:
    """Move the master by the combined step, and round the result into the outputs."""
    work, buffers, n = part.work, part.buffers, piece.stop - piece.start
    master = base
    if part.master is not None:
        master = buffers.block("master", part.dtype)[:n]
        np.copyto(master, part.master[piece], casting="same_kind")
    slots: list[Array] = []
    for number, (stored, start) in enumerate(zip(part.slots, work.slot_starts, strict=True)):
        slot = buffers.block(f"slot{number}", part.dtype)[:n]
        slot[:] = start if stored is None else stored[piece]
        slots.append(slot)
    if work.step is not None and not is_running_statistic(part.name):
        before = master
        master, slots = work.step(before, combined, slots)
        if counted:
            result.step_squared += _squared(master, before, buffers.block("scratch", part.dtype)[:n])
    elif not part.added:
        np.add(master, combined, out=master)
    if not outputs.put(piece, master, slots, buffers.block("bits", "uint32")[:n]):
        _blame(part, piece, outputs.sinks[0][1])


def _squared(after: Array, before: Array, scratch: Array) -> float:
    """Squared L2 norm of a change."""
    np.subtract(after, before, out=scratch)
    square = np.zeros((1, 1))
    add_products(square, scratch[None])
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
    raise NotFinite(part.name, dtype, None)


def _refuse_not_finite(name: str, dtype: str, steps: Array | None) -> None:
    assert steps is not None
    for number, row in enumerate(steps):
        if not np.isfinite(row).all():
            raise NotFinite(name, dtype, number)


class _Outputs:
    """What one part of a span writes: the model in its dtype, the master and the slots in float32."""

    def __init__(self, work: Work, name: str, begin: int, count: int, buffers: _Buffers) -> None:
        self.name, self.begin = name, begin
        self.sinks: list[tuple[TensorWriter, str, Array]] = []
        if work.model is None:
            return
        writers = (work.model, *([work.new_master] if work.new_master else []), *work.new_slots)
        for number, writer in enumerate(writers):
            dtype = writer.places[name][2].dtype
            self.sinks.append((writer, dtype, buffers.output(number, count, dtype)))

    def put(self, piece: slice, master: Array, slots: Sequence[Array], scratch: Array) -> bool:
        """Round into the blocks; False when a value of the model is not finite."""
        values = [master, *([master] if len(self.sinks) > 1 else []), *slots]
        finite = [
            narrow(value, dtype, block[piece], scratch)
            for (_, dtype, block), value in zip(self.sinks, values[: len(self.sinks)], strict=True)
        ]
        return finite[0]

    def flush(self) -> int:
        written = 0
        for writer, dtype, block in self.sinks:
            writer.write(self.name, self.begin * ITEM_BYTES[dtype], block.data.cast("B"))
            written += block.nbytes
        return written
