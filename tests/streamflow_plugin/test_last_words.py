"""The error that a command's output ends with is what a person is told."""

from __future__ import annotations

import time

import pytest
from streamflow.log_handler import logger

from coordinator.streamflow_plugin.last_words import LAST_LINES, error_in, last_words, words_of_error, words_of_job

TRACE = "Traceback (most recent call last):\n  File \"x.py\", line 3, in f\nOSError: [Errno 30] Read-only: 'sent'\n"


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (f"12:00:00 INFO begins\n{TRACE}", "OSError: [Errno 30] Read-only: 'sent'"),
        (f"{TRACE}error: /work is full: free some room\nsrun: error: task 0", "/work is full: free some room"),
        ("error: one\nerror: two\nbye", "two"),
        ("all is well\nno error: here", ""),
        ("", ""),
    ],
)
def test_the_last_line_that_names_an_error(output: str, error: str):
    assert error_in(output) == error


def test_without_an_error_the_last_lines_are_told_without_control_characters():
    assert last_words("a\nb\nc\nd\x1b[31m\n") == "b c d [31m" and LAST_LINES == 3


def test_a_command_of_streamflow_that_failed_is_told_in_the_words_of_the_facility():
    """As streamflow.data.remotepath words it; what comes before is of no use to a person."""
    said = "mkdir: cannot create directory '/scratch/w 1/4572': No space left on device"
    error = RuntimeError(f"1 Command 'mkdir -m 777 -p /scratch/w 1/4572' on location facility-a/train/h/x: {said}")
    assert words_of_error(error) == said
    assert words_of_error(RuntimeError(said)) == said
    assert words_of_error(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize("said", ["1", "1 Command '", "' on location x: ", " ", "1\n", "Error"])
def test_however_much_a_facility_says_it_is_read_in_no_time(said: str):
    """The engine stands still meanwhile; of a megabyte of digits a search would take hours."""
    begun = time.process_time()
    for begin in ("Error submitting job x to Slurm: ", "1 Command 'x' on location y: ", "1 Command '"):
        assert words_of_error(RuntimeError(begin + said * ((2 << 20) // len(said))))
    assert time.process_time() - begun < 20


def test_an_error_that_no_facility_says_is_told_by_its_kind_and_its_traceback_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logger, "propagate", True)
    try:
        {}["h/x"]
    except KeyError as error:
        assert words_of_error(error).startswith("KeyError: 'h/x' (")
    assert "Traceback" in caplog.text and '{}["h/x"]' in caplog.text


@pytest.mark.parametrize("code", [0, 7, 85])
def test_a_job_that_reports_for_itself_is_not_quoted(code: int):
    assert words_of_job("a", code, "error: x") == ""


def test_a_job_that_could_not_leave_its_failure_is_quoted():
    assert words_of_job("a", 2, "error: /a is full") == "a: its job ended with code 2: /a is full"
    assert words_of_job("a", 1, "") == "a: its job ended with code 1"
