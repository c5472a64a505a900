"""What a person sees is read off StreamFlow's log, line by line."""

from __future__ import annotations

from coordinator.progress import Progress

STAMP = "2026-01-01 00:00:00.000 INFO     "


def test_a_round_as_it_happens():
    progress = Progress(["a", "b"], rounds=2, clock=lambda: 0.0)
    assert progress.feed(STAMP + "round 0: starting from /archive/initial/model") is None
    assert (
        progress.feed(STAMP + "EXECUTING step /rounds/train_a (job /rounds/train_a/0.0) locally into directory /w:")
        == "round 0: a training"
    )
    assert progress.states == {"a": "training", "b": "waiting"}
    assert progress.feed(STAMP + "update of a for round 0 is sound") == "round 0: a done"
    assert (
        progress.feed(STAMP + "round 0 goes on without b: the node burnt down")
        == "round 0: goes on without b: the node burnt down"
    )
    assert progress.feed(STAMP + "round 0 is complete: go on") == "round 0: complete, go on"
    assert progress.title == "round 1"
    progress.feed(STAMP + "round 1 is complete: all 2 rounds are done")
    assert progress.title == "final evaluation"


def test_a_first_step_that_refuses_is_fatal_with_its_own_words():
    progress = Progress(["a"], rounds=2)
    progress.feed("2026-01-01 00:00:00.000 ERROR    FAILED Job /start/0 with error:")
    assert progress.feed("error: archive /x belongs to federation 'p', not 'q'; choose another archive")
    assert progress.fatal == "archive /x belongs to federation 'p', not 'q'; choose another archive"


def test_an_error_of_another_step_is_not():
    progress = Progress(["a"], rounds=2)
    progress.feed("error: something a facility printed")
    assert progress.fatal == ""
