"""What a facility can make the coordinator hold, wait for or show to others is bounded; and what it keeps itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import SlurmConnector

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.place import login_place
from coordinator.engine.render import write_rendered
from coordinator.login import _leave_word
from coordinator.preflight.last_check import remember_failures
from coordinator.preflight.row import Row
from coordinator.schedulers.registry import schedulers
from coordinator.streamflow_plugin import bounded_reader, copied, lanes, ssh
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.lanes import TransferFailed, check_pace
from coordinator.streamflow_plugin.tree import read_listing
from facility.exchange.checkpoints.checkpoint import save_tensors
from facility.exchange.errors import exit_on_error
from facility.exchange.files.durable import new_directory, write_json
from facility.exchange.files.storage import make_private_folder, why_unwritable
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.preparing.output import publish_directory
from facility.preparing.resuming import part_of
from facility.rounds.finished import Finished
from tests.federations import write_federation

MASKS = {0o077: (0o600, 0o700), 0o027: (0o640, 0o750), 0o022: (0o644, 0o755)}


@pytest.mark.parametrize("mask", MASKS)
def test_files_and_directories_are_as_private_as_the_umask_says(tmp_path: Path, mask: int):
    before = os.umask(mask)
    try:
        with new_directory(tmp_path / "made") as folder:
            write_json(folder / "file.json", {})
    finally:
        os.umask(before)
    found = (tmp_path / "made/file.json").stat().st_mode & 0o777, (tmp_path / "made").stat().st_mode & 0o777
    assert found == MASKS[mask]


def test_checkpoints_are_as_private_as_the_umask_says(tmp_path: Path):
    before = os.umask(0o077)
    try:
        save_tensors(tmp_path, iter([("a", torch.zeros(4))]))
    finally:
        os.umask(before)
    assert list(tmp_path.glob("*.safetensors"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_archive_and_work_directory_are_private(tmp_path: Path):
    assert why_unwritable([tmp_path / "work"]) == ""
    assert (tmp_path / "work").stat().st_mode & 0o777 == 0o700
    archive = Archive(tmp_path / "archive")
    with pytest.raises(Exception):  # noqa: B017 (no model is there; the directory was made before)
        archive.begin(tmp_path / "absent", "heron")
    assert archive.path.stat().st_mode & 0o777 == 0o700


def test_a_work_directory_is_private_whatever_makes_it_first(tmp_path: Path):
    """A failing `crossfed check`, or a login that was renewed, made it open to all before a run did."""
    federation = read_federation(write_federation(tmp_path, ["a"]))
    row = Row(subject="a", check="dataset", verdict="fail", found="none", fix="make one")
    makers = (
        lambda: remember_failures(federation, "0" * 64, [row]),
        lambda: _leave_word(login_place(federation.workdir_path), "a"),
    )
    before = os.umask(0o022)
    try:
        for make in makers:
            make()
            assert mode_of(federation.workdir_path) == 0o700
            shutil.rmtree(federation.workdir_path)
    finally:
        os.umask(before)


def test_what_a_facility_keeps_is_its_owners_alone(tmp_path: Path):
    """Residuals, local parameters and optimizer state come of its data; all of a site could read them at umask 022, and
    at umask 000 exchange a finished update where the state directory itself is open to be read."""
    file = write_federation(tmp_path, ["a"])
    write_rendered(read_federation(file))
    command = [sys.executable, "-m", "facility.round", "--settings", str(file.parent / "facilities" / "a.json")]
    command += ["--model", str(tmp_path / "absent"), "--dataset", str(tmp_path / "sites" / "a" / "dataset")]
    job = tmp_path / "job"
    job.mkdir()
    subprocess.run([*command, "--round", "0", "--out", str(job / "update")], cwd=job, umask=0, capture_output=True)
    left = [*job.rglob("*"), *(tmp_path / "sites" / "a" / ".crossfed").rglob("*")]
    assert any(one.is_dir() for one in left) and [one for one in left if mode_of(one) & stat.S_IWOTH] == []
    assert mode_of(tmp_path / "sites" / "a" / ".crossfed" / "pico" / "a") == 0o700
    assert mode_of(make_private_folder(tmp_path / "b" / "state")) == 0o700


def test_a_command_takes_the_right_to_write_from_all_others_and_nothing_else(tmp_path: Path):
    def make() -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()

    os.umask(0)
    assert exit_on_error(make, in_job=True) == 0
    assert (mode_of(tmp_path / "folder"), mode_of(tmp_path / "file")) == (0o775, 0o664)


def test_a_directory_that_a_person_opened_to_a_group_stays_open(tmp_path: Path):
    for mode in (0o750, 0o770):
        (opened := tmp_path / f"{mode:o}").mkdir()
        opened.chmod(mode)
        assert mode_of(make_private_folder(opened)) == mode
        with publish_directory(opened) as directory:  # a data set in an empty folder, then one in its place
            (directory / "dataset.json").touch()
        assert mode_of(opened) == mode
        with publish_directory(opened) as directory:
            (directory / "dataset.json").touch()
        assert mode_of(opened) == mode


def test_a_new_dataset_is_its_owners_alone(tmp_path: Path):
    before = os.umask(0o022)
    try:
        with publish_directory(tmp_path / "data") as directory:
            assert mode_of(directory) == 0o700
        with part_of(tmp_path / "more", {}, known=True) as part:
            assert mode_of(part.directory) == 0o700
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "data") == 0o700


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_pull_is_bounded_by_the_model_that_was_sent(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    write_manifest(tmp_path, Manifest(kind="model", federation="heron", round=0, parameters=1_000_000))
    most = copied.largest_update(tmp_path)
    assert most is not None and 2 * 4_000_000 <= most < 1 << 30
    with pytest.raises(TransferFailed, match="at most"):
        read_listing(b"%d 644 model.safetensors\0" % (most + 1), most)
    assert read_listing(b"%d 644 model.safetensors\0" % (4_000_000 + 8), most)
    assert copied.largest_update(tmp_path / "nothing") is None


def test_a_stream_that_trickles_is_given_up():
    slow = lanes.STALL_SECONDS + 100.0
    check_pace(10, lanes.STALL_SECONDS, "dd")
    check_pace(int(100.0 * lanes.LEAST_BYTES_PER_SECOND) + 1, slow, "dd")
    with pytest.raises(TransferFailed, match="too slow"):
        check_pace(1000, slow, "dd")


class Endless:
    """A shell's output without an end."""

    async def read(self, size: int) -> bytes:
        return bytes(size)


def test_what_a_command_answers_is_bounded_anew_for_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded_reader, "ANSWER_BYTES", 1000)
    reader = bounded_reader.BoundedReader(Endless())

    class Writer:
        stream = SimpleNamespace(is_closing=lambda: False)

        async def write(self, data: bytes) -> None:
            pass

    writer = bounded_reader.BoundedReader.reset_by(Writer(), reader)

    async def two_commands() -> None:
        for _ in range(2):
            await writer.write(b"squeue")
            await reader.read(900)
        with pytest.raises(WorkflowExecutionException, match="more than 1000 bytes"):
            await reader.read(900)

    asyncio.run(two_commands())


def test_what_a_job_prints_is_kept_to_its_end():
    """A job that prints for ever costs a few kilobytes here."""
    told = [bytes([65 + number % 26]) * 50_000 for number in range(40)]

    class Process:
        def __init__(self) -> None:
            self.stdout, self.stderr, self.left = self, None, list(told)

        async def read(self, size: int) -> bytes:
            return self.left.pop(0) if self.left else b""

        async def wait(self):
            return type("Result", (), {"returncode": 0})()

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

    connector = object.__new__(ssh.ParallelSSHConnector)
    connector._get_ssh_client_process = lambda **_: Process()
    place = type("Place", (), {"name": "login"})()
    said, code = asyncio.run(connector.end_of(place, "train", 65_536, None))
    assert (len(said), code) == (65_536, 0) and said.endswith("N" * 15_536 + "N" * 34_464)


def test_events_and_log_of_the_coordinator_are_not_a_jobs(monkeypatch: pytest.MonkeyPatch):
    """A queue on this machine would hand the environment over: the submission empties them."""
    seen = {}

    async def submit(self, *, environment, **rest) -> str:
        seen.update(environment)
        return "17"

    monkeypatch.setattr(SlurmConnector, "_run_batch_command", submit)
    connector = object.__new__(connector_for(schedulers()["slurm"]))
    connector.connector = None
    assert asyncio.run(connector._submit("train", {"A": "b"}, "/rounds/train_a/0.1", None, None)) == "17"
    empty = {name: "''" for name in ("CROSSFED_EVENTS", "CROSSFED_ARCHIVE_LOG", "CROSSFED_DATABASE")}
    assert seen == {"A": "b"} | empty


@pytest.mark.parametrize("numbers", [range(12), range(11, -1, -1), [9, 3, 8, 0, 7, 1, 6, 2, 5]])
def test_in_whatever_order_rounds_are_asked_for_few_updates_are_kept(tmp_path: Path, numbers: Sequence[int]):
    """From the last round to the first each one was kept, with its weights: a facility's disk was full."""
    finished = Finished(tmp_path / "state")
    for number in numbers:
        update = tmp_path / f"update-{number}"
        update.mkdir()
        (update / "model.safetensors").write_bytes(b"weights")
        write_manifest(update, Manifest(kind="update", federation="heron", facility="alpha", round=number))
        finished.keep("key", number, update)
        assert finished.find("key", number) is not None
        assert len(list((tmp_path / "state" / "finished").iterdir())) <= 4
