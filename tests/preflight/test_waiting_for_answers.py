"""A command that has nothing else to say for a while says what it waits for."""

from __future__ import annotations

import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

from coordinator import console
from coordinator.commands.run import run
from coordinator.engine import run as engine
from coordinator.preflight import check, coordinator
from tests.federations import write_federation


def test_whoever_is_missing_is_told_until_all_have_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "REPORT_SECONDS", 0.02)
    gates = {name: threading.Event() for name in ("leonardo", "lumi", "vega")}
    gates["leonardo"].set()
    told: list[str] = []

    def heard(text: str) -> None:
        told.append(text)
        gates["lumi" if len(told) == 1 else "vega"].set()

    def answer(name: str) -> str:
        assert gates[name].wait(20)
        return name

    with ThreadPoolExecutor() as pool:
        found = check.answers({name: pool.submit(answer, name) for name in gates}, heard)
    assert found == list(gates)
    assert told[0].endswith("waiting for lumi, vega") and "of 3 facilities answered" in told[0]
    assert all("vega" in one for one in told)


def test_quick_answers_need_no_word():
    told: list[str] = []
    with ThreadPoolExecutor() as pool:
        assert check.answers({"leonardo": pool.submit(int, 3)}, told.append) == [3] and not told


def test_a_sentence_that_does_not_change_is_told_at_every_third_time(monkeypatch: pytest.MonkeyPatch):
    """In a log nothing takes the place of the line before. A change is told at once, silence in between or not."""
    monkeypatch.setattr(console, "REPORT_SECONDS", 0.001)
    sentences = iter(["waiting for a, b"] * 7 + ["waiting for b"] * 2 + ["", "waiting for b", "", ""])
    all_asked, told = threading.Event(), list[str]()

    def sentence() -> str:
        if (text := next(sentences, None)) is None:
            all_asked.set()
        return text or ""

    with console.reported_meanwhile(sentence, told.append):
        assert all_asked.wait(20)
    assert told == ["waiting for a, b"] * 3 + ["waiting for b"] * 2


def test_a_run_says_that_it_checks_what_it_needs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Models of many parameters are built without values to compare names, and archives may lie on slow disks."""
    said = threading.Event()

    class Heard(io.StringIO):
        def write(self, text: str) -> int:
            if "are being checked" in text:
                said.set()
            return super().write(text)

    monkeypatch.setattr(console, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(sys, "stderr", Heard())
    monkeypatch.setattr(coordinator, "failing_here", lambda _: [] if said.wait(20) else ["nothing was said"])
    monkeypatch.setattr(engine, "run_federation", lambda *_, **__: 0)
    path = write_federation(tmp_path, ["a"])
    (tmp_path / "model").mkdir(exist_ok=True)
    with pytest.raises(typer.Exit) as ended:
        run(path, quiet=True, log=None, despite_check=False, accept=False)
    assert ended.value.exit_code == 0


def test_a_check_says_that_it_looks_at_the_model_once_facilities_have_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It imports transformers, and for a pipeline starts a process that imports torch, on a login node's disk."""
    said = threading.Event()

    def heard(text: str) -> None:
        if "is being looked at" in text:
            said.set()

    monkeypatch.setattr(console, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(check, "check_here", lambda _: ([], object()))
    monkeypatch.setattr(check, "check_facility", lambda *_, **__: ([], None))
    monkeypatch.setattr(check, "check_fitting", lambda *_: [] if said.wait(20) else pytest.fail("nothing was said"))
    rows = check.check(write_federation(tmp_path, ["a"]), progress=heard)
    assert said.is_set() and "fail" not in {row.verdict for row in rows if row.check == "federation.yml"}
