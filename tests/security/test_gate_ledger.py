"""What a gate's ledger remembers: what counts stays, a job waits or has ended as is known of it and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from facility.gating.ledger import DAY, KEPT, RESERVED, RESERVED_SECONDS, JobEntry, Ledger

NOW = 1000 * DAY


def job(**changes: object) -> JobEntry:
    """A job that waits for its round since an hour."""
    given = {"id": "17", "name": "n", "directory": "/d", "submitted": NOW - 3600, "hours": 2.0, "waited_in": "/d"}
    return JobEntry(**given | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"id": f"{RESERVED}1", "submitted": NOW - RESERVED_SECONDS}, True),
        ({"id": f"{RESERVED}1", "submitted": NOW - RESERVED_SECONDS - 1}, False),
        ({"name": "other"}, False),
        ({"ended": NOW}, False),
        ({"directory": "/round"}, False),
        ({"waited_in": "", "directory": ""}, False),
    ],
)
def test_a_job_waits_until_it_has_a_round_or_has_ended_or_was_never_submitted(changes: dict[str, object], waits: bool):
    one = job(**changes)
    assert Ledger(jobs=[one]).waiting("n", NOW) is (one if waits else None)


@pytest.mark.parametrize(
    ("changes", "unnamed"),
    [({}, True), ({"name": "other"}, False), ({"id": "17"}, False), ({"ended": NOW}, False)],
)
def test_a_job_is_unnamed_until_the_scheduler_has_named_it(changes: dict[str, object], unnamed: bool):
    assert job(**{"id": f"{RESERVED}1"} | changes).unnamed("n") is unnamed


def test_the_last_job_of_an_id_is_meant_and_a_refused_one_has_none():
    first, last = job(directory="/first"), job(directory="/last")
    book = Ledger(jobs=[first, last, job(id="")])
    assert book.job("17") is last and book.job("") is None and book.job("18") is None


def test_jobs_that_left_the_queue_have_ended_and_no_others():
    known, other, unknown, early = job(), job(id="18", name="other"), job(id="19"), job(id="20", ended=NOW - 60)
    active = job(id="21")
    book = Ledger(jobs=[known, other, unknown, early, active])
    book.note_ended("n", {"17", "18", "20", "21"}, {"21"}, NOW)
    assert [one.ended for one in book.jobs] == [NOW, 0, 0, NOW - 60, 0]


def test_what_killed_gates_had_entered_has_ended_and_what_may_still_be_submitted_has_not():
    submitted = NOW - RESERVED_SECONDS - 1
    killed, early = (job(id=f"{RESERVED}{number}", submitted=submitted, ended=number) for number in (0, 7))
    others = [
        job(id=f"{RESERVED}1", submitted=submitted + 1),
        job(id=f"{RESERVED}2", name="other", submitted=submitted),
    ]
    book = Ledger(jobs=[killed, early, *others, job(submitted=submitted)])
    book.note_killed("n", NOW)
    assert [one.ended for one in book.jobs] == [NOW, 7, 0, 0, 0]


@pytest.mark.parametrize("number", [KEPT - 100, KEPT + 5])
def test_no_more_than_so_many_old_jobs_are_remembered_beside_what_counts(tmp_path: Path, number: int):
    """The oldest go first, but for those whose directory is there."""
    old = [job(directory=f"/none/{one}", submitted=0.0, ended=one + 1.0) for one in range(number)]
    kept = [job(submitted=NOW - DAY + 1, ended=NOW), job(submitted=0.0), job(id="", submitted=0.0)]
    there = job(submitted=0.0, ended=1.0, directory=str(tmp_path))
    book = Ledger(jobs=[*kept, there, *old])
    book.forget(NOW)
    assert book.jobs == [*kept, there, *old[max(0, number - KEPT) :]]


@pytest.mark.parametrize("number", [KEPT - 100, KEPT + 5])
def test_nor_refused_ones_and_these_push_out_no_others(tmp_path: Path, number: int):
    """However new they are, and wherever they led: whoever asks in vain fills no disk."""
    refused = [job(id="", directory=str(tmp_path), submitted=NOW + one) for one in range(number)]
    book = Ledger(jobs=[job(submitted=0.0, ended=1.0), *refused])
    book.forget(NOW + number)
    assert book.jobs == [job(submitted=0.0, ended=1.0), *refused[max(0, number - KEPT) :]]


def test_node_hours_are_the_limits_of_jobs_that_run_and_the_time_of_those_that_ended():
    jobs = [job(nodes=3), job(nodes=3, ended=NOW - 1800), job(ended=NOW + 9 * 3600)]
    assert [one.node_hours for one in jobs] == [6.0, 1.5, 2.0]
    jobs += [job(id=""), job(submitted=NOW - DAY)]
    assert Ledger(jobs=jobs).node_hours(NOW) == 9.5, "neither refused ones nor those of yesterday"
