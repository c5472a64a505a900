"""What a person sees follows from a run's events."""

from __future__ import annotations

import math

from coordinator.archive.rounds import CARRIED, DISCARDED
from coordinator.engine.progress import Progress
from coordinator.events.event import KINDS, Event


def event(kind: str, **fields) -> Event:
    assert set(fields) == set(KINDS[kind])
    return Event(kind=kind, fields=fields)


def training() -> Event:
    """What a job says of its first step."""
    return event(
        "progress",
        step="/rounds/train_a",
        stage="training",
        done=1,
        steps=4,
        loss=2.0,
        tokens_per_second=5.0,
        seconds_left=9.0,
    )


def test_a_round_as_it_happens():
    progress = Progress(["a", "b"], rounds=2, clock=lambda: 0.0)
    assert progress.feed(event("starting", round=0, model="/archive/initial/model")) is None
    assert progress.feed(event("executing", step="/rounds/train_a")) == "round 0: a training"
    assert progress.feed(event("submitted", step="/rounds/train_b", job="17")) == "round 0: b queued as job 17"
    assert progress.states == {"a": "training", "b": "queued as job 17"}
    assert progress.feed(event("received", facility="a", round=0)) == "round 0: a done"
    refused = event("refused", facility="b", round=0, reason="the node burnt down")
    assert progress.feed(refused) == "round 0: goes on without b: the node burnt down"
    assert progress.feed(event("executing", step="/rounds/aggregate")) == "round 0: averaging"
    assert progress.feed(event("complete", round=0, decision="go on")) == "round 0: complete, go on"
    assert progress.title == "round 1"
    progress.feed(event("complete", round=1, decision="all 2 rounds are done"))
    assert progress.title == progress.heading == "final evaluation", "it is none of the 2"


def test_a_run_that_goes_on_begins_after_the_rounds_that_are_complete():
    assert Progress(["a"], rounds=3).heading == "before the first round (0 of 3 complete)"
    assert Progress(["a"], rounds=3, done=2).heading == "after round 1 (2 of 3 complete)"
    assert Progress(["a"], rounds=3, done=3).heading == "after round 2 (3 of 3 complete)"


def test_a_late_facility_is_told_once_a_round_and_shown_with_what_its_job_says():
    progress = Progress(["a"], rounds=3, clock=lambda: 0.0, wall=lambda: 100.0)
    progress.feed(event("starting", round=0, model="/archive/initial/model"))
    progress.feed(event("executing", step="/rounds/train_a"))
    late = event("late", facility="a", round=0, reason=CARRIED)
    assert progress.feed(late) == f"round 0 closes without a: {CARRIED}"
    assert progress.feed(event("executing", step="/rounds/receive_a")) is None, "nothing to receive"
    assert progress.feed(event("executing", step="/rounds/send_a")) is None, "its job goes on with an older model"
    progress.feed(event("complete", round=0, decision="go on"))
    assert (
        progress.feed(training())
        == "round 1: a: late for 0 s, step 1 of 4, loss 2.0000, 5 tokens/s, 9 s left, heard 0 s ago"
    )
    assert progress.feed(event("executing", step="/rounds/receive_a")) == "round 1: a receiving"


def test_a_facility_whose_late_update_is_discarded_is_late_and_not_out():
    progress = Progress(["a"], rounds=3, clock=lambda: 0.0, wall=lambda: 100.0)
    progress.feed(event("starting", round=0, model="/archive/initial/model"))
    for step in ("train_a", "receive_a"):
        progress.feed(event("executing", step=f"/rounds/{step}"))
    refused = event("refused", facility="a", round=0, reason=DISCARDED)
    assert progress.feed(refused) == f"round 0: goes on without a: {DISCARDED}"
    line = progress.feed(training())
    assert line == (
        "round 0: a: late, its update is discarded, for 0 s, step 1 of 4, loss 2.0000, 5 tokens/s, 9 s left, heard 0 s "
        "ago"
    )
    progress.feed(event("complete", round=0, decision="go on"))
    assert progress.feed(event("executing", step="/rounds/train_a")) == "round 1: a training", "from the newest model"


def test_how_long_a_round_stays_open_after_its_quorum_is_told():
    progress = Progress(["a", "b"], rounds=3, clock=lambda: 0.0)
    for seconds, words in ((90.0, "stays open for 90 s"), (math.inf, "waits for all")):
        told = progress.feed(event("quorum", round=1, delivered=1, seconds=seconds, why="rounds.grace is auto"))
        assert told == f"round 1: 1 have delivered, the quorum; it {words} (rounds.grace is auto)"


def test_a_facility_of_another_name_changes_nothing():
    progress = Progress(["a"], rounds=2, clock=lambda: 0.0)
    progress.feed(event("received", facility="stranger", round=0))
    progress.feed(event("submitted", step="/rounds/train_stranger", job="1"))
    assert progress.states == {"a": "waiting"}
