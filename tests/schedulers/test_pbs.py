"""PBS by its own answers: a job has ended only when PBS says so."""

from __future__ import annotations

import pytest

from coordinator.schedulers.pbs import SCHEDULER as PBS
from coordinator.schedulers.scheduler import FORGOTTEN
from tests.schedulers.recordings import recorded


def ended(name: str, *ids: str) -> list[str]:
    found = recorded(name)
    answers = {tuple(PBS.ended(PBS.read_states(text, found.code, ids), ids)) for text in found.texts}
    assert len(answers) == 1, "the order of the streams does not matter"
    return list(answers.pop())


@pytest.mark.parametrize(
    ("answer", "ids", "expected"),
    [
        ("pbs-qstat-f-json-nohistory-running-plus-ended", ["40.pbshead", "38.pbshead"], ["38.pbshead"]),
        ("pbs-qstat-f-json-ended-with-history", ["36.pbshead"], ["36.pbshead"]),
        ("pbs-qstat-f-unknown", ["99.pbshead"], ["99.pbshead"]),
        ("pbs-down-qstat", ["36.pbshead"], []),
        # history off: `qstat -x` answers with code 0 and no job, whether it is queued, running or ended
        ("pbs-qstat-nohistory-running-json", ["1.pbshead"], []),
        ("pbs-qstat-nohistory-ended-json", ["0.pbshead"], []),
        ("pbs-qstat-walltime-json", ["34.pbshead"], []),
        ("pbs-qstat-f-json", [f"{n}.pbshead" for n in (10, 11, 12, 14, 16, 17, 18, 19, 20)], []),
    ],
)
def test_only_what_pbs_names_has_ended(answer: str, ids: list[str], expected: list[str]):
    assert ended(answer, *ids) == expected


def test_what_is_asked_is_what_was_recorded():
    asked = recorded("pbs-qstat-f-json-nohistory-running-plus-ended").command
    assert PBS.query(["40.pbshead", "38.pbshead"]) == asked
    assert PBS.query_ending("28.pbshead") == recorded("pbs-qstat-cancelled-run-json").command


@pytest.mark.parametrize(
    ("answer", "id", "code", "step"),
    [
        ("pbs-qstat-xf-ended-json", "3.pbshead", None, None),
        ("pbs-qstat-crash-json", "36.pbshead", None, None),
        ("pbs-qstat-cancelled-run-json", "28.pbshead", 271, 7),
        ("pbs-qstat-timelimit-json", "24.pbshead", -29, 7),
        ("pbs-qstat-nohistory-ended-json", "0.pbshead", None, 7),
        ("pbs-qstat-xf-json-unknown-with-history", "999.pbshead", None, 7),
    ],
)
def test_how_a_job_ended(answer: str, id: str, code: int | None, step: int | None):
    found = recorded(answer)
    ending = PBS.read_ending(found.texts[0], found.code, id)
    assert ending is not None
    if step is None:  # the recorded federation's jobs: whatever they ended with, it is told as it was
        assert ending.code == int(found.out.partition('"Exit_status":')[2].split(",")[0])
        assert ending.output.startswith("/home/alice/")
    else:
        assert (ending.code, ending.step_code) == (code, step) and ending.problem


@pytest.mark.parametrize("answer", ["pbs-qstat-walltime-json", "pbs-qstat-xf-running-json", "pbs-down-qstat"])
def test_a_running_job_and_a_silent_server_tell_no_ending(answer: str):
    found = recorded(answer)
    for id in ("34.pbshead", "3.pbshead", "36.pbshead"):
        assert PBS.read_ending(found.texts[0], found.code, id) is None


def odd(text: str, *lines: str) -> str:
    """The answer of a PBS before 2021 whose jobs have these lines in their environments."""
    head = '"Variable_List":\t{\n'
    assert head in text
    return text.replace(head, head + "".join(f"\t\t\t\t{line}\n" for line in lines))


@pytest.mark.parametrize(
    "line",
    [
        '"N":005,',
        r'"QUOTED":"a\,b \'c\'",',
        '"BASH_FUNC_module()":"() {  eval "$(modulecmd bash)"\n}",',
        '"BASH_FUNC_x()":"() { echo "{"\n},\n\t}\n}",',
    ],
)
def test_an_environment_that_is_not_json_hides_no_job(line: str):
    text, ids = recorded("pbs-qstat-f-json").out, [f"{n}.pbshead" for n in (10, 11, 12, 14, 16, 17, 18, 19, 20)]
    changed = odd(text, line)
    assert PBS.is_answer(changed, 0)
    assert PBS.read_listing(changed) == PBS.read_listing(text) != []
    assert PBS.read_states(changed, 0, ids) == PBS.read_states(text, 0, ids)
    ended = recorded("pbs-qstat-cancelled-run-json")
    expected = PBS.read_ending(ended.out, ended.code, "28.pbshead")
    assert expected is not None and PBS.read_ending(odd(ended.out, line), ended.code, "28.pbshead") == expected


def test_jobs_that_cannot_be_read_are_asked_for_again():
    text = recorded("pbs-qstat-f-json").out
    assert PBS.is_answer(text, 0) and PBS.is_answer("Welcome to the { cluster }\n", 0)
    assert not PBS.is_answer(text[: len(text) // 2], 0), "an answer that was cut off does not say that no job is there"


def test_waiting_jobs_come_with_reasons_and_advice():
    found = recorded("pbs-qstat-f-json")
    jobs = {job.id.partition(".")[0]: job for job in PBS.read_listing(found.out)}
    assert {id for id, job in jobs.items() if job.began} == {"10", "11"}
    assert jobs["14"].reason.endswith("ncpus (R: 64 A: 4 T: 4)"), "JSON is not wrapped at 79 columns"
    advice = {id: PBS.what_to_do(job) for id, job in jobs.items()}
    assert "qrls 12.pbshead" in advice["12"] and "pbsnodes" in advice["14"] and "pbsnodes" in advice["16"]
    assert advice["10"] == advice["19"] == advice["17"] == ""


@pytest.mark.parametrize("name", ["qstat", "qselect", "qdel", "qsub"])
def test_a_server_that_is_down_is_silence(name: str):
    found = recorded(f"pbs-down-{name}")
    assert PBS.is_silence(found.err) and not PBS.is_answer(found.texts[0], found.code)


@pytest.mark.parametrize("name", ["pbs-qdel-ended", "pbs-qdel-unknown", "pbs-qsub-noqueue", "pbs-qsub-closed"])
def test_a_refusal_is_an_answer(name: str):
    assert not PBS.is_silence(recorded(name).err)


def test_a_jobs_own_words_are_not_the_servers():
    text = '{"Jobs": {"1.pbs": {"job_state": "R", "Variable_List": {"X": "qstat: Unknown Job Id 1.pbs"}}}}'
    assert PBS.ended(PBS.read_states(text, 0, ["1.pbs"]), ["1.pbs"]) == []
    assert PBS.read_states("", 0, ["1.pbs"]) == {} and PBS.read_states("[1]", 0, ["1.pbs"]) == {}


def test_the_id_of_a_submission_is_found_among_warnings():
    found = recorded("pbs-qsub-stdin")
    assert PBS.read_id("qsub: warning: something\n" + found.out) == "1.pbshead"
    assert PBS.read_id("qsub: something") == "" and FORGOTTEN not in PBS.terminal
