"""The digest of a file whose bytes go by in pieces, so that the file need not be read again for it.

Writers feed what they write, readers what they read. Pieces may come in any order and from any thread: what comes too
early waits in memory up to `MOST_WAITING` bytes; what never went by, and what could not wait, is read from the file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from facility.exchange.files.checksum import Digest

MOST_WAITING = 16 << 20
"""Bytes of one file that wait for their turn in memory."""
READ_BYTES = 4 << 20


class StreamedDigest:
    """The digest of one file of known size, fed with pieces in any order.

    The same bytes must lie in the file, at latest when their turn comes.
    """

    def __init__(self, path: Path, size: int, begin: Callable[[], Digest] = hashlib.sha256) -> None:
        """`begin`: makes the digest of no bytes."""
        self.path, self.size, self._begin = Path(path), size, begin
        self._hash = begin()
        self._position = 0
        """Bytes that are in the digest."""
        self._busy = self._again = False
        self._waiting: dict[int, bytes | int] = {}
        """Pieces that came early, by offset: their content, or their length where they could not wait."""
        self._waiting_bytes = 0
        self._lock = threading.Lock()

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Only these ranges (first byte, end) will go by: a reader of tensors feeds no header, and perhaps not all.

        What lies between is read from the file in its turn, so that nothing waits for it. Says nothing after the first
        `feed`.
        """
        if self._position or self._waiting:
            return
        at = 0
        for start, end in [*sorted(ranges), (self.size, self.size)]:
            if start > at:
                self._skip(at, start)
            at = max(at, end)

    def _skip(self, start: int, end: int) -> None:
        with self._lock:
            if start > self._position or self._busy:
                self._waiting[start] = end - start
                return
            self._busy = True
        self._advance(self._read(start, end))

    def feed(self, offset: int, content: memoryview | bytes) -> None:
        """Take a piece of the file. One that is fed a second time, changed perhaps, has the whole file read at last."""
        if not len(content):
            return
        with self._lock:
            if offset < self._position or offset in self._waiting:
                self._again = True
                return
            if offset > self._position or self._busy:
                self._keep(offset, content)
                return
            self._busy = True
        self._hash.update(content)
        self._advance(len(content))

    def _keep(self, offset: int, content: memoryview | bytes) -> None:
        fits = self._waiting_bytes + len(content) <= MOST_WAITING
        self._waiting[offset] = bytes(content) if fits else len(content)
        self._waiting_bytes += len(content) if fits else 0

    def _advance(self, count: int) -> None:
        """Count `count` bytes as done, and go on with what has waited for them."""
        while True:
            with self._lock:
                self._position += count
                piece = self._waiting.pop(self._position, None)
                if piece is None:
                    self._busy = False
                    return
                if isinstance(piece, bytes):
                    self._waiting_bytes -= len(piece)
            if isinstance(piece, bytes):
                self._hash.update(piece)
                count = len(piece)
            else:
                count = self._read(self._position, self._position + piece)

    def _read(self, start: int, end: int) -> int:
        """Take bytes `start` to `end` from the file; returns how many there were."""
        buffer, done = memoryview(bytearray(min(READ_BYTES, max(0, end - start)))), start
        with open(self.path, "rb", buffering=0) as file:
            while done < end:
                count = os.preadv(file.fileno(), [buffer[: min(len(buffer), end - done)]], done)
                if not count:
                    break
                self._hash.update(buffer[:count])
                done += count
        return done - start

    def finish(self) -> str:
        """The digest in hexadecimal; reads what did not go by."""
        if self._again:
            self._hash, self._position, self._waiting = self._begin(), 0, {}
        while self._position < self.size:
            following = min((at for at in self._waiting if at > self._position), default=self.size)
            count = self._read(self._position, following)
            if not count:
                break
            self._advance(count)
        return self._hash.hexdigest()
