"""A forked trainer is `python -m facility.train` but for its imports: output, exit code, signals and death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from coordinator.testbed.command import wait_until
from facility.exchange.messages.manifest import verify_manifest
from tests.forked_trainers import variables
from tests.pico import save_pico
from tests.training.federation import write_dataset, write_settings

pytestmark = pytest.mark.slow


def started(folder: Path, *words: str, forked: bool = True) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "facility.train", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (variables() if forked else {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )


def of_a_round(folder: Path, **training: int) -> list[str]:
    write_settings(folder / "settings.json", **training)
    write_dataset(folder / "data")
    save_pico(folder / "model")
    return "--model model --dataset data --settings settings.json --round 0 --out update --state state".split()


def trainers(folder: Path) -> list[int]:
    """Forks that train there."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "comm").read_text().strip() == "train" and os.readlink(place / "cwd") == str(folder):
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("words", [("--help",), ("--no-such-option",), ("--model", "absent")], ids=str)
def test_it_says_what_a_process_of_its_own_says(tmp_path: Path, words: tuple[str, ...]):
    forked, own = (started(tmp_path, *words, forked=kind) for kind in (True, False))
    assert (*forked.communicate(), forked.returncode) == (*own.communicate(), own.returncode)


def test_it_writes_the_same_update(tmp_path: Path):
    digests = []
    for kind in (True, False):
        folder = tmp_path / str(kind)
        folder.mkdir()
        process = started(folder, *of_a_round(folder), forked=kind)
        said = process.communicate()
        assert process.returncode == 0, said
        digests.append(verify_manifest(folder / "update").content_sha256)
    assert digests[0] == digests[1]


def test_a_signal_reaches_it_and_it_dies_with_the_process_it_stands_for(tmp_path: Path):
    words = of_a_round(tmp_path, steps=10**6)
    for number, code in ((signal.SIGTERM, 85), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = started(tmp_path, *words)
        assert process.stderr is not None
        assert any("learning rate" in line for line in process.stderr)
        (fork,) = trainers(tmp_path)
        process.send_signal(number)
        process.communicate()
        assert process.returncode == code
        wait_until(lambda fork=fork: not Path(f"/proc/{fork}").exists(), 10, f"end of {fork}")


def test_one_that_dies_takes_its_process_with_it(tmp_path: Path):
    process = started(tmp_path, *of_a_round(tmp_path, steps=10**6))
    assert process.stderr is not None and any("learning rate" in line for line in process.stderr)
    os.kill(trainers(tmp_path)[0], signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
