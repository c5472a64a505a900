"""What was written is there after a power cut: synchronised before it is moved or relied on, its names as well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from facility.exchange.files import audit_log
from facility.exchange.files.durable import new_directory, write_json
from facility.masking.ledger import AnswerLedger
from facility.masking.ledger import Entry as Answer
from facility.preparing.packing import RowWriter
from facility.rounds.privacy_ledger import Entry, ReleaseLedger
from facility.rounds.smaller import keep_pending, pending_residual


class Disk:
    """What a power cut leaves of a tree: of each file and directory what it held when it was last synchronised."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.kept = root, {}
        for path in [root, *root.rglob("*")]:
            self._keep(path)
        monkeypatch.setattr(os, "fsync", lambda file: self._keep(Path(os.readlink(f"/proc/self/fd/{file}"))))

    def _keep(self, path: Path) -> None:
        self.kept[path.stat().st_ino] = self._held(path)

    def _held(self, path: Path) -> bytes | dict[str, int]:
        return {one.name: one.stat().st_ino for one in path.iterdir()} if path.is_dir() else path.read_bytes()

    def lost(self) -> list[str]:
        """What is not there as it is now, after a power cut."""
        paths = [self.root, *(one for one in self.root.rglob("*") if one.suffix != ".lock")]
        return [str(one.relative_to(self.root)) for one in paths if self.kept.get(one.stat().st_ino) != self._held(one)]


def a_directory(place: Path) -> None:
    with new_directory(place / "update") as made:
        (made / "inner").mkdir()
        (made / "inner" / "tensors").write_bytes(b"x" * 10_000)


def a_ledger_of_releases(place: Path) -> None:
    ledger = ReleaseLedger(state=place)
    ledger.open()
    ledger.record(Entry(kind="training", round=0, unit="document", noise_multiplier=1.0, sampling_rate=0.1))
    ledger.close()


def an_answer(place: Path) -> None:
    AnswerLedger(state=place).record(
        Answer(run="r", round=0, base_sha256="m", generation="g", request="q", survivors=["a", "b"])
    )


def a_line_of_the_audit_log(place: Path) -> None:
    audit_log.append(place / "log", "asked", command="squeue")
    audit_log.append(place / "log", "asked", command="sbatch")


def a_residual(place: Path) -> None:
    keep_pending(place, 0)


CASES: dict[str, Callable[[Path], None]] = {
    "file": lambda place: write_json(place / "round.json", {"round": 1}),
    "directory": a_directory,
    "ledger of releases": a_ledger_of_releases,
    "answer": an_answer,
    "audit log": a_line_of_the_audit_log,
    "residual": a_residual,
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_written_outlasts_a_power_cut(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pending_residual(tmp_path).mkdir(parents=True)
    for name in ("seal.json", "model.safetensors"):
        (pending_residual(tmp_path) / name).write_bytes(b"{}")
    (tmp_path / "round.json").write_text("{}")
    disk = Disk(tmp_path, monkeypatch)
    CASES[case](tmp_path)
    assert disk.lost() == []


def test_blocks_are_on_disk_before_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = RowWriter(tmp_path / "train.npy", 4)
    disk = Disk(tmp_path, monkeypatch)
    writer.append(numpy.arange(8))
    writer.sync()
    assert disk.lost() == [] and (tmp_path / "train.npy").stat().st_size > 32
    writer.close()
