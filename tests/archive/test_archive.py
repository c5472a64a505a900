"""The archive never holds half a round and never loses a whole one."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest

from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile, Wait
from coordinator.archive.summary import summary
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.start import start
from facility.exchange.errors import InputError, ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from tests.pico import save_pico

SETTINGS = CoordinatorSettings(federation="f", rounds=3, facilities=["a"])


def close(archive: Archive, number: int, loss: float = 2.0, **changes: object) -> None:
    """Append a round as if facility `a` had sent the model back unchanged."""
    rows = [FacilityRow(round=number, facility="a", status="ok", tokens=10)]
    with archive.append(number) as directory:
        save_pico(directory / "model", seed=number + 1)
        write_manifest(directory / "model", Manifest(kind="model", federation="f", round=number + 1))
        (directory / "state").mkdir()
        write_json(directory / "state" / "round.json", {})
        write_manifest(directory / "state", Manifest(kind="state", federation="f", round=number + 1))
        record = RoundFile(round=number, facilities=rows, global_loss=loss, decision="go on", **changes)  # type: ignore[arg-type]
        write_json(directory / "round.json", dataclasses.asdict(record))


def test_a_new_archive_begins_with_round_0_and_a_described_model(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    model, number, proceed = start(archive, pico_llama, SETTINGS)
    assert (number, proceed) == (0, True)
    manifest = read_manifest(model)
    assert (manifest.kind, manifest.federation, manifest.round) == ("model", "f", 0)


def test_start_goes_on_after_the_last_complete_round(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    close(archive, 0)
    model, number, proceed = start(archive, pico_llama, SETTINGS)
    assert (model, number, proceed) == (archive.round_directory(0) / "model", 1, True)


def test_what_a_killed_run_left_is_removed(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    half = archive.path / ".round-0000.abc.tmp"
    (half / "model").mkdir(parents=True)
    assert archive.rounds() == []
    start(archive, pico_llama, SETTINGS)
    assert not half.exists()


def test_an_exception_while_appending_leaves_nothing(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    with pytest.raises(ZeroDivisionError), archive.append(0) as directory:
        (directory / "model").mkdir()
        raise ZeroDivisionError
    assert archive.rounds() == [] and not list(archive.path.glob(".*"))


def test_after_the_last_round_only_the_evaluation_is_left(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    for number in range(3):
        close(archive, number)
    assert start(archive, pico_llama, SETTINGS)[1:] == (3, True)
    archive.write_note("evaluation", {"after_round": 2, "global_loss": 1.0, "facilities": []})
    assert start(archive, pico_llama, SETTINGS)[1:] == (3, False)
    more = dataclasses.replace(SETTINGS, rounds=5)  # a user raises the number of rounds: it goes on
    assert start(archive, pico_llama, more)[1:] == (3, True)


def test_an_early_end_stays_ended(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    close(archive, 0, ended=True)
    assert start(archive, pico_llama, SETTINGS)[1] == SETTINGS.rounds


def test_a_gap_in_the_rounds_is_told(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    close(archive, 0)
    archive.round_directory(0).rename(archive.round_directory(1))
    with pytest.raises(InputError, match=r"holds rounds \[1\], expected 0 to 0 without gaps"):
        start(archive, pico_llama, SETTINGS)


@pytest.mark.parametrize("name", ["round-0000/round.json", "evaluation.json"])
def test_what_may_not_be_read_is_not_called_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """No advice to go back a round, or to remove a file, for what lacks a permission alone."""
    archive = Archive(tmp_path / "archive")

    def denied(path: Path, *more, **others):
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match="correct its permissions") as caught:
        archive.read_round(0) if "/" in name else archive.read_note("evaluation")
    assert name in str(caught.value) and "rewind" not in str(caught.value) and "remove it" not in str(caught.value)


def test_a_damaged_model_is_told_before_a_node_hour_is_spent(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    close(archive, 0)
    weights = archive.round_directory(0) / "model" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(ManifestError, match="another sha256"):
        start(archive, pico_llama, SETTINGS)


def test_pruning_keeps_the_last_weights_and_every_account(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    for number in range(3):
        close(archive, number)
    archive.prune(2)
    assert [(archive.round_directory(n) / "model").exists() for n in range(3)] == [False, True, True]
    assert [entry.round for entry in archive.history()] == [0, 1, 2]


def test_the_history_has_every_field_of_every_row(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    for number in range(2):
        close(archive, number)
    rows = [row for entry in archive.history() for row in entry.facilities]
    lines = (archive.path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [dataclasses.asdict(row) for row in rows]


def test_the_summary_gives_a_round_the_perplexity_of_the_model_it_made(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    close(archive, 0, loss=0.0)
    close(archive, 1, loss=1.0)
    data = summary(archive)
    assert data["initial_perplexity"] == 1.0
    assert [entry["global_perplexity"] for entry in data["rounds"]] == [pytest.approx(2.718281828), None]


def test_what_auto_chose_as_the_grace_is_told_of_the_rounds_that_learned_it(tmp_path: Path, pico_llama: Path):
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    close(archive, 0, wait=Wait(quorum=2, seconds=None))
    assert not any("grace" in line for line in summary_remarks(summary(archive)))
    close(archive, 1, wait=Wait(quorum=2, seconds=90.0, learned=True))
    close(archive, 2, wait=Wait(quorum=2, seconds=30.0, learned=True))
    assert summary(archive)["rounds"][0]["wait"] == {"quorum": 2, "seconds": None, "learned": False}
    told = "rounds.grace is auto: 2 of 3 rounds stayed open for 60 s (median; 30 to 90) after their quorum"
    assert told in summary_remarks(summary(archive))


@pytest.mark.parametrize(
    "content",
    [
        *(b"null", b"[]", b"1", b"[" * 100_000, b'{"after_round": NaN}', b"\0" * 40, b""),
        *(b'{"after_round": 1e999}', b'{"round": 0, "round": 1}', '{"reason": "ü"}'.encode("latin-1")),
    ],
    ids=["null", "list", "number", "deep", "nan", "zeros", "empty", "infinite", "twice", "latin-1"],
)
@pytest.mark.parametrize("name", ["evaluation", "stopped", "limited", "comparison", "round-0000/round"])
def test_a_file_that_holds_something_else_than_a_mapping_is_named(name: str, content: bytes, tmp_path: Path):
    archive = Archive(tmp_path)
    archive.round_directory(0).mkdir()
    record = RoundFile(round=0, facilities=[], global_loss=2.0, decision="go on")
    write_json(archive.round_directory(0) / "round.json", dataclasses.asdict(record))
    assert summary(archive)["rounds"]
    (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(InputError, match=f"{name}.json (cannot be read|is malformed).*restore it from a copy"):
        summary(archive)


def test_an_archive_is_read_as_utf_8_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`Path.read_text` alone takes the encoding of the locale, which may not be able to read it at all."""
    archive, reason = Archive(tmp_path), "Größe überschritten: 山"
    archive.write_note("stopped", {"reason": reason})
    real = Path.read_text

    def of_a_locale(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        return real(path, encoding or "euc_jp", errors)

    monkeypatch.setattr(Path, "read_text", of_a_locale)
    assert archive.read_note("stopped") == {"reason": reason}
