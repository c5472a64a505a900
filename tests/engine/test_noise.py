"""The law of a quiet console finds what it is there to find: every end-to-end test that reads a console applies it."""

from __future__ import annotations

import logging
import traceback

import pytest
from streamflow.log_handler import CustomFormatter

from tests.engine.noise import noise

OURS = [
    "12:00:01 site-a: job 17 was cancelled by the site; the round goes on without it",
    "12:00:02 the engine ended with code 1; starting again",
    "the run ended with code 75: archive is full: make room, then give the same command again",
    "Complete rounds in the archive: 1; the same command goes on from there.",
    "│ 0 │ site-a │ ok │",
    "│ 0 │ site-a │ ok │",
]


def test_our_own_sentences_are_no_noise():
    assert noise(OURS) == []


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
@pytest.mark.parametrize("coloured", [True, False])
def test_a_line_in_the_engines_format_is_found(level: int, coloured: bool):
    record = logging.LogRecord("streamflow", level, __file__, 1, "the text of a failure", None, None)
    line = (CustomFormatter() if coloured else logging.Formatter("%(asctime)s %(levelname)-8s%(message)s")).format(
        record
    )
    assert len(noise([*OURS, line])) == 1


@pytest.mark.parametrize("text", ["FAILED Job /rounds/train_a/0.1", "EXECUTING step /start", "COMPLETED Workflow x"])
def test_the_engines_own_words_are_found_behind_our_time_too(text: str):
    assert noise([*OURS, f"12:00:03 {text}"]) == [f"12:00:03 {text}"]


def test_a_traceback_a_second_end_and_a_sentence_said_twice_at_once_are_found():
    try:
        raise ValueError("x")
    except ValueError:
        lines = traceback.format_exc().splitlines()
    assert len(noise(lines)) >= 2
    assert noise([*OURS, OURS[2]]) == [OURS[2]]
    assert noise([OURS[0], OURS[0]]) == [OURS[0]] and noise([OURS[0], "12:00:09" + OURS[0][8:]]) == []
