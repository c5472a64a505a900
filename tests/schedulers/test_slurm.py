"""What Slurm's commands print, and what it means for a round."""

from __future__ import annotations

import time

import pytest

from coordinator.schedulers.scheduler import Job
from coordinator.schedulers.slurm import SCHEDULER as SLURM
from facility.exchange.messages.outcome import Outcome
from tests.schedulers.recordings import words_of_slurm

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
FORGOT = "slurm_load_jobs error: Invalid job id specified"
ALIVE = (
    "COMPLETING CONFIGURING EXPEDITING PENDING POWER_UP_NODE REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING RESV_DEL_HOLD "
    "REVOKED RUNNING SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED UPDATE_DB SOMETHING_NEW"
).split()
"""States of squeue(1) that a job leaves again, and one that no version has yet."""
WORDS = words_of_slurm()
RESOURCES = "BB Billing CPU Cpu Energy GRES License Mem Memory Node Unknown".split()
STUCK = {
    "scontrol release": ["JobHeldUser", "JobHoldMaxRequeue", "JobLaunchFailure"],
    "staff": ["JobHeldAdmin"],
    "--dependency": ["DependencyNeverSatisfied"],
    "wait for the site": ["PartitionDown", "PartitionInactive", "BadConstraints", "ReqNodeNotAvail", "NodeDown"],
    "partition allows": ["PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "MaxMemPerLimit"],
    "correct `fill:`": ["InvalidAccount", "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed"],
    "--reservation": ["ReservationDeleted", "ReservationInvalid"],
    "budget": [
        *(f"{of}Grp{one}Minutes{end}" for of in ("Assoc", "QOS") for one in RESOURCES for end in ("", "Limit")),
        *("AssocGrpWallLimit", "QOSGrpWallLimit"),
    ],
    "allow one job": [
        *(
            f"{of}Max{one}{limit}{end}"
            for of in ("Assoc", "QOS")
            for one in RESOURCES
            for limit in ("PerJob", "PerNode", "MinutesPerJob")
            for end in ("", "Limit")
        ),
        *("AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit", "AssociationTimeLimit", "QOSTimeLimit"),
        *("QOSMinCpuNotSatisfied", *(f"QOSMin{one}" for one in RESOURCES)),
    ],
}
"""Reasons that no time clears, by words of what to do, after Slurm's job_reason_codes.html: limits of one job, and sums
over "past, present and future jobs". Limits of the jobs that run at one time clear as others end."""


@pytest.mark.parametrize(
    "text",
    [
        DOWN,
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "Unable to contact slurm controller (connect failure)",
        "sbatch: fatal: Could not establish a configuration source",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
        "bash: fork: retry: Resource temporarily unavailable",
        "sbatch: error: Batch job submission failed: Unable to create job record, try again",
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


@pytest.mark.parametrize("version", WORDS)
def test_every_state_of_a_version_is_an_end_where_slurm_itself_counts_it_finished(version: str):
    """slurm_protocol_defs.h, IS_JOB_FINISHED: a base state beyond SUSPENDED; a flag is shown in place of the state."""
    base = WORDS[version]["base"]
    assert base[:3] == ["PENDING", "RUNNING", "SUSPENDED"]
    assert SLURM.terminal == set(base[3:]) and SLURM.terminal.isdisjoint(WORDS[version]["flags"])
    assert set(WORDS[version]["flags"]) <= set(ALIVE)


@pytest.mark.parametrize("version", WORDS)
def test_every_reason_of_a_version_is_told_with_what_to_do_or_is_ordinary_waiting(version: str):
    told = {name: words for words, names in STUCK.items() for name in names}
    reasons = WORDS[version]["reasons"]
    assert len(reasons) > 190 and len(told.keys() & set(reasons)) > 70
    for reason in reasons:
        (job,) = SLURM.read_listing(f"12 PENDING {reason}\n")
        advice = SLURM.what_to_do(job)
        assert told[reason] in advice if reason in told else advice == "", reason


@pytest.mark.parametrize(
    "reason",
    [
        "job requeued in held state",
        "job requeued in special exit state",
        "launch failed requeued held",
        "launch failure limit exceeded requeued held",
        "user env retrieval failed requeued held",
    ],
)
def test_sentences_that_squeue_shows_in_place_of_a_reason(reason: str):
    """job_mgr.c sets them, squeue shows them as they are, and scontrol with underscores."""
    for shown in (reason, reason.replace(" ", "_")):
        (job,) = SLURM.read_listing(f"12 PENDING {shown}\n")
        assert "scontrol release 12" in SLURM.what_to_do(job)


@pytest.mark.parametrize(
    "reason",
    [
        "Job's account not known, so it can't use this partition (main allows phys)",
        "Job's account not permitted to use this partition (main allows phys not chem)",
        "Job's account not permitted to use this partition (main denies chem including chem)",
        "Job's QOS not known, so it can't use this partition (main allows long)",
        "Job's QOS not permitted to use this partition (main allows long not normal)",
    ],
)
def test_sentences_of_a_partition_that_takes_not_this_account_or_qos(reason: str):
    """slurmctld sets them in place of AccountNotAllowed and QOSNotAllowed; the first was seen of Slurm 22.05."""
    for shown in (reason, reason.replace(" ", "_")):
        (job,) = SLURM.read_listing(f"12 PENDING {shown}\n")
        assert "correct `fill:`" in SLURM.what_to_do(job)


def test_a_state_without_a_name_and_an_array_are_read():
    assert SLURM.read_listing("12 ? None\n") == []
    assert SLURM.ended(SLURM.read_states("12 ?\n", 0, ["12"]), ["12"]) == []
    listed = SLURM.read_listing("12_[1-4%2] PENDING JobArrayTaskLimit\n12_3 RUNNING None\n")
    assert listed == [
        Job(id="12_[1-4%2]", state="PENDING", began=False, reason="JobArrayTaskLimit"),
        Job(id="12_3", state="RUNNING", began=True),
    ]


@pytest.mark.parametrize(
    ("answer", "begin"),
    [("2026-11-22T10:00:00", "2026-11-22T10:00:00"), ("N/A", ""), ("INVALID", ""), ("Unknown", ""), ("Sun 10:00", "")],
)
def test_when_a_job_begins_is_read_in_slurms_own_format_alone(answer: str, begin: str):
    """As a gate of an earlier version answers; another format, of an account's environment, is left out."""
    assert SLURM.read_begin(f"{answer}\n") == begin


@pytest.mark.parametrize(
    ("answer", "begin"),
    [
        ("2026-11-22T10:00:00+0000", "2026-11-22T04:30:00"),
        ("2026-11-22T10:00:00+0530", "2026-11-21T23:00:00"),
        ("2026-07-01T10:00:00-1000", "2026-07-01T14:30:00"),
        ("0001-01-01T00:00:00+1400", ""),
        ("2026-13-22T10:00:00+0000", ""),
        ("N/A", ""),
    ],
)
def test_when_a_job_begins_is_told_on_the_clock_of_whoever_reads_it(
    answer: str, begin: str, monkeypatch: pytest.MonkeyPatch
):
    """squeue's own format has no time zone: of a site in another country it was read hours off."""
    monkeypatch.setenv("TZ", "FAR+05:30")  # west of Greenwich, as POSIX writes it
    time.tzset()
    try:
        assert SLURM.read_begin(f"{answer}\n") == begin
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "SLURM_TIME_FORMAT=%Y-%m-%dT%H:%M:%S%z squeue" in SLURM.query_begin("7")


@pytest.mark.parametrize(
    ("limit", "hours"),
    [("infinite", 0), ("n/a", 0), ("INVALID", 0), ("30:00", 0.5), ("2:00:00", 2), ("1-00:00:00", 24), ("UNLIMITED", 0)],
)
def test_time_limits_of_partitions(limit: str, hours: float):
    (found,) = SLURM.read_partitions(f"partition|gpu*|up|{limit}|4|64|gpu:a100:4(S:0-1)\n")
    assert found.hours == hours and (found.name, found.default, found.gpus) == ("gpu", True, 4)
