"""The choice of `near_duplicates` for corpora whose signatures do not fit in memory: made before the text is encoded.

A first reading appends every document's signature to a file, and for each of its bands (key of the band, document) to
one of `PARTS` files by the key. Each of these fits in memory and is sorted: documents of equal keys are candidates,
written one after the other as a run. Then documents are decided in order, as in memory: each is compared with the
earlier members of its runs that stay. What is not a candidate stays, without a look. Keys are hashes; a candidate
counts only where it shares a band in truth. (External sorting: D. Knuth, "The Art of Computer Programming", vol. 3,
section 5.4; partitions by hash: M. Kitsuregawa et al., 1983, "Application of hash to data base machine".)

Memory: one byte a document, and the largest part. Files have no name; whatever ends the process frees them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy
from numpy.typing import NDArray

from facility.dataset import DatasetError
from facility.preparing.near_duplicates import NUMBERS, Signature, bands_of, exact_digest, minhash_signature

PARTS = 256
"""Files by key and by document: of 10^8 documents at similarity 0.8 one holds 90 MB of keys."""
HELD = 4096
"""Signatures written at once."""
CHUNK = 1024
"""Members of a run that are looked at at once: the first that stays decides most."""
KEY = numpy.dtype([("key", "<u8"), ("document", "<u4")])
MEMBER = numpy.dtype([("document", "<u4"), ("start", "<u8"), ("place", "<u8")])
"""A document in a run: where the run begins in the file of members, and where the document is."""
NEW, HERE, ELSEWHERE = 0, 1, 2
EXACT_NUMBERS = 4
"""Of what stands for a signature where exact repetitions alone are left out: 16 bytes of a digest."""


class NearDuplicatesOnDisk:
    """`add` every document, `decide` once, then `earlier` in the same order. Documents: at most 2^32."""

    def __init__(
        self, similarity: float, scratch: Path | None, *, key: bytes = b"", elsewhere: Iterable[Signature] = ()
    ) -> None:
        """As `NearDuplicates`; `scratch`: where temporary files go."""
        self.similarity, self.key, self._scratch = similarity, key, scratch
        self.bands, self.rows = (1, EXACT_NUMBERS) if similarity == 1 else bands_of(similarity)
        self.numbers = EXACT_NUMBERS if similarity == 1 else NUMBERS
        self._signatures, self._parts = self._file(), [self._file() for _ in range(PARTS)]
        self._held: list[Signature] = []
        self.documents = self._asked = 0
        for one in elsewhere if similarity < 1 else ():
            self._append(one)
        self.elsewhere = self._asked = self.documents

    def _file(self) -> BinaryIO:
        return tempfile.TemporaryFile(dir=self._scratch)

    def close(self) -> None:
        """The temporary files are gone."""
        for file in (self._signatures, *self._parts):
            file.close()

    def add(self, text: str) -> None:
        """Take the next document."""
        if self.similarity == 1:
            self._append(numpy.frombuffer(exact_digest(text), dtype="<u4"))
        else:
            self._append(minhash_signature(text, self.key))

    def _append(self, own: Signature) -> None:
        self._held.append(own)
        self.documents += 1
        if len(self._held) == HELD:
            self._flush()

    def _flush(self) -> None:
        """Write the signatures that are held, and their keys to the parts."""
        if not self._held:
            return
        found = numpy.array(self._held, dtype="<u4")
        self._signatures.write(found.tobytes())
        keys = keys_of(found, self.bands, self.rows)
        entries = numpy.empty(keys.shape, dtype=KEY)
        entries["key"] = keys
        entries["document"] = numpy.arange(self.documents - len(found), self.documents)[:, None]
        scatter(entries.ravel(), (keys.ravel() >> numpy.uint64(56)).astype(numpy.int64), self._parts)
        self._held = []

    def decide(self) -> None:
        """Settle which documents stay."""
        self._flush()
        self._signatures.flush()
        self.decisions: NDArray[numpy.uint8] = numpy.zeros(self.documents, dtype=numpy.uint8)
        with self._file() as self._members:
            shared = self._write_runs()
            for part in shared:
                for document, spans in by_document(part):
                    if document >= self.elsewhere:
                        self.decisions[document] = self._decision(document, spans)

    def _write_runs(self) -> list[BinaryIO]:
        """Write the members of runs of two and more; each with its place to one of the files returned, by document."""
        shared, written = [self._file() for _ in range(PARTS)], 0
        each = -(-max(1, self.documents) // PARTS)
        for part in self._parts:
            documents, starts = runs_in(read_all(part, KEY))
            part.close()
            self._members.write(documents.astype("<u4").tobytes())
            entries = numpy.empty(len(documents), dtype=MEMBER)
            entries["document"], entries["start"] = documents, starts + written
            entries["place"] = numpy.arange(written, written + len(documents))
            entries = entries[entries["place"] > entries["start"]]  # the first of a run has none before it
            scatter(entries, (entries["document"] // each).astype(numpy.int64), shared)
            written += len(documents)
        self._members.flush()
        return shared

    def _decision(self, document: int, spans: Iterable[tuple[int, int]]) -> int:
        """What becomes of a document; `spans`: of the file of members, those before it in its runs."""
        own, found, seen = self._row(document), NEW, {document}
        for start, place in spans:
            for other in self._staying(start, place):
                if found == HERE and other >= self.elsewhere:
                    break
                if other in seen:
                    continue
                seen.add(other)
                if self._repeats(own, self._row(other)):
                    if other < self.elsewhere:
                        return ELSEWHERE
                    found = HERE
                    break
            if found == HERE and not self.elsewhere:
                return HERE
        return found

    def _staying(self, start: int, place: int) -> Iterator[int]:
        """Members of a run from `start` to before `place` that stay, in order."""
        for at in range(start, place, CHUNK):
            count = min(CHUNK, place - at)
            members = numpy.frombuffer(os.pread(self._members.fileno(), 4 * count, 4 * at), dtype="<u4")
            yield from members[self.decisions[members] == NEW].tolist()

    def _row(self, document: int) -> Signature:
        size = 4 * self.numbers
        return numpy.frombuffer(os.pread(self._signatures.fileno(), size, size * document), dtype="<u4")

    def _repeats(self, one: Signature, other: Signature) -> bool:
        """Whether two signatures share a band and are as similar as asked."""
        same = one == other
        banded = same[: self.bands * self.rows].reshape(self.bands, self.rows)
        return bool(banded.all(axis=1).any()) and float(same.mean()) >= self.similarity

    def own(self) -> Iterator[NDArray[numpy.uint32]]:
        """Signatures of the documents that were kept here, in blocks of rows; once all are decided."""
        size = 4 * self.numbers
        for at in range(self.elsewhere, self.documents, HELD):
            end = min(at + HELD, self.documents)
            found = numpy.frombuffer(os.pread(self._signatures.fileno(), size * (end - at), size * at), dtype="<u4")
            yield found.reshape(-1, self.numbers)[self.decisions[at:end] == NEW]

    def earlier(self) -> Literal["here", "elsewhere"] | None:
        """Where the next document is already, in the order in which they were added; None where it was new."""
        if self._asked == self.documents:
            raise DatasetError("the sources grew while they were read: give them when nothing writes to them any more")
        found = self.decisions[self._asked]
        self._asked += 1
        return None if found == NEW else "here" if found == HERE else "elsewhere"


def keys_of(signatures: NDArray[numpy.uint32], bands: int, rows: int) -> NDArray[numpy.uint64]:
    """A hash of each band of each signature: of its numbers and its own number."""
    numbers = signatures[:, : bands * rows].reshape(-1, bands, rows).astype(numpy.uint64)
    prime = numpy.frombuffer(hashlib.blake2b(b"band", digest_size=8).digest(), dtype="<u8")[0] | numpy.uint64(1)
    keys = numpy.tile(numpy.arange(1, bands + 1, dtype=numpy.uint64), (len(numbers), 1))
    for row in range(rows):
        keys = (keys ^ numbers[:, :, row]) * prime
        keys ^= keys >> numpy.uint64(29)
    return keys * prime


def scatter(entries: NDArray[Any], where: NDArray[numpy.int64], files: list[BinaryIO]) -> None:
    """Append each entry to the file of its number, in order."""
    order = numpy.argsort(where, kind="stable")
    ends = numpy.searchsorted(where[order], numpy.arange(len(files) + 1))
    sorted_entries = entries[order]
    for number in numpy.flatnonzero(ends[1:] > ends[:-1]):
        files[number].write(sorted_entries[ends[number] : ends[number + 1]].tobytes())


def read_all(file: BinaryIO, kind: numpy.dtype[Any]) -> NDArray[Any]:
    file.seek(0)
    return numpy.frombuffer(file.read(), dtype=kind)


def runs_in(entries: NDArray[Any]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Documents of equal keys one after the other, in order, where there are two or more; where each's run begins."""
    order = numpy.argsort(entries["key"], kind="stable")
    keys = entries["key"][order]
    begins = numpy.flatnonzero(numpy.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)])
    sizes = numpy.diff(numpy.append(begins, len(keys)))
    documents = entries["document"][order][numpy.repeat(sizes > 1, sizes)].astype(numpy.int64)
    sizes = sizes[sizes > 1]
    starts = numpy.cumsum(sizes) - sizes
    return documents, numpy.repeat(starts, sizes)


def by_document(part: BinaryIO) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The documents of a part in order, each with the spans before it of its runs; the file is freed."""
    entries = read_all(part, MEMBER)
    part.close()
    entries = entries[numpy.argsort(entries["document"], kind="stable")]
    ends = numpy.flatnonzero(numpy.append(entries["document"][1:] != entries["document"][:-1], True))[: len(entries)]
    begin = 0
    for end in ends.tolist():
        found = entries[begin : end + 1]
        yield int(found["document"][0]), list(zip(found["start"].tolist(), found["place"].tolist(), strict=True))
        begin = end + 1
