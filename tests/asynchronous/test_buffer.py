"""Facilities' chains meet at the coordinator: in either order, alone, killed, failing, coming back, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from coordinator.asynchronous.buffer import Meeting, Next
from coordinator.asynchronous.semidecentral import SemiDecentralised
from coordinator.asynchronous.submit import meet
from coordinator.asynchronous.summary import summary, table
from coordinator.config.buffering import GroupSettings
from coordinator.config.settings import CoordinatorSettings
from coordinator.engine.supervise import children
from coordinator.steps.start import start
from facility.exchange.errors import InputError, TryAgain
from facility.exchange.files.durable import write_json
from facility.exchange.messages import report as reports
from facility.exchange.messages.manifest import read_manifest
from tests.asynchronous.test_semidecentral import make_update, weights_of
from tests.conftest import ROOT
from tests.pico import save_pico

SEEDS = {"a": 1, "b": 2, "c": 3}


def begun(root: Path, names: str = "ab", *, rounds: int = 2, **changes: object) -> Meeting:
    """The groups of a federation of facilities `a`, `b`, ... that has just begun."""
    keys = {key: changes.pop(key) for key in list(changes) if key in ("bound", "minimum", "maximum", "window_seconds")}
    settings = CoordinatorSettings(
        federation="f",
        rounds=rounds,
        facilities=list(names),
        groups=GroupSettings(**keys),  # type: ignore[arg-type]
        aggregation=AggregationSettings(weights="equal"),
        **changes,  # type: ignore[arg-type]
    )
    (root / "disk").mkdir()
    (root / "archive").symlink_to(root / "disk")  # as archives on a larger file system are
    meeting = Meeting(Archive(root / "archive"), settings)
    meeting.begin(save_pico(root / "model", seed=0))
    return meeting


def update(root: Path, name: str, round: int) -> Path:
    directory = root / f"update-{name}-{round}"
    if not directory.exists():
        make_update(directory, name, tokens=100, seed=SEEDS[name] + 10 * round, round=round)
    return directory


def failure(root: Path, name: str, round: int, reason: str = "the node burnt down", again: bool = False) -> Path:
    directory = root / f"failure-{name}-{round}"
    directory.mkdir(exist_ok=True)
    reports.write(directory, reports.Failure(facility=name, round=round, reason=reason, again=again))
    return directory


def arrives(meeting: Meeting, root: Path, name: str, round: int) -> Next:
    return meet(meeting, name, round=round, received=update(root, name, round), poll_seconds=0.02)


def assert_mean(model: Path, *updates: Path) -> None:
    parts = [weights_of(directory) for directory in updates]
    for name, found in weights_of(model).items():
        torch.testing.assert_close(found, sum(part[name] for part in parts) / len(parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_two_that_arrive_in_either_order_go_on_from_their_mean(tmp_path: Path, order: str):
    meeting = begun(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(arrives, meeting, tmp_path, order[0], 0)
        while order[0] not in meeting.driver().scheduler.waiting:
            time.sleep(0.02)
        assert not first.done()
        second = arrives(meeting, tmp_path, order[1], 0)
        answers = [first.result(20), second]
    assert [(one.round, one.proceed) for one in answers] == [(1, True)] * 2
    assert answers[0].model == answers[1].model
    assert_mean(second.model, update(tmp_path, "a", 0), update(tmp_path, "b", 0))


def test_one_alone_goes_on_alone_when_its_window_has_passed(tmp_path: Path):
    meeting = begun(tmp_path, minimum=1, window_seconds=0.5)
    began = time.monotonic()
    answer = arrives(meeting, tmp_path, "a", 0)
    assert time.monotonic() - began >= 0.5 and (answer.round, answer.proceed) == (1, True)
    assert_mean(answer.model, update(tmp_path, "a", 0))


def test_what_arrives_twice_counts_once(tmp_path: Path):
    meeting = begun(tmp_path)
    assert meeting.arrive("a", 0, update(tmp_path, "a", 0)) == []
    assert meeting.arrive("a", 0, update(tmp_path, "a", 0)) == []  # waiting
    arrives(meeting, tmp_path, "b", 0)
    answer = arrives(meeting, tmp_path, "a", 0)  # done
    assert (answer.round, answer.proceed) == (1, True)
    driver = meeting.driver()
    assert (len(driver.groups), driver.scheduler.updates, driver.rounds) == (1, 2, {"a": 1, "b": 1})


def test_killed_between_the_mean_and_the_state_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    meeting = begun(tmp_path)
    meeting.arrive("a", 0, update(tmp_path, "a", 0))

    def die(self: SemiDecentralised) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(SemiDecentralised, "save", die)
        meeting.arrive("b", 0, update(tmp_path, "b", 0))
    assert (meeting.place / "group-000001").is_dir() and meeting.driver().groups == []
    meeting.begin(tmp_path / "model")
    assert meet(meeting, "b").round == 0  # its update was not announced: it is asked for again
    answer = arrives(meeting, tmp_path, "b", 0)
    assert meeting.driver().rounds == {"a": 1, "b": 1}
    assert_mean(answer.model, update(tmp_path, "a", 0), update(tmp_path, "b", 0))


def command(meeting: Meeting, root: Path, name: str, *words: object) -> subprocess.Popen[str]:
    """The step as the engine calls it, in a directory of its own."""
    write_json(root / "coordinator.json", asdict(meeting.settings))
    job = root / f"job-{name}-{time.monotonic_ns()}"
    job.mkdir()
    line = [
        sys.executable,
        "-m",
        "coordinator.asynchronous.submit",
        "--federation",
        root / "coordinator.json",
        "--archive",
        meeting.archive.path,
        "--facility",
        name,
        *words,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [str(word) for word in line], cwd=job, env=environment, text=True, stdout=subprocess.PIPE
    )
    process.job = job  # type: ignore[attr-defined]
    return process


def outputs(process: subprocess.Popen[str]) -> tuple[dict, Path]:
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    job: Path = process.job  # type: ignore[attr-defined]
    return json.loads((job / "cwl.output.json").read_text()), job / "model"


def test_a_killed_step_is_made_again_by_the_next_run_without_another_update(tmp_path: Path):
    meeting = begun(tmp_path)
    killed = command(meeting, tmp_path, "a", "--round", 0, "--update", update(tmp_path, "a", 0))
    while "a" not in meeting.driver().scheduler.waiting:
        time.sleep(0.05)
    deadline = time.monotonic() + 20
    while killed.pid in children(os.getpid()):  # who waits is no sign that the engine is at work
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    meeting.begin(tmp_path / "model")
    again = command(meeting, tmp_path, "a")  # how a chain begins: it waits where it waited
    answer = arrives(meeting, tmp_path, "b", 0)
    told, model = outputs(again)
    assert (told["round"], told["proceed"]) == (1, True)
    assert meeting.driver().scheduler.updates == 2
    mine, theirs = read_manifest(model), read_manifest(answer.model)
    assert (mine.round, mine.facility, mine.content_sha256) == (1, "a", theirs.content_sha256)
    assert theirs.facility is None


def test_a_step_of_an_earlier_run_stops_waiting(tmp_path: Path):
    meeting = begun(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(arrives, meeting, tmp_path, "a", 0)
        while "a" not in meeting.driver().scheduler.waiting:
            time.sleep(0.02)
        meeting.begin(tmp_path / "model")
        with pytest.raises(TryAgain, match="the run that a waited in is over"):
            waits.result(20)


def test_nobody_waits_for_one_that_failed_and_it_comes_back(tmp_path: Path):
    meeting = begun(tmp_path, "abc", bound=1, retries=1)  # every group is everybody
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(arrives, meeting, tmp_path, name, 0) for name in "ab"]
        while len(meeting.driver().scheduler.waiting) < 2:
            time.sleep(0.02)
        answer = meet(meeting, "c", round=0, received=failure(tmp_path, "c", 0))
        assert (answer.round, answer.proceed) == (0, True)
        first = others[0].result(20)
        assert answer.model == first.model, "it receives first"
        others = [pool.submit(arrives, meeting, tmp_path, name, 1) for name in "ab"]
        while len(meeting.driver().scheduler.waiting) < 2 and not others[0].done():
            time.sleep(0.02)
        [one.result(20) for one in others]
    driver = meeting.driver()
    assert [group["members"] for group in driver.groups] == [["a", "b"], ["a", "b"]]
    assert driver.final == "", "the final mean waits for those that will come back"
    answer = arrives(meeting, tmp_path, "c", 0)
    assert (answer.round, answer.proceed) == (1, True)
    assert not arrives(meeting, tmp_path, "c", 1).proceed
    driver = meeting.driver()
    assert_mean(Path(driver.final), *(update(tmp_path, name, 1) for name in "abc"))
    assert [failure["reason"] for failure in driver.failures] == ["the node burnt down"]


def test_after_its_retries_a_chain_ends_and_the_others_go_on(tmp_path: Path):
    meeting = begun(tmp_path, "abc", bound=1, rounds=1, retries=1)
    assert meet(meeting, "c", round=0, received=failure(tmp_path, "c", 0, "no such file")).proceed
    gone = meet(meeting, "c", round=0, received=failure(tmp_path, "c", 0, "still none"))
    assert not gone.proceed and "round 0, attempt 2: still none" in gone.why
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(arrives, meeting, tmp_path, name, 0) for name in "ab"]
        assert not any(one.result(20).proceed for one in ended)
    data = summary(meeting.archive)
    assert data["model"] and {n: f["status"] for n, f in data["facilities"].items()} == {
        "a": "done",
        "b": "done",
        "c": "out",
    }
    assert data["facilities"]["c"]["reason"] == "still none" and len(data["facilities"]["c"]["failures"]) == 2
    assert table(data).row_count == 2 + 2 + 1


def test_one_that_wants_more_time_stays(tmp_path: Path):
    meeting = begun(tmp_path, rounds=1, come_backs=1)
    answer = meet(meeting, "a", round=0, received=failure(tmp_path, "a", 0, "ran out of time", again=True))
    assert answer.proceed and answer.model == meeting.archive.model_for(0).resolve()
    assert meeting.driver().scheduler.members == ("a", "b")


def test_too_few_facilities_end_every_chain_and_the_last_step_says_why(tmp_path: Path):
    meeting = begun(tmp_path, minimum_facilities=2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(arrives, meeting, tmp_path, "a", 0)
        gone = meet(meeting, "b", round=0, received=failure(tmp_path, "b", 0))
        assert not gone.proceed and not waits.result(20).proceed
    write_json(tmp_path / "coordinator.json", asdict(meeting.settings))
    line = [
        "-m",
        "coordinator.steps.report",
        "--federation",
        "coordinator.json",
        "--archive",
        str(meeting.archive.path),
        "--out",
        "s.json",
    ]
    result = subprocess.run(
        [sys.executable, *line],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert (
        "1 of 2 facilities are left, minimum_facilities is 2: b: round 0, attempt 1: the node burnt down"
        in result.stderr
    )
    assert json.loads((tmp_path / "s.json").read_text())["model"] is None
    meeting.begin(tmp_path / "model")  # the same command asks both again
    assert meet(meeting, "b").proceed


def chain(meeting: Meeting, root: Path, name: str, seconds: float = 0.0) -> Next:
    """A facility's whole chain: `begin`, then rounds of `seconds` until it ends."""
    answer = meet(meeting, name, poll_seconds=0.02)
    while answer.proceed:
        time.sleep(seconds)
        answer = arrives(meeting, root, name, answer.round)
    return answer


def test_whole_chains_end_in_the_mean_over_all_and_once_ended_nothing_is_left_to_do(tmp_path: Path):
    meeting = begun(tmp_path, "abc", rounds=4, bound=2, minimum=1, window_seconds=0.1, keep_rounds=1)
    with ThreadPoolExecutor(3) as pool:
        chains = [pool.submit(chain, meeting, tmp_path, name, 0.5 if name == "c" else 0.0) for name in "abc"]
        ends = [one.result(60) for one in chains]
    assert [(one.round, one.proceed) for one in ends] == [(4, False)] * 3
    data = summary(meeting.archive)
    *groups, final = data["groups"]
    assert final["final"] and not any(group["final"] for group in groups)
    for name in "abc":
        counts = [group["rounds"][name] for group in groups if name in group["members"]]
        assert counts == [1, 2, 3, 4], "every update counts once"
    assert any("c" not in group["members"] for group in groups), "nobody waits for the slowest"
    assert all(sum(group["weights"].values()) == pytest.approx(1) for group in data["groups"])
    assert_mean(Path(data["model"]), *(update(tmp_path, name, 3) for name in "abc"))
    kept = {path.name for path in meeting.place.glob("group-*") if path.is_dir()}
    assert kept == {Path(data["model"]).name}
    assert len(list((meeting.place / "updates").iterdir())) == 3
    model, count, proceed = start(meeting.archive, tmp_path / "model", meeting.settings)
    assert (model, count, proceed) == (Path(data["model"]), len(data["groups"]), False)
    assert all(not meet(meeting, name).proceed for name in "abc")


def test_chains_killed_half_way_go_on_from_the_round_they_had_reached(tmp_path: Path):
    meeting = begun(tmp_path, rounds=3)
    with ThreadPoolExecutor(2) as pool:
        [one.result(20) for one in [pool.submit(arrives, meeting, tmp_path, name, 0) for name in "ab"]]
    meeting.arrive("a", 1, update(tmp_path, "a", 1))
    again = begun_again(meeting, tmp_path)
    stands = {name: again.next(again.driver(), name) for name in "ab"}
    assert stands["a"] is None and stands["b"] is not None and stands["b"].round == 1
    with ThreadPoolExecutor(2) as pool:
        chains = [pool.submit(chain, again, tmp_path, name) for name in "ab"]
        assert [one.result(20).round for one in chains] == [3, 3]
    assert [group["members"] for group in again.driver().groups] == [["a", "b"]] * 4
    assert again.driver().scheduler.updates == 6


def begun_again(meeting: Meeting, root: Path) -> Meeting:
    again = Meeting(Archive(meeting.archive.path), meeting.settings)
    again.begin(root / "model")
    return again


def test_an_archive_that_does_not_fit_is_refused(tmp_path: Path):
    meeting = begun(tmp_path)
    for changes, words in (
        ({"facilities": ["a", "c"]}, "was begun with facilities a, b, federation.yml has a, c"),
        ({"aggregation": AggregationSettings()}, "was begun with weights equal"),
        ({"federation": "other"}, "belongs to federation 'f', not 'other'"),
        ({"groups": None}, "holds groups, rounds cannot go on from them"),
    ):
        with pytest.raises(InputError, match=words):
            start(meeting.archive, tmp_path / "model", replace(meeting.settings, **changes))
    with ThreadPoolExecutor(2) as pool:
        [one.result(30) for one in [pool.submit(chain, meeting, tmp_path, name) for name in "ab"]]
    with pytest.raises(
        InputError, match="has finished after 2 rounds, federation.yml now has 3: choose another archive"
    ):
        start(meeting.archive, tmp_path / "model", replace(meeting.settings, rounds=3))


def test_a_step_that_cannot_go_on_ends_well_and_stops_the_federation(tmp_path: Path):
    meeting = begun(tmp_path)
    update(tmp_path, "a", 0)
    (meeting.place / "updates").write_text("in the way")
    told, _ = outputs(command(meeting, tmp_path, "a", "--round", 0, "--update", update(tmp_path, "a", 0)))
    assert not told["proceed"] and "updates" in meeting.archive.read_note("stopped")["reason"]


def test_many_at_once(tmp_path: Path):
    """Steps of different facilities at the same moment change the state one after the other."""
    meeting = begun(tmp_path, "abc", rounds=1, bound=1)
    barrier = threading.Barrier(3)

    def one(name: str) -> Next:
        path = update(tmp_path, name, 0)
        barrier.wait(20)
        return meet(meeting, name, round=0, received=path, poll_seconds=0.01)

    with ThreadPoolExecutor(3) as pool:
        assert [answer.proceed for answer in pool.map(one, "abc")] == [False] * 3
    assert [group["members"] for group in meeting.driver().groups] == [["a", "b", "c"]] * 2
