"""What a command that failed or was ended has half made is gone, and its room is free when it says how much is."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import model
from facility.exchange import errors
from facility.exchange.errors import InputError
from facility.exchange.files.durable import new_directory
from facility.exchange.files.storage import file_error_sentence, is_path
from facility.exchange.files.unwinding import unwound_by_signals
from facility.training.data.inputs import check_inputs
from tests.pico import save_pico


def test_the_room_that_is_told_is_that_without_what_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A preparation removed its arrays on a full disk, held them open, and said that 0 B were free now."""
    held: list[int] = []

    def fails() -> int:
        with_a_name = tempfile.TemporaryFile(dir=tmp_path)
        held.append(with_a_name.fileno())
        raise OSError(errno.ENOSPC, "full", str(tmp_path / "out"))

    def told(error: OSError, **_: object) -> str:
        with pytest.raises(OSError):
            os.fstat(held[0])
        return "full"

    monkeypatch.setattr(errors, "file_error_sentence", told)
    assert errors.exit_on_error(fails) == 2 and "error: full" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_model_that_is_ended_by_a_signal_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`.out.abc.tmp`, as large as the model, stayed for ever unless the same command was given again."""
    source = save_pico(tmp_path / "source")

    def saved(source: str, out: Path, *_: object) -> str:
        (out / "model.safetensors").touch()
        signal.raise_signal(number)
        raise AssertionError

    monkeypatch.setattr(model, "_saved", saved)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        model.convert_model(str(source), tmp_path / "out", dtype="float32", revision="main")
    assert ended.value.code == 128 + number and os.listdir(tmp_path) == ["source"]
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwound_by_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_full_disk_is_no_fault_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """safetensors raises an error of its own, of which a config.json that fits its weights was asked for."""
    source = save_pico(tmp_path / "source")

    def saved(*_: object) -> str:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model, "_saved", saved)
    with pytest.raises(OSError) as full:
        model.convert_model(str(source), tmp_path / "out", dtype="float32", revision="main")
    assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / "out")


def test_a_file_in_the_place_of_a_folder_is_not_to_be_removed(tmp_path: Path):
    """mkdir says of it that it exists, and `exists already: remove it` was said of the user's own file."""
    (tmp_path / "file").write_text("of the user's own")
    (tmp_path / "link").symlink_to("link")
    for name in ("file", "link"):
        with pytest.raises(OSError) as refused, new_directory(tmp_path / name / "out"):
            raise AssertionError
        assert refused.value.errno in (errno.ENOTDIR, errno.ELOOP) and is_path(refused.value)
        assert "remove" not in file_error_sentence(refused.value)


def test_no_round_is_trained_for_an_update_that_has_no_place(tmp_path: Path):
    """It was trained to its end, and ended with a traceback."""
    (tmp_path / "file").touch()
    settings: Any = SimpleNamespace(rounds=2)
    for out in (tmp_path / "file" / "u", tmp_path / "file" / "more" / "u", Path("/proc/u")):
        with pytest.raises(InputError, match="is not a folder in which this account may make one"):
            check_inputs(0, out, settings, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "classes", "said"),
    [
        ("source", ["a\nb", "c"], "holds the control character"),
        ("link", [], "is a link that leads nowhere"),
    ],
)
def test_odd_words_make_no_model(
    source: str, classes: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A class of two lines was taken; a link to nothing was asked of the hub."""
    save_pico(tmp_path / "source")
    (tmp_path / "link").symlink_to("link")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        model.convert_model(source, tmp_path / "out", dtype="float32", revision="main", classes=classes)
    assert not (tmp_path / "out").exists()
