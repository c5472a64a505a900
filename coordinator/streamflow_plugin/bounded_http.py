"""An HTTP client for a server that is not trusted: the bytes, the time and the depth of every answer are bounded.

Bytes are counted as they come, before anything is kept of them, and compressed answers are refused: a few kilobytes of
one can become gigabytes. A client's own timeouts are for single reads, so that a byte a minute holds it for ever; here
a whole answer has a time, and so has a call that makes many requests, as while it waits for a job of the server's. JSON
is read by `strict_json`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx
from httpx._utils import URLPattern

from facility.exchange.errors import ManifestError
from facility.exchange.messages.strict_json import parse_json

ANSWER_SECONDS = 60.0
"""Until a whole answer is here, from the end of its request."""
CALL_SECONDS = 25 * 3600.0
"""Until a call with all its requests is over, what its files take at `SLOWEST` aside."""
ANSWER_BYTES = 2 << 20
"""Of one answer that is JSON."""
FILE_BYTES = 16 << 20
"""Of one answer that is a small file; staged files are bounded by what reads them."""
SLOWEST = 20_000
"""Bytes a second: a staged file that comes or goes slower is given up."""
BLOCK = 1 << 16


class OutOfBounds(Exception):
    """An answer that no honest server gives. Trying again does not better it."""


class Patience(threading.local):
    """How long this thread waits."""

    seconds = ANSWER_SECONDS
    """For an answer to a request."""
    until = math.inf
    """When the call under way must be over, on the monotonic clock."""

    @contextmanager
    def for_call(self) -> Iterator[None]:
        self.until = time.monotonic() + CALL_SECONDS
        try:
            yield
        finally:
            self.until = math.inf

    def check(self) -> None:
        """Raise `OutOfBounds` where the call under way should be over."""
        if time.monotonic() > self.until:
            raise OutOfBounds("one call takes too long, with all that it waits for")

    @contextmanager
    def for_bytes(self, count: int) -> Iterator[None]:
        """For requests and answers that move so many bytes."""
        self.seconds = ANSWER_SECONDS + count / SLOWEST
        self.until += count / SLOWEST
        try:
            yield
        finally:
            self.seconds = ANSWER_SECONDS


class Line(httpcore.NetworkStream):
    """A connection on which an answer has its time from when its request was written, and a request its own."""

    def __init__(self, inner: httpcore.NetworkStream, patience: Patience) -> None:
        self._inner, self._patience = inner, patience
        self._until = time.monotonic() + patience.seconds
        self._writing, self._written = 0.0, 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._writing, self._written = 0.0, 0
        self._patience.check()
        if (left := self._until - time.monotonic()) <= 0:
            raise httpcore.ReadTimeout(f"no whole answer within {self._patience.seconds:.0f} s")
        return self._inner.read(max_bytes, left if timeout is None else min(timeout, left))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._patience.check()
        start = time.monotonic()
        for place in range(0, len(buffer), BLOCK):
            self._inner.write(buffer[place : place + BLOCK], timeout)
            now = time.monotonic()
            self._written += min(BLOCK, len(buffer) - place)
            if self._writing + now - start > ANSWER_SECONDS + self._written / SLOWEST:
                raise httpcore.WriteTimeout("the server takes a request too slowly")
        self._writing += time.monotonic() - start
        self._until = time.monotonic() + self._patience.seconds

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> Line:
        return Line(self._inner.start_tls(ssl_context, server_hostname, timeout), self._patience)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class Lines(httpcore.NetworkBackend):
    """Makes connections that are `Line`s."""

    def __init__(self, inner: httpcore.NetworkBackend, patience: Patience) -> None:
        self._inner, self._patience = inner, patience

    def connect_tcp(self, *arguments: Any, **options: Any) -> httpcore.NetworkStream:
        return Line(self._inner.connect_tcp(*arguments, **options), self._patience)

    def connect_unix_socket(self, *arguments: Any, **options: Any) -> httpcore.NetworkStream:
        return Line(self._inner.connect_unix_socket(*arguments, **options), self._patience)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class BoundedStream(httpx.SyncByteStream):
    """A response's body; more than `most` bytes are an error."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._most = stream, most

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for block in self._stream:
            count += len(block)
            if count > self._most:
                raise OutOfBounds(f"more than {self._most} bytes in one answer")
            yield block

    def close(self) -> None:
        self._stream.close()


def bound_session(session: httpx.Client, patience: Patience) -> None:
    """Bound the time of every answer of a new client, and refuse those that are compressed. What is not encrypted, and
    so for this machine, goes there directly: a proxy of the environment would read secrets and tokens of it."""
    session.headers["Accept-Encoding"] = "identity"
    mounts = {**session._mounts, URLPattern("http://"): httpx.HTTPTransport()}
    session._mounts = dict(sorted(mounts.items()))  # by how much a pattern says
    for transport in {session._transport, *session._mounts.values()} - {None}:
        pool = getattr(transport, "_pool", None)
        if not isinstance(getattr(pool, "_network_backend", None), httpcore.NetworkBackend):
            raise RuntimeError("this httpx is not known, and answers could not be bounded: install httpx==0.28.*")
        pool._network_backend = Lines(pool._network_backend, patience)  # type: ignore[union-attr]


def check_plain(response: httpx.Response) -> None:
    """Raise `OutOfBounds` for a compressed answer; for a client's hook, before its body is read."""
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise OutOfBounds("the answer is compressed, which was not asked for")


def bounded_json(response: httpx.Response, most: int) -> None:
    """Bound an answer's bytes, and read its JSON strictly; for a client's hook."""
    response.stream = BoundedStream(response.stream, most)
    response.json = lambda **_: strictly(response)  # type: ignore[method-assign]


def strictly(response: httpx.Response) -> Mapping[str, Any]:
    """The object in an answer's body. Raises `OutOfBounds`."""
    try:
        return parse_json(response.content.decode(), where="FirecREST's answer")
    except (ManifestError, ValueError) as error:
        raise OutOfBounds(str(error)) from None
