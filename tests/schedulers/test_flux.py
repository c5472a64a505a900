"""Flux by its own answers."""

from __future__ import annotations

import pytest

from coordinator.schedulers.flux import SCHEDULER as FLUX
from tests.schedulers.recordings import recorded


def test_a_lost_node_is_an_end_told_by_flux():
    found = recorded("flux-jobs-lost-node-why")
    id = "ƒFc7G9kUf"
    assert FLUX.query([id]) == found.command
    assert FLUX.ended(FLUX.read_states(found.out, found.code, [id]), [id]) == [id]
    ending = FLUX.read_ending(found.out, found.code, id)
    assert ending is not None and ending.code is None and ending.step_code == 7
    assert "node failure on fluxnode1" in ending.problem


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ("flux-jobs-returncode-cancelled", None, "CANCELED, exit code 143"),
        ("flux-jobs-returncode-timeout", None, "resource allocation expired"),
        ("flux-jobs-returncode-denied", 1, "unsatisfiable request"),
        ("flux-jobs-returncode-code7", 7, ""),
    ],
)
def test_how_a_job_ended(answer: str, code: int | None, words: str):
    """These were recorded without the id that our question puts first."""
    found = recorded(answer)
    ending = FLUX.read_ending(f"ƒ1 {found.out}", found.code, "ƒ1")
    assert ending is not None and ending.code == code and words in ending.problem and ending.step_code == 7


def test_running_and_waiting_jobs_have_not_ended():
    found = recorded("flux-jobs-selfcheck-deadlock")  # id, status, ...
    ids = ["ƒ2K1qMDhZ", "ƒ2JSnREKh"]
    states = FLUX.read_states(found.out, found.code, ids)
    assert FLUX.ended(states, ids) == []
    assert FLUX.read_states("ƒ2JSnREKh  RUN RUN", 0, ids) == {"ƒ2JSnREKh": "RUN"}, "without a return code as yet"


def test_a_job_that_flux_does_not_know_is_told_and_a_flux_that_is_down_is_silence():
    unknown = recorded("flux-jobs-returncode-unknown")
    states = FLUX.read_states(unknown.err, unknown.code, ["fABCDEFG"])
    assert FLUX.ended(states, ["fABCDEFG"]) == ["fABCDEFG"] and not FLUX.is_silence(unknown.err)
    for name in ("flux-down", "flux-down-attach", "flux-down-batch", "flux-down-cancel", "flux-down-refused"):
        down = recorded(name)
        assert FLUX.is_silence(down.err), name
        assert FLUX.read_states(down.err, down.code, ["fABCDEFG"]) == {}


def test_answers_are_not_silence():
    """A node that died leaves `No route to host` in the answer."""
    for name in ("flux-job-attach-lost-node", "flux-batch-unknown-queue", "flux-cancel-unknown", "flux-cancel-ended"):
        assert not FLUX.is_silence(recorded(name).err), name
    for name in ("flux-cancel-ended", "flux-cancel-unknown"):
        assert FLUX.is_answer(recorded(name).err, recorded(name).code), "there is nothing left to cancel"


def test_a_stopped_queue_is_the_reason_of_its_jobs():
    """The listing of held, depending and stopped jobs, with what `flux queue status` said of the queues."""
    fields = recorded("flux-jobs-listing-annotations").out.splitlines()
    keep = ("urgency=", "queue=", "deps=")
    lines = [" ".join(w for w in line.split() if "=" not in w or w.startswith(keep)) for line in fields]
    text = "\n".join(line.replace("deps=", "") for line in lines) + "\n" + recorded("flux-queue-stop").out
    jobs = {job.id: job for job in FLUX.read_listing(text)}
    assert {id for id, job in jobs.items() if job.began} == {"ƒ5rZvdmtK", "ƒ5rUiCJPy"}
    stopped, held, depends, waits = (jobs[id] for id in ("ƒ5ry2rae3", "ƒ5rkMWis1", "ƒ5sAP75m9", "ƒ5rs3wUhM"))
    assert stopped.reason == "Scheduling is stopped: maintenance" and "another" in FLUX.what_to_do(stopped)
    assert "urgency ƒ5rkMWis1 default" in FLUX.what_to_do(held) and "dependency" in FLUX.what_to_do(depends)
    assert FLUX.what_to_do(waits) == ""


def test_a_listing_without_named_queues_and_a_stopped_scheduler():
    text = "ƒ1 SCHED urgency=16 queue= \nJob submission is enabled\nScheduling is stopped\n"
    (job,) = FLUX.read_listing(text)
    assert job.reason == "Scheduling is stopped" and FLUX.what_to_do(job)
    assert [job.id for job in FLUX.read_listing(recorded("flux-jobs-listing").out) if job.began] == [
        "ƒ5rZvdmtK",
        "ƒ5rUiCJPy",
    ]


def test_ids_are_read_from_what_batch_prints():
    assert FLUX.read_id(recorded("flux-submit-limit").out) == "ƒ6EBPgZ9y"
