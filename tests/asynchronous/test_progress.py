"""What a person sees is read off StreamFlow's log, line by line."""

from __future__ import annotations

from coordinator.asynchronous.progress import GroupProgress
from coordinator.engine.progress import Progress

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


def test_groups_as_they_happen():
    progress = GroupProgress(["a", "b_2"], rounds=2, clock=lambda: 0.0)
    job = STAMP + "EXECUTING step /facility_b_2/{0} (job /facility_b_2/{0}/0.0) locally into directory /w:"
    assert progress.feed(job.format("train")) == "b_2 training"
    assert progress.feed(STAMP + "Scheduled job /facility_a/train/0.0 with job id 17") == "0 groups: a queued as job 17"
    assert progress.states == {"a": "queued as job 17", "b_2": "training"}
    assert progress.feed(job.format("meet")) == "b_2 waiting for its group"
    told = "group 1 (all are here): a 0.500, b_2 0.500"
    assert progress.feed(f"{told} -> /archive/groups/group-000001") == told
    assert (
        progress.feed("facility a goes on: round 1 from group-000001")
        == "facility a goes on: round 1 from group-000001"
    )
    progress.feed("facility b_2 ends: all 2 rounds are done")
    assert progress.states["b_2"] == "all 2 rounds are done"
    assert progress.heading == "1 groups, 2 rounds each"
