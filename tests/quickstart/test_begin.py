"""Quickstart from first to last: the same command goes on, and what it adds to a file leaves the rest as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.config.deployments import Deployment
from coordinator.quickstart import begin as beginning
from coordinator.quickstart import host_keys
from coordinator.quickstart.begin import Request, begin
from coordinator.quickstart.describe import Round
from coordinator.quickstart.dialog import Dialog
from tests.training.federation import write_dataset

FINGERPRINT = "SHA256:" + "a" * 43


@pytest.mark.parametrize("prepared", [True, False])
def test_the_same_command_prepares_the_same_again(prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Text is prepared, which finds a dataset that it made; a dataset that was prepared before never is."""
    data = tmp_path / "data"
    write_dataset(data) if prepared else data.write_text("text")
    texts: list[str] = []

    def equip(federation: Any, facility: Any, survey: Any, text: str, *rest: Any) -> int:
        texts.append(text)
        return 64

    monkeypatch.setattr(beginning, "equip", equip)
    monkeypatch.setattr(beginning, "share", lambda *_, **__: [])
    monkeypatch.setattr(beginning, "model_figures", lambda _: SimpleNamespace(positions=16))
    monkeypatch.setattr(beginning, "_model", lambda *_: tmp_path / "fed" / "model")
    request = Request(
        folder=tmp_path / "fed",
        name="heron",
        facilities={"here": "local"},
        model="demo",
        data={"here": str(data)},
        plan=Round(rounds=1),
        block_tokens=16,
    )
    for _ in range(2):
        begin(request, Dialog(given={}, yes=True))
    assert texts == ["" if prepared else str(data)] * 2


@pytest.mark.parametrize("before", ["", "a ssh-ed25519 AAAA\n", "a ssh-ed25519 AAAA"])
def test_a_host_key_is_a_line_of_its_own(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_keys, "scan", lambda _: ["b ssh-ed25519 BBBB"])
    monkeypatch.setattr(host_keys, "fingerprint_of", lambda _: FINGERPRINT)
    known = tmp_path / "known_hosts"
    known.write_text(before)
    login = Deployment(type="ssh", host="b", workdir="/w", known_hosts=str(known))
    assert host_keys.trust(Dialog(given={"far.host-key": FINGERPRINT}, yes=True), "far", login)
    assert known.read_text().splitlines() == [*before.splitlines(), "b ssh-ed25519 BBBB"]
