"""Folders that another account of the same machine made first: nothing is kept in them, and the error names whose."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import facility.measure
import facility.train
from coordinator.bundle import make_bundle
from coordinator.config.federation import read_federation
from coordinator.preflight.coordinator import check_here, failing_here
from coordinator.preflight.disk import Disk
from coordinator.preflight.facility import _room
from coordinator.remote_setup import set_up
from coordinator.report.write import write_report
from coordinator.testbed.layout import MARK, load
from facility.dataset import DatasetError
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files import owners
from facility.exchange.files.compiled_code import VARIABLE, compiled_code_place
from facility.exchange.files.owners import not_ours
from facility.exchange.messages.evaluation import EvaluationSettings
from facility.exchange.messages.progress import FILE, JobProgress, write_progress
from facility.exchange.messages.settings import read_facility_settings
from facility.gating.policy import read_policy
from facility.preparing.output import finish_replacement, publish_directory
from facility.preparing.resuming import part_of
from facility.probe import disk
from facility.rounds.evaluation import evaluate_model
from facility.rounds.kept import state_directory
from facility.rounds.workdir_check import check_workdir
from tests.federations import write_dataset, write_federation
from tests.pico import save_pico
from tests.preflight.answers import disk_answer
from tests.rounds import test_remote_setup
from tests.rounds.test_bundle_tasks import wheels_appear
from tests.rounds.test_setup import setup
from tests.security import test_gate
from tests.security.test_gate import Gate
from tests.training.federation import write_settings

site, far = test_gate.site, test_remote_setup.far
STRANGER = 4242
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another account")


def strangers(path: Path, mode: int = 0o777) -> Path:
    """A folder as another account leaves it for us to use."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    os.chown(path, STRANGER, -1)
    return path


@pytest.fixture
def reached() -> Iterator[Path]:
    """A folder that other accounts can enter, as they can none of pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="crossfed-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_state_directory_that_another_account_made_first_is_refused(tmp_path: Path, monkeypatch, level: int):
    """Its updates and keys could be read there, and an update of another's put in their place, to be signed."""
    monkeypatch.delenv("CROSSFED_STATE", raising=False)
    settings = read_facility_settings(write_settings(tmp_path / "settings.json"))
    dataset = write_dataset(tmp_path / "data", seed=1)
    parts = (".crossfed", settings.federation, settings.facility)
    their = strangers(tmp_path.joinpath(*parts[: level + 1]))
    with pytest.raises(
        InputError, match=f"not this account's alone.*{their} belongs to .*user {STRANGER}.*CROSSFED_STA"
    ):
        state_directory(None, settings, dataset)
    monkeypatch.setenv("CROSSFED_STATE", str(tmp_path / "own"))
    assert state_directory(None, settings, dataset).is_dir()


def test_no_folder_above_a_state_directory_is_open_whatever_the_umask(tmp_path: Path, monkeypatch):
    """Whoever may write one exchanges what lies in it."""
    monkeypatch.delenv("CROSSFED_STATE", raising=False)
    settings = read_facility_settings(write_settings(tmp_path / "settings.json"))
    before = os.umask(0)
    try:
        place = state_directory(None, settings, write_dataset(tmp_path / "data", seed=1))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (place, *place.parents[:2])] == [0o700] * 3


def test_a_link_that_another_account_made_leads_nowhere(tmp_path: Path):
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to("private")
    assert not_ours(tmp_path / "state") == "", "a link of our own"
    os.chown(tmp_path / "state", STRANGER, -1, follow_symlinks=False)
    assert f"state is a link that an account without a name (user {STRANGER}) made" in not_ours(tmp_path / "state")


def test_what_an_account_opened_to_its_group_and_what_root_made_is_taken(reached: Path):
    for mode, taken in ((0o700, True), (0o2770, True), (0o1777, True), (0o777, False)):
        (place := reached / f"{mode:o}").mkdir()
        place.chmod(mode)
        assert (not_ours(place) == "") is taken, oct(mode)
    assert not_ours(reached / "absent") == ""
    reached.chmod(0o700)
    assert not_ours(reached / "777") == "", "as an engine makes it under a umask of 000, where no other comes"


def test_a_file_system_that_shows_our_files_as_anothers_is_no_strangers(tmp_path: Path, monkeypatch):
    """One that is mounted for another account (CIFS), or squashes numbers (NFS)."""
    monkeypatch.setattr(owners.os, "geteuid", lambda: STRANGER)
    monkeypatch.setattr(owners, "ROOT", STRANGER)
    assert not_ours(tmp_path) == ""


def test_a_job_in_a_workdir_of_another_account_works_with_nothing_that_lies_there(reached: Path):
    job = strangers(reached / "work") / str(uuid.uuid4())
    job.mkdir(mode=0o700)
    with pytest.raises(InputError, match=f"{reached}/work belongs to .*user {STRANGER}.*`workdir:`"):
        check_workdir(job)
    os.chown(reached / "work", 0, -1)
    with pytest.raises(InputError, match="may be written by every account"):
        check_workdir(job)
    (reached / "work").chmod(0o770)
    check_workdir(job)


def test_crossfed_check_names_whose_workdir_it_is(tmp_path: Path):
    answer = disk_answer(disk(strangers(tmp_path / "work"), 0))
    row = _room("a", answer, str(tmp_path / "work"), need=None)  # type: ignore[arg-type]
    assert row.verdict == "fail" and row.check == "workdir" and f"user {STRANGER}" in row.found
    assert "shared" not in disk(tmp_path, 0)


@pytest.mark.parametrize("made", [True, False])
def test_crossfed_check_names_a_folder_above_a_workdir_in_which_every_account_may_exchange_it(
    reached: Path, made: bool
):
    work = reached / "scratch" / "alice" / "work"
    (work if made else reached / "scratch").mkdir(parents=True)
    for mode, named in ((0o755, False), (0o1777, False), (0o777, True)):
        (reached / "scratch").chmod(mode)
        answer = disk_answer(disk(work, 0))
        row = _room("a", answer, str(work), need=Disk(parts={}))
        found = f"every account of the host may write {reached / 'scratch'}, and exchange"
        assert ((row.verdict, row.check) == ("warning", "workdir") and row.found.startswith(found)) is named, row


def test_what_is_prepared_does_not_grow_in_a_folder_of_another_account(tmp_path: Path):
    their = strangers(tmp_path / ".it.part")
    with pytest.raises(DatasetError, match=f"{their} belongs to .*user {STRANGER}"):
        with part_of(tmp_path / "it", {}, known=True) as part:
            (part.directory / "train.npy").write_bytes(b"a document")
    assert not list(their.iterdir())


def test_a_folder_that_another_account_made_does_not_say_who_reads_a_new_data_set(tmp_path: Path):
    os.chown(strangers(tmp_path / "it"), -1, STRANGER)
    for _ in range(2):  # in an empty folder, then in place of a data set that is there
        with publish_directory(tmp_path / "it") as directory:
            (directory / "dataset.json").touch()
        found = (tmp_path / "it").stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o700, 0, os.getegid())
        os.chown(tmp_path / "it", STRANGER, STRANGER)
        (tmp_path / "it").chmod(0o777)


def test_what_another_account_left_is_no_data_set_whose_replacement_was_cut_short(tmp_path: Path):
    for name in (".it.new", ".it.old"):
        strangers(tmp_path / name)
    finish_replacement(tmp_path / "it")
    assert not (tmp_path / "it").exists()


@pytest.mark.parametrize("place", ["", "wheelhouse", "crossfed", "evaluation"])
def test_nothing_is_bundled_in_a_folder_of_another_account(tmp_path: Path, place: str):
    """A wheel that it left there was locked with its digest, and every facility that had the bundle installed it."""
    out = tmp_path / "bundle"
    their = strangers(out / place)
    (their / "evil-1.0-py3-none-any.whl").write_bytes(b"evil")
    options = {"python": "3.11", "platform": "manylinux_2_28_x86_64", "torch": "cuda", "run": wheels_appear}
    with pytest.raises(InputError, match=f"{their} belongs to .*user {STRANGER}.*choose another --out"):
        make_bundle(out, **options)  # type: ignore[arg-type]
    assert not (out / "bundle.json").exists() and len(list(their.iterdir())) == 1


@pytest.mark.parametrize("made_first", ["home", "home/state"])
def test_a_facility_is_not_set_up_in_a_home_of_another_account(tmp_path: Path, made_first: str):
    """Whose env.sh every job would run."""
    (tmp_path / "home").mkdir()
    strangers(tmp_path / made_first)
    done = setup("facility", "--home", str(tmp_path / "home"), "--as-is", "--no-self-check")
    assert done.returncode == 2 and "belongs to another account" in done.stderr, done.stderr
    assert not (tmp_path / "home" / "env.sh").exists()


def test_nor_in_one_that_every_account_may_write(reached: Path):
    (reached / "home").mkdir()
    (reached / "home").chmod(0o777)
    done = setup("facility", "--home", str(reached / "home"), "--as-is", "--no-self-check")
    assert done.returncode == 2 and f"chmod o-w {reached}/home" in done.stderr, done.stderr


def test_nor_is_code_sent_there(far: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    home = strangers(far / "it's a home")
    with pytest.raises(InputError, match="not your account's alone, whose jobs run what is there"):
        set_up(read_federation(tmp_path / "workflow" / "federation.yml"), "far", bundle=None, arguments=[])
    assert not [one.name for one in home.iterdir() if one.name.startswith("code")]


@pytest.mark.parametrize("key", ["archive", "workdir"])
def test_no_run_begins_in_an_archive_or_a_work_directory_of_another_account(tmp_path: Path, key: str):
    federation = read_federation(write_federation(tmp_path, ["a"]))
    assert not failing_here(federation)
    strangers(federation.archive_path if key == "archive" else federation.workdir_path)
    (row,) = failing_here(federation)
    assert row.check == key and f"user {STRANGER}" in row.found and f"`{key}:`" in row.fix


def test_a_gate_has_no_workdir_of_another_account(site: Gate):
    strangers(site.workdir, 0o770)
    with pytest.raises(ConfigurationError, match=f"workdir: .*user {STRANGER}"):
        read_policy(site.home / "policy.yml")


def test_a_link_in_place_of_a_jobs_progress_leads_nowhere(tmp_path: Path):
    """A coordinator may write where a job runs."""
    (tmp_path / "kept").write_text("the account's")
    (tmp_path / f".{FILE}.{os.getpid()}").symlink_to("kept")
    assert not write_progress(tmp_path, JobProgress())
    assert (tmp_path / "kept").read_text() == "the account's"
    (tmp_path / f".{FILE}.{os.getpid()}").unlink()
    assert write_progress(tmp_path, JobProgress()) and (tmp_path / FILE).is_file()


def test_root_stands_no_testbed_up_where_another_account_is_at_home_nor_believes_what_it_wrote(tmp_path: Path):
    """`down` removes the users that the state file names."""
    root = strangers(tmp_path / "testbed", 0o755)
    with pytest.raises(InputError, match=f"{root} belongs to .*user {STRANGER}"):
        load(root)
    os.chown(root, 0, -1)
    (root / MARK).write_text("{}")
    os.chown(root / MARK, STRANGER, -1)
    with pytest.raises(InputError, match=f"{root / MARK} belongs to .*user {STRANGER}"):
        load(root)
    os.chown(root / MARK, 0, -1)
    with pytest.raises(KeyError):  # it is read
        load(root)


@pytest.mark.parametrize("key", ["archive", "workdir"])
def test_no_run_begins_in_one_that_every_account_may_write(reached: Path, key: str):
    """What a run keeps there is sent to facilities, or started in its account."""
    federation = read_federation(write_federation(reached / "federation", ["a"]))
    place = federation.archive_path if key == "archive" else federation.workdir_path
    place.mkdir(parents=True, exist_ok=True)
    assert not failing_here(federation)
    place.chmod(0o777)
    (row,) = failing_here(federation)
    assert (row.check, row.fix) == (key, f"chmod o-w {place}")
    assert f"every user of this host may write {place}," in row.found


@pytest.mark.parametrize("named", ["template", "allowed_signers", "archive"])
def test_a_check_warns_of_whatever_else_every_account_may_exchange(reached: Path, named: str):
    """A template's text is run at facilities, in the account of whoever runs the federation."""
    (shared := reached / "shared").mkdir()
    (template := shared / "site.sh").write_text("#!/bin/bash\n{{ streamflow_command }}\n")
    (signers := shared / "signers").write_text("")
    (archive := shared / "ours" / "archive").mkdir(parents=True)
    federation = read_federation(write_federation(reached / "federation", ["a"]))
    (facility,) = federation.facilities
    far = replace(facility.deployment, type="ssh", host="far", workdir="/work", template=str(template))
    federation = replace(
        federation,
        archive=str(archive),
        facilities=[replace(facility, deployment=far)],
        aggregation=replace(federation.aggregation, allowed_signers=str(signers)),
    )

    def told() -> list[str]:
        return [row.found for row in check_here(federation)[0] if row.check == "permissions"]

    assert not told()
    place = {"template": template, "allowed_signers": signers, "archive": shared}[named]
    place.chmod(0o1777 if place.is_dir() else 0o666)
    if named == "archive":
        assert not told(), "nobody removes another's entry there"
        place.chmod(0o777)
    assert told() and f"every user of this host may write {place}," in told()[0]


def test_a_link_in_place_of_a_report_leads_nowhere(tmp_path: Path):
    (tmp_path / "theirs").write_text("as it was")
    (tmp_path / "report.html").symlink_to(tmp_path / "theirs")
    write_report({}, tmp_path / "report.html", "json")
    assert not (tmp_path / "report.html").is_symlink() and (tmp_path / "theirs").read_text() == "as it was"


KEPT_IN = f"import os; print('kept in', os.environ.get('{VARIABLE}', '/tmp/torchinductor_root'))"
"""The other is torch's own choice."""


@pytest.mark.parametrize("first", [f"crossfed-compiled-{os.geteuid()}", ""])
def test_torch_keeps_nothing_that_it_runs_where_another_account_could_exchange_it(reached: Path, first: str):
    """It loads compiled code and pickled graphs again, from a folder whose name everybody knows."""
    (shared := reached / "tmp").mkdir()
    shared.chmod(0o1777)
    if first:
        strangers(shared / first)
    command = [sys.executable, "-m", "facility.launch", "--cpu", "--shared", str(reached), "--", "-c", KEPT_IN]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"TMPDIR": str(shared)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept = Path((said.stdout + said.stderr).partition("kept in ")[2].split()[0])
    assert kept.parent == shared and kept.name != first
    assert kept.stat().st_uid == os.geteuid() and stat.S_IMODE(kept.stat().st_mode) == 0o700


def asked_to_train() -> None:
    paths = [word for name in ("model", "dataset", "settings", "out") for word in (f"--{name}", "x")]
    facility.train.main([*paths, "--round", "0"])


def asked_to_measure() -> None:
    facility.measure.main(["--model", "x", "--out", "x"])


def asked_to_evaluate() -> None:
    evaluate_model(save_pico(Path(tempfile.mkdtemp()) / "model"), EvaluationSettings(tasks=["t"]), dataset=Path("x"))


@pytest.mark.parametrize("asked", [asked_to_train, asked_to_measure, asked_to_evaluate])
def test_nor_does_what_is_started_by_hand_and_in_a_jobs_own_folder_torch_chooses(
    reached: Path, monkeypatch, asked: Callable[[], None]
):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(reached))
    assert compiled_code_place() == {}
    monkeypatch.setattr(tempfile, "tempdir", str(strangers(reached / "tmp", 0o1777)))
    told: list[str] = []

    def begins(*_: object, env: Mapping[str, str] = os.environ, **__: object) -> int:
        told.append(env[VARIABLE])
        raise InputError("it has begun")

    monkeypatch.setattr("facility.training.train_round.train_round", begins)
    monkeypatch.setattr("facility.measuring.allocation.measure_allocation", begins)
    monkeypatch.setattr("facility.rounds.evaluation.subprocess.Popen", begins)
    with pytest.raises(InputError, match="it has begun"):
        asked()
    assert told == [str(reached / "tmp" / f"crossfed-compiled-{os.geteuid()}")]
    monkeypatch.setenv(VARIABLE, "elsewhere")
    assert compiled_code_place() == {}, "what a person chose"
