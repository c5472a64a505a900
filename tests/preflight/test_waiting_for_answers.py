"""While facilities have not answered, `crossfed check` says who is missing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.preflight import check


def test_whoever_is_missing_is_told_until_all_have_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "TOLD_SECONDS", 0.02)
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
    assert told[0].endswith("waiting for lumi, vega") and "of 3 facilities have answered" in told[0]
    assert all("vega" in one for one in told)


def test_quick_answers_need_no_word():
    told: list[str] = []
    with ThreadPoolExecutor() as pool:
        assert check.answers({"leonardo": pool.submit(int, 3)}, told.append) == [3] and not told
