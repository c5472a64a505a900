"""Run a command that another institution's machine answers: bounded in time and in what is read of its answer."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

MOST_BYTES = 8 << 20
"""Of output, and of complaints."""


class TooMuchOutput(Exception):
    """The command printed more than `MOST_BYTES`."""


def run_bounded(words: Sequence[str], *, data: bytes | IO[bytes], seconds: float) -> tuple[int, bytes, bytes]:
    """Exit code, output and complaints of a command whose input is `data`, or comes from the pipe `data`.

    Raises `TooMuchOutput`, `subprocess.TimeoutExpired` or `FileNotFoundError`; the command is killed before.
    """
    deadline, found = time.monotonic() + seconds, (bytearray(), bytearray())
    given = subprocess.PIPE if isinstance(data, bytes) else data
    process = subprocess.Popen(words, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    threads = [
        threading.Thread(target=_take, args=(process.stdout, found[0], process), daemon=True),
        threading.Thread(target=_take, args=(process.stderr, found[1], process), daemon=True),
    ]
    if isinstance(data, bytes):
        threading.Thread(target=_give, args=(process.stdin, data), daemon=True).start()
    for thread in threads:
        thread.start()
    try:
        for thread in threads:  # what the command leaves running may hold its output open
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(len(one) > MOST_BYTES for one in found):
            raise TooMuchOutput
        if any(thread.is_alive() for thread in threads):
            raise subprocess.TimeoutExpired(words, seconds)
        return process.wait(max(0.0, deadline - time.monotonic())), bytes(found[0]), bytes(found[1])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _give(stream: IO[bytes], data: bytes) -> None:
    with suppress(OSError), stream:  # a command need not read its input
        stream.write(data)


def _take(stream: IO[bytes], into: bytearray, process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError, ValueError), stream:
        while block := stream.read1(1 << 16):  # type: ignore[attr-defined]
            into += block
            if len(into) > MOST_BYTES:
                process.kill()
                return
