"""What Slurm's commands print, and what it means for a round."""

from __future__ import annotations

import pytest

from coordinator.streamflow_plugin.slurm import is_silence, running, verdict
from facility.exchange.messages.outcome import Outcome

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    "text",
    [
        DOWN,
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_silent_controller_is_no_answer(text: str):
    assert is_silence(text)
    assert running(text, 1) is None


@pytest.mark.parametrize(
    "text",
    [
        "sbatch: error: invalid partition specified: gpu",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        "slurm_load_jobs error: Invalid job id specified",
    ],
)
def test_a_refusal_is_an_answer(text: str):
    assert not is_silence(text)


def test_a_forgotten_job_has_ended():
    assert running("slurm_load_jobs error: Invalid job id specified", 1) == []
    assert running("12\n 13 \n", 0) == ["12", "13"]
    assert running("", 0) == []


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
    result, sentence = verdict(state, code)
    assert result == expected and words in sentence
    assert Outcome(result) in (Outcome.DONE, Outcome.SKIPPED)
    assert bool(sentence) == (state != "COMPLETED" and code != "7:0")
