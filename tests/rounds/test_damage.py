"""Damage at a facility is named before a step is made with it: dataset, kept state, file systems that refuse."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
from pathlib import Path

import numpy
import pytest

from coordinator.report.advice import advice_for
from facility.dataset import LOSS, DatasetError, open_dataset
from facility.exchange.errors import InputError
from facility.exchange.files.checksum import Checksum
from facility.exchange.files.storage import file_error_sentence, is_storage
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.outcome import WARNING, Outcome
from facility.exchange.messages.report import read_failure
from facility.exchange.messages.settings import read_facility_settings
from facility.round import main as run_round
from facility.rounds import sealed
from facility.rounds.dataset_check import RECORD, check_dataset
from facility.rounds.kept import state_directory
from facility.rounds.sealed import SEAL, UNCHANGED, check_kept, find_flaw, write_seal
from tests.federations import write_dataset
from tests.training.federation import write_settings


def test_a_dataset_is_read_wholly_once_and_again_after_every_change(tmp_path: Path):
    dataset, state = write_dataset(tmp_path / "data", seed=1), tmp_path / "state"
    state.mkdir()
    assert check_dataset(dataset, state) and not check_dataset(dataset, state)
    os.utime(dataset / "train.npy", (1, 1))
    assert check_dataset(dataset, state), "touched: read again, and found as it was"
    (state / RECORD).write_text("{")
    assert check_dataset(dataset, state), "a damaged record is none"


@pytest.mark.parametrize("file", ["train.npy", "validation.npy"])
def test_one_altered_token_is_refused_by_the_name_of_its_file(file: str, tmp_path: Path):
    dataset, state = write_dataset(tmp_path / "data", seed=1), tmp_path / "state"
    state.mkdir()
    check_dataset(dataset, state)
    original = (dataset / file).read_bytes()
    blocks = numpy.load(dataset / file)
    blocks[0, 0] = (blocks[0, 0] + 1) % 8
    numpy.save(dataset / file, blocks)
    for _ in range(2):
        with pytest.raises(DatasetError, match=f"{file} has sha256 .* altered"):
            check_dataset(dataset, state)
    (dataset / file).write_bytes(original)
    assert check_dataset(dataset, state), "restored: the same command goes on"


def test_altered_marks_are_noticed_after_the_dataset_was_verified_once(tmp_path: Path):
    """They say which tokens bear loss, and which make one document: nothing looked at them again."""
    dataset, state = write_dataset(tmp_path / "data", seed=1), tmp_path / "state"
    state.mkdir()
    raw = json.loads((dataset / "dataset.json").read_text()) | {"documents": "separate"}
    for name, split in raw["splits"].items():
        marks = dataset / f"{name}.marks.npy"
        numpy.save(marks, numpy.full((split["blocks"], raw["block_tokens"]), LOSS, numpy.uint8))
        split |= {"marks_sha256": sha256_of(marks), "rests_marked": True}
    (dataset / "dataset.json").write_text(json.dumps(raw))
    assert check_dataset(dataset, state) and not check_dataset(dataset, state)
    assert {file for split in raw["splits"] for file in open_dataset(dataset).files(split)} == {
        path.name for path in dataset.glob("*.npy")
    }
    marks = numpy.load(dataset / "train.marks.npy")
    marks[0, 3] = 0
    numpy.save(dataset / "train.marks.npy", marks)
    with pytest.raises(DatasetError, match=r"train\.marks\.npy has sha256 .* altered") as refused:
        check_dataset(dataset, state)
    assert advice_for(str(refused.value)).startswith("the dataset at the facility is not as it was prepared")


def kept(state: Path, *inner: str) -> Path:
    directory = state.joinpath(*inner)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"numbers")
    (directory / "state.json").write_text("{}")
    write_seal(directory)
    return directory


def hurt(directory: Path, harm: str) -> Path:
    file = directory / (SEAL if harm == "seal" else "model.safetensors")
    file.unlink() if harm == "missing" else file.write_bytes(b"numberz")
    return file


@pytest.mark.parametrize("harm", ["altered", "missing", "seal"])
@pytest.mark.parametrize("inner", [("paused",), ("round-3",), ("round-1",), ("personal", "round-1")], ids="-".join)
def test_damage_that_the_round_does_without_is_put_aside_by_name(inner: tuple[str, ...], harm: str, tmp_path: Path):
    sound, damaged = kept(tmp_path, "round-2"), kept(tmp_path, *inner)
    kept(tmp_path, "personal", "round-2")
    assert check_kept(tmp_path, 3) == [] and find_flaw(sound) == ""
    file = hurt(damaged, harm)
    (told,) = check_kept(tmp_path, 3)
    assert str(file) in told and "does without it" in told
    assert sound.is_dir() and not damaged.exists() and list((tmp_path / "damaged").glob(f"{'-'.join(inner)}-*"))
    assert check_kept(tmp_path, 3) == [], "what is aside is not looked at again"


@pytest.mark.parametrize("harm", ["", "altered", "missing", "seal", "taken"])
def test_a_replacement_that_was_killed_between_its_two_moves_is_ended_only_with_a_sound_directory(
    harm: str, tmp_path: Path
):
    old, new = (kept(tmp_path, f"round-2{end}") for end in (sealed.OLD, sealed.NEW))
    if harm == "taken":
        kept(tmp_path, "round-2")
    elif harm:
        hurt(new, harm)
    check_kept(tmp_path, 3)
    assert (tmp_path / "round-2").is_dir() == (harm in ("", "taken")) and old.is_dir()
    assert new.is_dir() == (harm == "taken")


@pytest.mark.parametrize("harm", ["altered", "missing", "seal"])
@pytest.mark.parametrize("inner", [("round-2",), ("personal", "round-1"), ("residual", "round-2")], ids="-".join)
def test_damage_to_what_the_round_goes_on_from_is_refused_and_nothing_is_touched(
    inner: tuple[str, ...], harm: str, tmp_path: Path
):
    directory = kept(tmp_path, *inner)
    original = {path: path.read_bytes() for path in directory.iterdir()}
    file = hurt(directory, harm)
    for _ in range(2):
        with pytest.raises(InputError, match=f"{file.name}.*restore it.*remove {directory} "):
            check_kept(tmp_path, 3)
    for path, data in original.items():
        path.write_bytes(data)
    assert check_kept(tmp_path, 3) == []


def test_an_evaluation_does_without_the_optimizer_s_state(tmp_path: Path):
    hurt(kept(tmp_path, "round-2"), "altered")
    (told,) = check_kept(tmp_path, 3, evaluates=True)
    assert "does without it" in told


@pytest.mark.parametrize("how", ["in place", "with its times", "copied back", "without the note"])
def test_a_file_that_changed_since_it_was_sealed_is_read_again(how: str, tmp_path: Path):
    directory = kept(tmp_path, "round-1")
    file = directory / "model.safetensors"
    times = file.stat()
    if how == "copied back":
        file.rename(tmp_path / "aside")
    if how == "without the note":
        (directory / UNCHANGED).unlink()
    file.write_bytes(b"numberz")
    if how == "with its times":
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "altered" in find_flaw(directory)


@pytest.mark.parametrize("stated", ["as it was", "altered", "cut", "of before"])
def test_a_checksum_that_was_made_as_the_file_was_written_seals_as_a_digest_does(stated: str, tmp_path: Path):
    directory, made = tmp_path / "round-1", hashlib.sha256() if stated == "of before" else Checksum()
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"numbers")
    made.update(b"numbers")
    write_seal(directory, {"model.safetensors": made.hexdigest()})
    (directory / UNCHANGED).unlink()
    if stated in ("altered", "cut"):
        (directory / "model.safetensors").write_bytes(b"numberz" if stated == "altered" else b"number")
    assert find_flaw(directory) == (
        f"{directory / 'model.safetensors'} was altered" if stated in ("altered", "cut") else ""
    )


def test_a_file_that_is_as_it_was_sealed_is_not_read(tmp_path: Path, monkeypatch):
    directory = kept(tmp_path, "round-1")
    monkeypatch.setattr(sealed, "checksum_of", lambda path: pytest.fail(f"{path} was read"))
    assert find_flaw(directory) == ""


def test_state_from_before_seals_is_used_as_it_is(tmp_path: Path):
    old = kept(tmp_path, "round-1")
    (old / SEAL).unlink()
    (old / "model.safetensors").write_bytes(b"other")
    assert check_kept(tmp_path, 1) == [] and old.is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG])
def test_a_file_system_that_refuses_is_one_sentence_with_its_place(number: int):
    error = OSError(number, os.strerror(number), "/scratch/a/round-1")
    assert is_storage(error) and not is_storage(ValueError()) and not is_storage(OSError(errno.EIO, "x"))
    said = file_error_sentence(error)
    assert "/scratch/a/round-1 " in said and "Errno" not in said and said.endswith("same command again")
    assert said.startswith("/ is full: " if number == errno.ENOSPC else "/scratch/a/round-1 ")
    assert "/state " in file_error_sentence(OSError(number, "x"), "/state")
    assert "command" not in file_error_sentence(error, again=False), "no person gives a job's command"


def test_a_round_whose_state_directory_cannot_be_made_says_so_in_a_sentence(tmp_path: Path, monkeypatch):
    """It ended with a traceback, and the table with `NotADirectoryError(20, 'Not a directory')`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    settings = write_settings(tmp_path / "settings.json")
    command = f"--model m --dataset d --settings {settings} --round 0 --out update --state {tmp_path}/file/state"
    before = {number: signal.getsignal(number) for number in WARNING}
    try:
        assert run_round(command.split()) == Outcome.SKIPPED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = read_failure(tmp_path / "update")
    assert said is not None and said.log_tail == "", said
    assert said.reason.startswith(f"the state directory {tmp_path}/file/state cannot be made: ")


def test_a_dataset_that_is_not_there_is_no_matter_of_the_state_directory(tmp_path: Path):
    """`/nowhere` in federation.yml was told as a state directory that an account may not make, and a path below a
    folder of the account's own left that directory there."""
    (tmp_path / "file").write_text("a file")
    settings = read_facility_settings(write_settings(tmp_path / "settings.json"))
    for path in (tmp_path / "wrong" / "dataset", tmp_path / "file" / "dataset", Path("/nowhere")):
        with pytest.raises(InputError, match=f"there is no dataset {path} here"):
            state_directory(None, settings, path)
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["file", "settings.json"]
    assert state_directory(tmp_path / "state", settings, Path("/nowhere")).is_dir()


def test_a_state_directory_that_cannot_be_made_is_no_bare_number(tmp_path: Path):
    (tmp_path / "state").write_text("a file")
    dataset = write_dataset(tmp_path / "data", seed=1)
    with pytest.raises(OSError) as caught:
        check_dataset(dataset, tmp_path / "state")
    assert str(tmp_path) in file_error_sentence(caught.value) and json.dumps(file_error_sentence(caught.value))
