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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from coordinator.aggregation.plan import Combine
from coordinator.aggregation.steps import Steps, add_products
from coordinator.aggregation.streams import PIECE, Files, Span, pieces, spans_of
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow
from facility.exchange.checkpoints.writer import TensorWriter
from facility.exchange.errors import InputError

READ = 4 * PIECE
"""Elements read at a time from each source: few enough that they are still in the cache when they are worked on."""
READ_BYTES = 24 << 20
"""Buffer bytes of one thread for what it reads, whatever the number of updates (a piece of each at least)."""
SAMPLE = 16
"""With sampled statistics, one piece in so many of each tensor counts, its first among them."""
Outer = Callable[[Array, Array, Sequence[Array]], tuple[Array, list[Array]]]
"""(master, step, slots) -> (next master, next slots)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One pass: what is read, what is computed, what is written."""

    base: Mapping[str, TensorEntry]
    """The federated floating-point tensors of the model that was sent."""
    updates: Sequence[Mapping[str, TensorEntry]]
    """By facility, in the fixed order."""
    coefficients: Sequence[float] | None = None
    """Linear combination; None: `combine` works value by value, or nothing is combined."""
    combine: Combine | None = None
    master: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Tensors absent here start from the base."""
    slots: Sequence[Mapping[str, TensorEntry]] = ()
    """The server optimiser's tensors of the round before, by slot; absent ones start from `slot_starts`."""
    slot_starts: Sequence[float] = ()
    outer: Outer | None = None
    """None: the step is added."""
    float64: bool = False
    statistics: str = "exact"
    """`exact`, `sample` or `off`: whether the inner products of the steps are summed."""
    observe: Callable[[Array], None] | None = None
    """Sees every (updates, n) block of steps, from any thread."""
    model: TensorWriter | None = None
    new_master: TensorWriter | None = None
    new_slots: Sequence[TensorWriter] = ()


@dataclass(kw_only=True)
class Passed:
    """What a pass found out."""

    gram: Array
    """Inner products of the updates' steps, (updates, updates), float64."""
    step_squared: float = 0.0
    """Squared L2 norm of the master's change."""
    elements: int = 0
    counted: int = 0
    """Elements behind `gram` and `step_squared`."""
    bytes_read: int = 0
    bytes_written: int = 0


class NotFinite(InputError):
    """A value of the next model is NaN or infinity, or does not fit its dtype; `update` says whose fault it is."""

    def __init__(self, name: str, dtype: str, update: int | None) -> None:
        self.name, self.dtype, self.update = name, dtype, update
        super().__init__(
            f"tensor {name!r} of the next model holds NaN or infinity, or does not fit {dtype}: "
            "an update diverged, or the server learning rate is too large"
        )


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
    with Files() as files:
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
    for result in results:  # in the jobs' order: floating-point sums depend on it
        total.gram += result.gram
        total.step_squared += result.step_squared
        total.elements += result.elements
        total.counted += result.counted
        total.bytes_read += result.bytes_read
        total.bytes_written += result.bytes_written
    return total


def _span(work: Work, span: Span, files: Files, buffers: _Buffers) -> Passed:
    """One span, read in parts of the buffers' size, worked on in pieces."""
    result = Passed(gram=np.zeros((len(work.updates), len(work.updates))), elements=span.count)
    base = work.base[span.name]
    dtype = "float64" if work.float64 or base.dtype == "F64" else "float32"
    dtypes = [base.dtype, *(update[span.name].dtype for update in work.updates)]
    for begin in range(span.start, span.start + span.count, buffers.elements):
        count = min(buffers.elements, span.start + span.count - begin)
        entries = [source.get(span.name) for source in (work.base, *work.updates, work.master, *work.slots)]
        arrays = [
            None if entry is None else files.read(entry, begin, count, buffer)
            for entry, buffer in zip(entries, buffers.raw, strict=True)
        ]
        result.bytes_read += sum(count * ITEM_BYTES[entry.dtype] for entry in entries if entry is not None)
        sources, (master_raw, *slot_raws) = arrays[: 1 + len(work.updates)], arrays[1 + len(work.updates) :]
        outputs = _Outputs(work, span.name, begin, count, buffers)
        added = work.model is not None and work.coefficients is not None and work.outer is None and master_raw is None
        for piece in pieces(count):
            n = piece.stop - piece.start
            number = (begin + piece.start) // PIECE
            counted = work.statistics == "exact" or (work.statistics == "sample" and number % SAMPLE == 0)
            stored = [source[piece] for source in sources if source is not None]
            take = partial(buffers.steps(len(work.updates), dtype).take, stored, dtypes)
            b, steps, c = take(
                gram=result.gram if counted else None,
                coefficients=work.coefficients,
                rows=work.observe is not None or work.combine is not None,
                add=added,
            )
            if counted:
                result.counted += n
            elif work.combine is not None:  # a sum carries NaN to the result, a median may hide it
                _refuse_not_finite(span.name, base.dtype, steps)
            if work.observe:
                assert steps is not None
                work.observe(steps)
            if work.model is None:
                continue
            if work.combine is not None:
                assert steps is not None
                c = work.combine(steps, span.name, begin + piece.start)
            scratch = buffers.block("scratch", dtype)[:n]
            m = b
            if master_raw is not None:
                m = buffers.block("master", dtype)[:n]
                np.copyto(m, master_raw[piece], casting="same_kind")
            slots: list[Array] = []
            for number, (stored_slot, start) in enumerate(zip(slot_raws, work.slot_starts, strict=True)):
                slot = buffers.block(f"slot{number}", dtype)[:n]
                slot[:] = start if stored_slot is None else stored_slot[piece]
                slots.append(slot)
            if work.outer is None and not added:
                np.add(m, c, out=m)
            elif work.outer is not None:
                old = m
                m, slots = work.outer(old, c, slots)
                if counted:
                    np.subtract(m, old, out=scratch)
                    square = np.zeros((1, 1))
                    add_products(square, scratch[None])
                    result.step_squared += float(square[0, 0])
            if not outputs.put(piece, m, slots, buffers.block("bits", "uint32")[:n]):
                _refuse_not_finite(span.name, outputs.sinks[0][1], take(gram=None, coefficients=None, rows=True)[1])
                raise NotFinite(span.name, outputs.sinks[0][1], None)
        result.bytes_written += outputs.flush()
    return result


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
