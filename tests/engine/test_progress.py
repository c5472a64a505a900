"""What a person sees follows from a run's events."""

from __future__ import annotations

from coordinator.engine.progress import Progress
from coordinator.events.event import KINDS, Event


def event(kind: str, **fields) -> Event:
    assert set(fields) == set(KINDS[kind])
    return Event(kind=kind, fields=fields)


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
    assert progress.title == "final evaluation"


def test_a_facility_of_another_name_changes_nothing():
    progress = Progress(["a"], rounds=2, clock=lambda: 0.0)
    progress.feed(event("received", facility="stranger", round=0))
    progress.feed(event("submitted", step="/rounds/train_stranger", job="1"))
    assert progress.states == {"a": "waiting"}
