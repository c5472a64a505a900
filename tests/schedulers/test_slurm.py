"""What Slurm's commands print, and what it means for a round."""

from __future__ import annotations

import pytest

from coordinator.schedulers.slurm import SCHEDULER as SLURM
from facility.exchange.messages.outcome import Outcome

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
FORGOT = "slurm_load_jobs error: Invalid job id specified"
ALIVE = (
    "COMPLETING CONFIGURING PENDING POWER_UP_NODE REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING RESV_DEL_HOLD REVOKED "
    "RUNNING SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED UPDATE_DB SOMETHING_NEW"
).split()
"""States of squeue(1) that a job leaves again, and one that no version has yet."""


@pytest.mark.parametrize(
    "text",
    [
        DOWN,
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_silent_controller_is_no_answer(text: str):
    assert SLURM.is_silence(text)
    assert SLURM.read_states(text, 1, ["12"]) == {}
    assert SLURM.read_ending(text, 1, "12") is None


@pytest.mark.parametrize(
    "text",
    [
        "sbatch: error: invalid partition specified: gpu",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        FORGOT,
    ],
)
def test_a_refusal_is_an_answer(text: str):
    assert not SLURM.is_silence(text)


@pytest.mark.parametrize("state", ALIVE)
def test_a_job_that_slurm_may_run_on_has_not_ended(state: str):
    """SIGNALING is a running job that was just sent the signal that our own template asks for."""
    assert SLURM.ended(SLURM.read_states(f"12 {state}\n", 0, ["12"]), ["12"]) == []


@pytest.mark.parametrize("state", sorted(SLURM.terminal))
def test_a_job_in_a_terminal_state_has_ended(state: str):
    assert SLURM.ended(SLURM.read_states(f"12 {state}\n13 RUNNING\n", 0, ["12", "13"]), ["12", "13"]) == ["12"]


def test_an_empty_answer_is_silence_and_a_forgotten_job_is_told():
    assert SLURM.read_states("", 0, ["12"]) == {} and SLURM.read_states("12 RUNNING", 0, ["12", "13"]) == {
        "12": "RUNNING"
    }
    assert SLURM.ended(SLURM.read_states(FORGOT, 1, ["12"]), ["12"]) == ["12"]
    assert SLURM.read_states(FORGOT, 1, ["12", "13"]) == {}, "which of the two is not said"


@pytest.mark.parametrize(
    ("state", "code", "expected", "words"),
    [
        ("COMPLETED", "0:0", 0, ""),
        ("FAILED", "7:0", 7, ""),
        ("CANCELLED", "0:15", 7, "CANCELLED, exit code 0, signal 15"),
        ("TIMEOUT", "0:15", 7, "TIMEOUT"),
        ("TIMEOUT", "0:0", 7, "TIMEOUT"),
        ("NODE_FAIL", "1:0", 7, "NODE_FAIL"),
        ("OUT_OF_MEMORY", "0:125", 7, "OUT_OF_MEMORY"),
        ("FAILED", "127:0", 7, "FAILED, exit code 127"),
    ],
)
def test_only_a_completed_job_counts_as_done(state: str, code: str, expected: int, words: str):
    shown = f"JobId=12 JobName=a JobState={state} Reason=None ExitCode={code} StdOut=/w/slurm-12.out"
    ending = SLURM.read_ending(shown, 0, "12")
    assert ending is not None and ending.step_code == expected and words in ending.problem
    assert Outcome(ending.step_code) in (Outcome.DONE, Outcome.SKIPPED)
    assert bool(ending.problem) == (state != "COMPLETED" and code != "7:0")
    accounted = SLURM.read_ending(f"{FORGOT}\n{state}|{code}\n", 0, "12")
    assert accounted is not None and accounted.step_code == expected


def test_an_ending_is_neither_guessed_nor_read_from_another_job():
    assert SLURM.read_ending("JobId=12 JobState=RUNNING ExitCode=0:0", 0, "12") is None
    assert SLURM.read_ending("JobId=13 JobState=COMPLETED ExitCode=0:0", 0, "12") is None
    assert SLURM.read_ending("CANCELLED by 1000|0:15\n", 0, "12").step_code == 7  # type: ignore[union-attr]
    forgotten = SLURM.read_ending(f"{FORGOT}\nSlurm accounting storage is disabled", 1, "12")
    assert forgotten is not None and forgotten.code is None and "not known" in forgotten.problem


def test_the_id_of_a_submission_is_found_among_warnings():
    assert SLURM.read_id("sbatch: info\n1234;cluster\n") == "1234" and SLURM.read_id("sbatch: error: no") == ""


@pytest.mark.parametrize(
    ("accounted", "state", "code"),
    [
        ("COMPLETED|0:0", "COMPLETED", 0),
        ("FAILED|7:0", "FAILED", 7),
        ("CANCELLED by 1000|0:0", "CANCELLED", None),
        ("CANCELLED by 1000|0:15", "CANCELLED", None),
        ("TIMEOUT|0:0", "TIMEOUT", None),
        ("OUT_OF_MEMORY|0:125", "OUT_OF_MEMORY", None),
        ("NODE_FAIL|1:0", "NODE_FAIL", None),
        ("PREEMPTED|0:0", "PREEMPTED", None),
    ],
)
def test_the_account_of_an_ended_job_in_sacct_s_plain_format(accounted: str, state: str, code: int | None):
    """As documented in sacct(1) of 22.05 to 24.05 (State, ExitCode), not recorded; who cancelled follows the state."""
    ending = SLURM.read_ending(f"{FORGOT}\n{accounted}\n", 0, "12")
    assert ending is not None and (ending.state, ending.code) == (state, code)


@pytest.mark.parametrize("state", sorted(set(ALIVE) & SLURM.waiting | {"PENDING"}))
def test_a_job_that_has_not_begun_is_cancelled_before_the_next_start(state: str):
    (job,) = SLURM.read_listing(f"12 {state} (Priority)\n")
    assert not job.began


@pytest.mark.parametrize("state", ["SIGNALING", "STOPPED", "COMPLETING", "STAGE_OUT", "RUNNING"])
def test_a_job_that_has_begun_is_waited_for(state: str):
    (job,) = SLURM.read_listing(f"12 {state} None\n")
    assert job.began
