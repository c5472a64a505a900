"""`crossfed explain` says why a facility is out, with the lines of its log, and what to do."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from coordinator.archive.journal import Journal
from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.config.federation import Federation, read_federation
from coordinator.explain import explain_words
from coordinator.report.advice import advice_for
from facility.exchange.errors import InputError
from facility.exchange.files.storage import file_error_sentence
from tests.report.made import BEGIN, made_archive


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    made_archive(tmp_path / "archive", facilities=4, rounds=3)
    path = tmp_path / "workflow" / "federation.yml"
    path.parent.mkdir()
    names = "".join(f"  - {{name: facility-{n:02d}, dataset: /data}}\n" for n in range(4))
    path.write_text(
        f"name: made\nmodel: ../model\nrounds: 5\narchive: ../archive\nworkdir: ../work\nfacilities:\n{names}"
    )
    return read_federation(path)


def said(federation: Federation, *words: str) -> str:
    return explain_words(list(words), federation.file)


def test_a_facility_that_failed_is_explained_with_its_log_and_a_way_out(federation: Federation):
    text = said(federation, "facility-03")  # it failed in round 0
    assert "It took part in 2 of 3 complete rounds" in text and "Rounds without it: 0 (failed)" in text
    assert "is out of round 0: rank 3: torch.OutOfMemoryError" in text
    assert "| Traceback (most recent call last):" in text and "micro_batch_sequences" in text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_facility_whose_file_system_takes_no_more_is_advised_so_in_our_words_and_in_its_own(number: int):
    error = OSError(number, os.strerror(number), "/scratch/a/update")
    assert advice_for(file_error_sentence(error, again=False)).startswith("a file system takes no more")
    if number != errno.EFBIG:  # which no command of a login node meets
        assert advice_for(f"tar: a: Cannot write: {os.strerror(number)}").startswith("a file system takes no more")


def test_a_round_is_explained_facility_by_facility(federation: Federation):
    text = said(federation, "round", "0")
    assert text.startswith("Round 0 is complete") and "facility-00 took part with weight 0.333" in text
    assert "facility-03 is out of round 0" in text and "What to do:" in text
    with pytest.raises(InputError, match="the next one is round 3"):
        said(federation, "round", "3")
    with pytest.raises(InputError, match="unknown key '2'.*`crossfed explain round 2` explains a round"):
        said(federation, "2")


def test_a_facility_that_has_left_is_explained_from_the_archive(federation: Federation):
    """It was "unknown key 'facility-03'", though its rounds are there."""
    text = federation.file.read_text()
    federation.file.write_text(text.replace("  - {name: facility-03, dataset: /data}\n", ""))
    for words in (["facility-03"], ["facility", "facility-03"]):
        told = said(federation, *words)
        assert "It took part in 2 of 3 complete rounds" in told and "It has left" in told
    with pytest.raises(InputError, match="facility 'facility-04'; the facilities are facility-00, .*facility-02$"):
        said(federation, "facility", "facility-04")


def test_a_word_that_may_be_a_facility_says_where_facilities_are_looked_for(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="unknown key 'north'.* no federation.yml .* in .*--federation"):
        explain_words(["north"])


@pytest.mark.parametrize("number", ["x", "²", "-1", "1.5", ""])
def test_a_round_that_is_no_number_is_asked_for(federation: Federation, number: str):
    with pytest.raises(InputError, match="is not a number"):
        said(federation, "round", number)


def test_what_comes_after_the_last_round_is_no_round(federation: Federation):
    """The evaluation of the final model goes by the next number in the journal: it is not a round that waits."""
    federation.file.write_text(federation.file.read_text().replace("rounds: 5", "rounds: 3"))
    Journal(federation.archive_path).append("verified", time=BEGIN + 1e6, facility="facility-00", round=3)
    for number in ("3", "4"):
        with pytest.raises(InputError, match=f"no round {number}: the rounds count from 0 to 2, and all are complete"):
            said(federation, "round", number)


def test_a_round_under_way_says_what_each_facility_is_waited_for(federation: Federation):
    journal, now = Journal(federation.archive_path), BEGIN + 1e6
    journal.append("queued", time=now, facility="facility-00", round=3, job="7")
    journal.append("started", time=now, facility="facility-01", round=3)
    journal.append("verified", time=now, facility="facility-02", round=3)
    reason = "left no update: its job was not taken, was cancelled, ran out of time, or lost its node"
    journal.append("refused", time=now, facility="facility-03", round=3, reason=reason)
    text = said(federation, "round", "3")
    assert "facility-00: its job waits in the queue" in text and "facility-01: its job has begun" in text
    assert "facility-02: its update is verified" in text and "sacct -j JOB" in text


def test_what_was_set_aside_by_a_rewind_is_not_under_way(federation: Federation):
    """Of a round that was to come again it was said that its updates are verified and it waits for aggregation."""
    journal = Journal(federation.archive_path)
    for number in (2, 3):
        journal.append("verified", time=BEGIN + 1e6, facility="facility-00", round=number)
    journal.append("refused", time=BEGIN + 1e6, facility="facility-01", round=3, reason="it was full of NaN")
    assert "its update is verified" in said(federation, "round", "3")
    assert "full of NaN" in said(federation, "facility-01")
    archive = Archive(federation.archive_path)
    archive.model_for(2).mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("coordinator.archive.rewind.verify_manifest", lambda _: None)
        rewind(archive, 2)
    for number in (2, 3):
        with pytest.raises(InputError, match=f"round {number} has not begun; the next one is round 2"):
            said(federation, "round", str(number))
    assert "full of NaN" not in said(federation, "facility-01")
    journal.append("started", time=time.time() + 1, facility="facility-00", round=2)
    assert "facility-00: its job has begun" in said(federation, "round", "2")


def test_a_round_that_was_stopped_says_that_no_run_goes_on(federation: Federation):
    """Only what was said of a facility told so; of a round, its jobs were at work after Ctrl-C, too."""
    Journal(federation.archive_path).append("started", time=BEGIN + 1e6, facility="facility-00", round=3)
    assert "No run goes on" in said(federation, "round", "3").splitlines()[1]


def test_a_stuck_job_and_a_refused_login_are_named_until_they_pass(federation: Federation):
    journal, now = Journal(federation.archive_path), BEGIN + 1e6
    journal.append("stuck", time=now, facility="facility-00", job="9", reason="JobHeldUser", advice="release 9")
    journal.append("login_refused", time=now + 1, facility="facility-00", reason="Permission denied")
    text = said(federation, "facility", "facility-00")
    assert "job 9 will not begin by itself (JobHeldUser)" in text and "release 9" in text
    assert "`crossfed login facility-00`" in text
    journal.append("login_works", time=now + 2, facility="facility-00")
    journal.append("started", time=now + 3, facility="facility-00")
    text = said(federation, "facility-00")
    assert "will not begin" not in text and "crossfed login" not in text


def test_a_job_that_was_given_up_says_what_it_waited_for_and_not_that_somebody_cancelled_it(federation: Federation):
    """The run itself had cancelled it, and its user was to ask the site's staff who had."""
    journal, now, who = Journal(federation.archive_path), BEGIN + 1e6, {"facility": "facility-00", "round": 3}
    journal.append("queued", time=now, job="17", **who)
    journal.append("stuck", time=now, facility="facility-00", job="17", reason="JobHeldUser", advice="release 17")
    journal.append("stuck", time=now, facility="facility-01", job="18", reason="PartitionDown", advice="wait")
    journal.append("trained", time=now + 1, code=7, problem="did not end well: CANCELLED, exit code 0", **who)
    journal.append("refused", time=now + 2, reason=ABSENT, **who)
    for text in (said(federation, "facility-00"), said(federation, "round", "3")):
        assert "could not begin by itself (JobHeldUser)" in text and "waits for that, too: release 17" in text
        assert "somebody cancelled" not in text and "PartitionDown" not in text
    journal.append("queued", time=now + 3, job="19", **who)
    assert "somebody cancelled" in said(federation, "round", "3")


ABSENT = "left no update: its job was not taken, was cancelled, ran out of time, or lost its node"
UNSIGNED = "no valid signature of facility-00 over manifest.json by a key of allowed_signers"
KILLED = "rank 1 was killed (SIGKILL): out of memory, or ended by the scheduler"
DIVERGED = "tensor 'model.embed_tokens.weight' holds weights that are not finite: training diverged"


@pytest.mark.parametrize(
    ("ended", "reason", "said_to_do"),
    [
        ("TIMEOUT, exit code 0, signal 15", ABSENT, "time limit: ask for more"),
        ("OUT_OF_MEMORY, exit code 0, signal 125", ABSENT, "ended the job for its memory"),
        ("NODE_FAIL, exit code 1", ABSENT, "a node failed"),
        ("CANCELLED, exit code 0, signal 15", ABSENT, "cancelled the job"),
        ("PREEMPTED, exit code 0, signal 15", ABSENT, "another job took its nodes"),
        (
            "exit status 137, failed 37  : qmaster enforced h_rt, h_cpu, or h_vmem limit",
            ABSENT,
            "time limit: ask for more",
        ),
        ("", ABSENT, "ended from outside"),
        ("", KILLED, "needs more memory"),
        ("", DIVERGED, "lower `learning_rate`"),
        ("", "every step of the round was skipped: no loss was finite", "lower `learning_rate`"),
        ("", "every one of the round's 3 steps was skipped: gradients overflowed float16", "`compute_dtype: bfloat16`"),
        ("", "rank 0 will need about 9 GB of memory (weights 9 GB), it has 4 GB", "needs more memory"),
        ("", "the received model's loss on the validation data is nan", "lower `learning_rate`"),
        ("", "tensor 'lm_head.weight' holds NaN or infinity", "lower `learning_rate`"),
        ("", "the loss is nan at step 3", "lower `learning_rate`"),
        ("", "the ownership of the assigned folder is another's", "read the log lines"),
        ("", "round-2/m.safetensors was altered: restore it from a copy, or remove round-2", "what the reason says"),
        ("", "rank 1 ended with exit code 2: train with layout.stages 1", "what the reason says"),
        ("", "HIP error: invalid device function", "the GPU's software"),
        ("", UNSIGNED, "`aggregation.allowed_signers` names"),
        ("", "it claims 9 tokens in round 3, its settings allow 5 (steps x batch)", "claims.sequence_tokens"),
        ("", "not done when the round closed: its job goes on, and its update is discarded", "did not wait for it"),
        ("", "model.safetensors has sha256 aa, the manifest says bb", "not what was sent"),
    ],
)
def test_every_way_to_be_left_out_has_its_own_way_back(
    ended: str, reason: str, said_to_do: str, federation: Federation
):
    """The scheduler's account of the job counts more than what can be guessed from an update that is not there."""
    journal, now = Journal(federation.archive_path), BEGIN + 1e6
    who = {"facility": "facility-00", "round": 3}
    journal.append("queued", time=now, job="17", **who)
    journal.append(
        "trained", time=now + 1, code=7, **who, **({"problem": f"did not end well: {ended}"} if ended else {})
    )
    journal.append("refused", time=now + 2, reason=reason, **who)
    journal.append("log", time=now + 2, lines=["step 4/10", "the last words"], **who)
    for text in (said(federation, "facility-00"), said(federation, "round", "3")):
        assert f"facility-00 is out of round 3: {reason}" in text and "    | the last words" in text
        assert ("job 17 did not end well" in text) == bool(ended)
        assert said_to_do in text.split("What to do: ")[1].splitlines()[0], text


def test_a_federation_that_cannot_be_read_is_named_where_a_word_may_be_a_facility_of_it(tmp_path: Path):
    with pytest.raises(InputError, match=r"unknown key 'a'.*not known: .*: is a folder; name the file"):
        explain_words(["a"], tmp_path)


def test_keys_are_explained_as_before_and_nonsense_is_refused(federation: Federation):
    assert "sync" in explain_words(["training.sync.policy"]) and "rounds:" in explain_words([])
    for words in ([], ["training.sync.policy"]):
        with pytest.raises(InputError, match="--federation has no effect"):
            said(federation, *words)
    with pytest.raises(InputError, match="facilities are facility-00"):
        said(federation, "facility-99")
    with pytest.raises(InputError, match="not a number"):
        said(federation, "round", "x")
