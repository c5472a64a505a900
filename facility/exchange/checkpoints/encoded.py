"""The tensors of a message of `facility.exchange.checkpoints.delta`, read part by part as if it had been decoded.

An `EncodedTensor` stands for what a tensor of the reference becomes: its values are the reference's plus the difference
that the message holds, in the dtype that a decoded directory has (`kinds_of`). A reader gives the reference's elements
and gets them back with the difference added (`add_difference`), block by block and in any order, so that no decoded
file has to be written. The bits are those of `decode_update` (`delta_decoding.py`), which uses the same functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import (
    FLOATS,
    ITEM_BYTES,
    Checkpoint,
    Opened,
    TensorEntry,
    open_checkpoint,
    read_header,
)
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.delta_parts import FILE, READ, as_bytes
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.delta_codecs import CODECS, Codec, load_codec
from facility.exchange.errors import CheckpointError
from facility.exchange.messages.manifest import Manifest

INTEGERS = {"I8": "i1", "U8": "u1", "U16": "<u2", "I32": "<i4"}
"""numpy dtypes of the whole numbers that codecs store."""
NOWHERE = 1 << 62
"""Where an encoded tensor's elements lie in a file: past its end, so that reading them as they are stored fails."""

Read = Callable[[TensorEntry, int, memoryview], None]
"""(stored tensor, first byte within it, buffer to fill)."""


class Begins:
    """Where each part of a tensor begins in the field of a codec that selects: known from the parts before it."""

    def __init__(self) -> None:
        self._known = [0]
        self._changed = threading.Condition()

    def of(self, part: int, bytes_of: Callable[[int], int]) -> int:
        """The first byte of `part`; `bytes_of`: of a part, asked for those that nobody has read yet."""
        with self._changed:
            while len(self._known) <= part:
                self._known.append(self._known[-1] + bytes_of(len(self._known) - 1))
            return self._known[part]

    def learn(self, part: int, end: int) -> None:
        with self._changed:
            if len(self._known) == part + 1:
                self._known.append(end)
                self._changed.notify_all()

    def wait(self, part: int, seconds: float) -> None:
        """Let other threads, which have the parts before under way, know where `part` begins."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._known) > part, seconds)


@dataclass(frozen=True, kw_only=True)
class EncodedTensor(TensorEntry):
    """A tensor of a message; `dtype`, `shape` and `size` are of what it decodes to, `file` is the message."""

    reference: TensorEntry
    codec: Codec
    fields: Mapping[str, TensorEntry]
    """As stored, by suffix; none: it equals the reference."""
    begins: Begins = field(default_factory=Begins)


def stored_of(entry: TensorEntry) -> Sequence[TensorEntry]:
    """The tensors in a file that are read for `entry`."""
    return tuple(entry.fields.values()) if isinstance(entry, EncodedTensor) else (entry,)


def open_message(message: Path, manifest: Manifest, reference: Path, base: Manifest) -> Checkpoint:
    """The tensors of a message; reads headers only. `base`: the manifest of the directory `reference`.

    Raises `CheckpointError` where its header is malformed, or where it is a difference to another model.
    """
    check_reference(message, manifest, reference, base)
    codec, old = load_codec(manifest.encoding), open_checkpoint(reference)
    if codec.of_bits and manifest.kind == "update":
        raise CheckpointError(f"{message} is an update in encoding {manifest.encoding!r}, which is for models alone")
    stored, _ = read_header(Path(message) / FILE)
    check_layout(stored, codec, old, message)
    kinds = kinds_of(old, update=manifest.kind == "update")
    tensors: dict[str, TensorEntry] = {}
    for name, entry in old.tensors.items():
        if entry.dtype not in FLOATS:
            raw = stored.get(f"{name}::raw")
            tensors[name] = entry if raw is None else _named(raw, name)
            continue
        fields = {suffix: stored.get(f"{name}::{suffix}") for suffix, _, _ in codec.fields(0, 0)}
        tensors[name] = EncodedTensor(
            name=name,
            file=Path(message) / FILE,
            dtype=kinds[name],
            shape=entry.shape,
            start=NOWHERE,
            size=entry.elements * ITEM_BYTES[kinds[name]],
            reference=entry,
            codec=codec,
            fields={suffix: found for suffix, found in fields.items() if found is not None},
        )
    return Checkpoint(directory=Path(message), tensors=tensors, metadata=old.metadata)


def kinds_of(reference: Checkpoint, *, update: bool) -> dict[str, str]:
    """The dtypes of a decoded directory: a model has the reference's, an update float32 in place of half precision."""
    return {
        name: ("F32" if update and entry.dtype in ("F16", "BF16") else entry.dtype)
        for name, entry in reference.tensors.items()
    }


def check_reference(message: Path, manifest: Manifest, reference: Path, base: Manifest) -> None:
    """Raise `CheckpointError` unless `message` is in a known encoding, and a difference to the model `reference`."""
    if manifest.encoding not in CODECS.names():
        raise CheckpointError(
            f"{message} has encoding {manifest.encoding!r}, this version decodes {', '.join(CODECS.names())}: "
            "send it in full"
        )
    expected = manifest.extra.get("reference_sha256")
    if expected != base.content_sha256:
        raise CheckpointError(
            f"{message} is a difference to the model with sha256 {str(expected):.12}, but {reference} is "
            f"{base.content_sha256:.12}: the two sides hold different models; send it in full (encoding: full)"
        )


def check_layout(stored: dict[str, TensorEntry], codec: Codec, old: Checkpoint, message: Path) -> None:
    """Every stored tensor must be one that the codec writes for a tensor of the reference, in the right size."""
    left = set(stored)
    for name, entry in old.tensors.items():
        if entry.dtype not in FLOATS:
            expected = {"raw": (entry.dtype, entry.shape)}
        else:
            selected = stored.get(f"{name}::{codec.selection.field}") if codec.selection is not None else None
            length_of_it = selected.elements if selected is not None else 0
            fields = codec.fields(entry.elements, length_of_it)
            expected = {suffix: (dtype, (length,)) for suffix, dtype, length in fields}
        present = [suffix for suffix in expected if f"{name}::{suffix}" in stored]
        if present and len(present) < len(expected):
            raise CheckpointError(f"{message}: tensor {name!r} has {present}, expected {list(expected)}")
        for suffix in present:
            found = stored[f"{name}::{suffix}"]
            if (found.dtype, found.shape) != expected[suffix]:
                raise CheckpointError(
                    f"{message}: {found.name!r} is {found.dtype} {list(found.shape)}, expected "
                    f"{expected[suffix][0]} {list(expected[suffix][1])}"
                )
            left.discard(found.name)
    if left:
        raise CheckpointError(f"{message}: {sorted(left)[:3]} belong to no tensor of the reference")


def add_difference(entry: EncodedTensor, start: int, values: Array, read: Read) -> None:
    """Add the difference of the elements from `start` on to `values`, which hold the reference's in float32 or float64.

    `start`: a multiple of PART. Raises `CheckpointError` for what no encoder writes.
    """
    if not entry.fields or not len(values):
        return
    stops = [min(at + PART, len(values)) for at in range(0, len(values), PART)]
    counts = [stop - at * PART for at, stop in enumerate(stops)]
    fixed = [entry.codec.fields(count, 0) for count in counts]
    selection, whole = entry.codec.selection, entry.codec.fields(PART, 0)
    arrays: dict[str, list[Array]] = {}
    for place, (suffix, _, _) in enumerate(fixed[0]):
        if selection is None or suffix != selection.field:
            lengths = [fields[place][2] for fields in fixed]
            first = start // PART * whole[place][2]
            arrays[suffix] = _cut(_take(entry.fields[suffix], first, sum(lengths), read), lengths)
    for number, count in enumerate(counts):
        stored = {suffix: parts[number] for suffix, parts in arrays.items()}
        try:
            if selection is not None:
                stored[selection.field] = _selected(entry, start // PART + number, stored, count, read)
            part = values[number * PART : number * PART + count]
            decoded = entry.codec.decode(stored, count)
            if entry.codec.of_bits:
                _add_bits(part, entry.reference.dtype, decoded)
            else:
                np.add(part, decoded, out=part)
        except ValueError as error:
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r} is malformed: {error}") from None


def _add_bits(values: Array, dtype: str, step: Array) -> None:
    """Add `step` to the whole numbers that hold the values as they are stored in `dtype`, which has them exactly.

    Raises `ValueError` where a step has more bits than the dtype, or a value becomes NaN or infinity.
    """
    stored = np.empty(len(values), STORAGE[dtype])
    narrow(values, dtype, stored, np.empty(len(values), np.uint32))
    bits = stored.view(f"<i{stored.itemsize}")
    own = step.astype(bits.dtype)
    if not np.array_equal(own, step):
        raise ValueError(f"a difference has more bits than {dtype}")
    np.add(bits, own, out=bits)
    widen(stored, dtype, values)
    if not np.isfinite(values).all():
        raise ValueError("a value is NaN or infinity")


def values_of(entry: TensorEntry, read: Read, width: int = READ) -> Iterator[Array]:
    """The elements of a floating-point tensor as stored in its dtype, decoded where it is encoded, `width` at a time.

    `width`: a multiple of PART. Raises `CheckpointError`.
    """
    for start in range(0, entry.elements, width):
        values = np.empty(min(width, entry.elements - start), STORAGE[entry.dtype])
        if isinstance(entry, EncodedTensor):
            old = np.empty(len(values), STORAGE[entry.reference.dtype])
            read(entry.reference, start * old.itemsize, as_bytes(old))
            widen(old, entry.reference.dtype, values)
            add_difference(entry, start, values, read)
        else:
            read(entry, start * values.itemsize, as_bytes(values))
        yield values


def _named(entry: TensorEntry, name: str) -> TensorEntry:
    return TensorEntry(
        name=name, file=entry.file, dtype=entry.dtype, shape=entry.shape, start=entry.start, size=entry.size
    )


def _take(found: TensorEntry, first: int, length: int, read: Read) -> Array:
    """Elements of a stored field."""
    array = np.empty(length, INTEGERS.get(found.dtype) or STORAGE[found.dtype])
    if first * array.itemsize + array.nbytes > found.size:
        raise CheckpointError(f"{found.file}: {found.name!r} is too short")
    if length:
        read(found, first * array.itemsize, as_bytes(array))
    return array


def _cut(array: Array, lengths: Sequence[int]) -> list[Array]:
    ends = np.cumsum(lengths)
    return [array[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _selected(entry: EncodedTensor, part: int, stored: dict[str, Array], count: int, read: Read) -> Array:
    """What a part's field of selected values holds, whose length follows from the part's other fields."""
    selection = entry.codec.selection
    assert selection is not None
    found, length = entry.fields[selection.field], selection.stored_length(stored, count)
    first = begin_of(entry, part)
    end = first + length
    entry.begins.learn(part, end)
    check_selected(entry, part * PART + count, end)
    return _take(found, first, length, read)


def begin_of(entry: EncodedTensor, part: int) -> int:
    """Where a part begins in the field of selected values."""
    return entry.begins.of(part, lambda earlier: _selected_length(entry, earlier))


def check_selected(entry: EncodedTensor, values: int, end: int) -> None:
    """Raise `CheckpointError` unless the field of selected values ends at `end` where the tensor ends with so many
    values, and no earlier."""
    assert entry.codec.selection is not None
    found, whole = entry.fields[entry.codec.selection.field], values == entry.elements
    if end > found.elements or (whole and end != found.elements):
        raise CheckpointError(f"{entry.file}: {found.name!r} is too {'long' if end < found.elements else 'short'}")


def _selected_length(entry: EncodedTensor, part: int) -> int:
    """Length of a part before the one that is asked for: its other fields are read for this alone."""
    selection, stored = entry.codec.selection, {}
    assert selection is not None
    count = min(PART, entry.elements - part * PART)
    whole, own = entry.codec.fields(PART, 0), entry.codec.fields(count, 0)
    with Opened() as read:
        for (suffix, _, step), (_, _, length) in zip(whole, own, strict=True):
            if suffix != selection.field:
                stored[suffix] = _take(entry.fields[suffix], part * step, length, read)
    return selection.stored_length(stored, count)
