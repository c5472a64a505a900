"""What a file system refuses is named by the file or directory that was to appear, also where the error names none."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from coordinator.archive.journal import Journal
from facility.exchange.checkpoints.checkpoint import save_tensors
from facility.exchange.errors import InputError, exit_on_error
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files.durable import append_lines, new_directory, write_bytes
from facility.exchange.files.storage import file_error_sentence, lasting

LIMIT = 4096


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond `LIMIT` bytes: a real refusal, of a write to an open file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_named(small_files: None, tmp_path: Path):
    with pytest.raises(OSError) as caught:
        write_bytes(tmp_path / "round.json", bytes(LIMIT + 1))
    assert file_error_sentence(caught.value).startswith(f"{tmp_path}/round.json may not grow so large")
    assert list(tmp_path.iterdir()) == []


def test_lines_are_added_wholly_or_not_at_all(small_files: None, tmp_path: Path):
    """The system takes the beginning of a write that does not fit, and says so by a number alone."""
    journal, line = Journal(tmp_path), "x" * (LIMIT - 9) + "\n"
    journal.path.write_text(line)
    with pytest.raises(OSError, match="File too large"):
        append_lines(journal.path, '{"round": 7}\n')
    assert journal.path.read_text() == line
    journal.append("problem", time=1.0, text="first")
    assert journal.path.read_text() == line
    journal.path.write_text("")  # room is made
    journal.append("problem", time=2.0, text="second")
    assert [entry.detail["text"] for entry in journal.read()] == ["first", "second"]


def test_a_directory_within_a_directory_is_named(small_files: None, tmp_path: Path):
    with pytest.raises(OSError) as caught, new_directory(tmp_path / "round-0001") as outer:
        with new_directory(outer / "model") as inner, open(inner / "model.safetensors", "wb", buffering=0) as file:
            assert file.write(bytes(LIMIT)) == LIMIT
            os.pwrite(file.fileno(), b"x", LIMIT)
    assert file_error_sentence(caught.value).startswith(f"{tmp_path}/round-0001/model may not grow so large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["tensors", "tokenizer"])
def test_what_a_library_could_not_write_is_named_too(small_files: None, tmp_path: Path, what: str):
    """safetensors and tokenizers raise errors of their own, whose text alone has the number."""
    with pytest.raises(OSError) as caught, new_directory(tmp_path / "model") as folder:
        if what == "tensors":
            save_tensors(folder, [("weight", torch.zeros(LIMIT))])
        else:
            vocabulary = {f"word-{number}": number for number in range(LIMIT)}
            Tokenizer(WordLevel(vocabulary, unk_token="word-0")).save(str(folder / "tokenizer.json"))
    assert file_error_sentence(caught.value).startswith(f"{tmp_path}/model may not grow so large")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_a_library_stay(tmp_path: Path):
    for text in ("no such tensor", "I/O error: (os error 28) of another", "broken (os error 32)"):
        with pytest.raises(RuntimeError, match="of another|broken|tensor"), new_directory(tmp_path / "model"):
            raise RuntimeError(text)


def test_an_error_that_names_a_file_or_is_none_of_the_file_system_s_stays(tmp_path: Path):
    with pytest.raises(PermissionError) as caught, new_directory(tmp_path / "a"):
        raise PermissionError(13, "denied", "/elsewhere")
    assert caught.value.filename == "/elsewhere"
    with pytest.raises(BrokenPipeError) as other, new_directory(tmp_path / "a"):
        raise BrokenPipeError(32, "broken")
    assert other.value.filename is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/.stopped.json.x_1y.tmp", "/a/stopped.json"),
        ("/a/.round-0001.k.tmp/.model.z.tmp/w.safetensors", "/a/round-0001/model/w.safetensors"),
        ("/a/.hidden/b.tmp", "/a/.hidden/b.tmp"),
    ],
)
def test_temporary_names_are_told_as_what_they_become(path: str, expected: str):
    assert lasting(path) == expected


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("absent/a.json", "absent/a.json does not exist, or its folder does not"),
        ("file/a.json", "file/a.json is not a folder, or its parent is not"),
        ("folder", "folder is a folder, expected a file"),
        ("n" * 300, "has too long a name"),
    ],
)
def test_a_path_that_does_not_fit_is_one_line_of_a_command_and_a_job_s_traceback(tmp_path, capsys, path, words):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def write() -> None:
        write_bytes(tmp_path / path, b"x")

    assert exit_on_error(write) == ExitCode.INPUT
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1
    with pytest.raises(OSError):
        exit_on_error(write, in_job=True)


def test_an_interrupted_command_says_so_in_a_word(capsys):
    def main() -> None:
        raise KeyboardInterrupt

    assert exit_on_error(main) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(KeyboardInterrupt):
        exit_on_error(main, in_job=True)


def test_a_command_that_logs_much_is_still_one_that_a_person_types(capsys):
    def main() -> None:
        raise KeyboardInterrupt

    assert exit_on_error(main, level="info") == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_what_the_terminal_s_encoding_lacks_is_printed_by_its_number():
    text = "import sys; from facility.exchange.errors import exit_on_error as e; e(lambda: print(sys.argv[1]))"
    for encoding, argument, told in (("ascii", "ε…", b"\\u03b5\\u2026"), ("utf-8", "a\udcff", b"a\\udcff")):
        variables = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", text, argument], env=variables, capture_output=True)
        assert (done.returncode, done.stdout.strip()) == (0, told), done.stderr


def test_a_message_moves_no_cursor_and_shows_no_login_of_an_address(capsys):
    def main() -> None:
        raise InputError("a\tb\nc \x1b[2J\x9b31m\u202e\r: https://alice:s3cret@host/x?y=z@w and ssh://bob@host, a@b")

    assert exit_on_error(main) == ExitCode.INPUT
    told = "a\tb\nc \\x1b[2J\\x9b31m\\u202e\\r: https://***@host/x?y=z@w and ssh://***@host, a@b"
    assert capsys.readouterr().err == f"error: {told}\n"

    def missing() -> None:
        Path("/tmp/nowhere\x1b[31m/x").read_bytes()

    assert exit_on_error(missing) == ExitCode.INPUT
    assert "\x1b" not in capsys.readouterr().err
