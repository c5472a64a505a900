"""What a run says to its console: one that takes no more ends no run, and a closed terminal cancels no job."""

from __future__ import annotations

import io
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from coordinator.engine.console_log import ENGINE, ConsoleHandler, Lasting, shown_on
from coordinator.engine.live import FacilityState, Snapshot, waiting_sentence
from coordinator.engine.run import _stopped_by_signals


def say(stream: Any, *sentences: str) -> None:
    with shown_on(ConsoleHandler(Console(file=cast(Any, Lasting(stream)), width=100))):
        for sentence in sentences:
            logging.getLogger(ENGINE).info(sentence)


def test_a_console_on_a_full_disk_ends_no_run():
    """The run was ended by its own next line, its engine killed, and its jobs were left in their queues."""
    stream = open("/dev/full", "w", buffering=1)
    say(stream, "one", "two")
    with pytest.raises(OSError):
        stream.close()


def test_a_console_whose_reader_is_gone_ends_no_run(tmp_path: Path):
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    os.close(reader)
    say(stream, "one", "two")
    stream.close()
    say(stream, "a closed stream says nothing")


def test_a_console_is_never_quiet_for_longer_than_it_promises():
    """A facility that was away from a round's start was told once; then nothing was said for a quarter of an hour."""
    now, out = [0.0], io.StringIO()
    handler = ConsoleHandler(Console(file=out, width=100), clock=lambda: now[0])
    away = FacilityState(state="waiting", away=1.0)
    run = Snapshot(
        federation="f",
        heading="round 0 (0 of 2 complete)",
        coordinator="waiting for the facilities",
        time=0.0,
        facilities={"here": FacilityState(state="done"), "far": away},
    )
    spoken = [0.0]
    with shown_on(handler):
        for second in range(0, 200):
            now[0] = float(second)
            before = out.tell()
            if second == 70:
                logging.getLogger(ENGINE).info("another matter")
            handler.say_if_quiet(lambda: waiting_sentence(run, now[0]))
            spoken += [now[0]] if out.tell() > before else []
    assert spoken == [0, 30, 60, 70, 100, 130, 160, 190]
    lines = [line.partition(" ")[2] for line in out.getvalue().splitlines()]
    assert lines[0] == "round 0 (0 of 2 complete): waiting for the facilities; far: does not answer for 29 s", lines


def test_what_can_be_written_is(tmp_path: Path):
    with open(tmp_path / "log", "w") as stream:
        say(stream, "one", "two")
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == ["one", "two"]


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["a terminal", "nohup"])
def test_a_terminal_that_is_closed_cancels_no_job(before: Any):
    """Ctrl-C does, and is passed on; a connection that breaks ends the command at most, and the next start goes on."""
    seen: list[int] = []
    old = signal.signal(signal.SIGHUP, before)
    try:
        with _stopped_by_signals(cast(Any, SimpleNamespace(stop=seen.append))):
            assert signal.getsignal(signal.SIGHUP) == before
            signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGHUP, old)
