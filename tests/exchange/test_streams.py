"""Devices and open files below /dev are written to; what a command writes never takes their place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.durable import stream_of, write_bytes
from facility.measuring.allocation import check_out
from tests.conftest import ROOT


def test_devices_are_opened_as_they_stand():
    """Only opened here: where this law is broken and a test writes as root, the machine would lose its /dev/null."""
    stream = stream_of(Path("/dev/null"))
    assert stream is not None and os.fstat(stream).st_rdev == os.stat("/dev/null").st_rdev
    os.close(stream)


def test_standard_output_goes_on_where_it_is(tmp_path: Path):
    """After what was printed before and before what is printed later, in a file too."""
    program = (
        "import os; from pathlib import Path; from facility.exchange.files.durable import stream_of\n"
        "os.write(1, b'before '); os.write(stream_of(Path('/dev/stdout')), b'content '); os.write(1, b'after')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, cwd=ROOT, check=True)
    assert (tmp_path / "out").read_bytes() == b"before content after"


def test_an_open_file_of_this_process_is_written_to():
    """As in `--out >(command)` of a shell, which gives /dev/fd/63."""
    reading, writing = os.pipe()
    write_bytes(Path(f"/dev/fd/{writing}"), b"content")
    os.close(writing)
    assert os.read(reading, 99) == b"content"
    os.close(reading)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_a_named_pipe_in_dev_is_no_device():
    """Anybody may make one in /dev/shm; to open it for writing waits until somebody reads."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.mkfifo(pipe := Path(folder) / "pipe")
        reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that nothing waits where this law is broken
        assert stream_of(pipe) is None
        with pytest.raises(FileExistsError, match="named pipe"):
            write_bytes(pipe, b"content")
        with pytest.raises(ConfigurationError, match="named pipe|exists already"):
            check_out(pipe)
        os.close(reading)


@pytest.mark.parametrize("name", ["new", "old", "dev"])
def test_other_paths_are_files(tmp_path: Path, name: str):
    (tmp_path / "old").write_bytes(b"before")
    assert stream_of(tmp_path / name) is None
    write_bytes(tmp_path / name, b"content")
    assert (tmp_path / name).read_bytes() == b"content"
