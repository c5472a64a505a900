"""A run's own directory: two federations of one account run at once, and what stands in the way ends in a sentence."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.archive.rounds import Archive
from coordinator.config.described import describe_federation
from coordinator.config.federation import read_federation
from coordinator.engine.one_run import RENDERED_LOCK, only_one, only_run
from coordinator.engine.place import run_place
from coordinator.engine.render import write_rendered
from coordinator.engine.run import _show_end, render_alone, run_federation
from facility.exchange.errors import InputError, TransientError
from facility.exchange.files.storage import why_unwritable
from tests.engine.engines import crossfed, weights
from tests.federations import write_federation
from tests.publishing.made import made_federation


def test_the_directory_is_private_made_anew_and_removed(tmp_path: Path):
    left = tmp_path / "engine" / "left-by-a-killed-run"
    left.mkdir(parents=True)
    with run_place(tmp_path) as place:
        assert not left.exists()
        assert {p.name: p.stat().st_mode & 0o777 for p in place.path.iterdir()} == {"events.jsonl": 0o600, "tmp": 0o700}
        assert place.path.stat().st_mode & 0o777 == 0o700
        assert all(value.startswith(str(place.path)) for value in place.environment().values())
    assert not place.path.exists()


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").exists(), reason="needs a read-only place")
def test_a_place_that_takes_no_file_is_told(tmp_path: Path):
    assert why_unwritable([tmp_path / "new"]) == "" and (tmp_path / "new").is_dir()
    reason = why_unwritable([tmp_path, Path("/proc/sys/kernel")])
    assert reason.startswith("/proc/sys/kernel ") and "give the same command again" in reason
    with pytest.raises(InputError), run_place(Path("/proc/sys/kernel")):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "wb", buffering=0))
    assert why_unwritable([tmp_path]) == f"{tmp_path} is full: free some room, then give the same command again"


def test_a_second_run_of_a_federation_changes_nothing_for_the_first(tmp_path: Path):
    """Not what is rendered, which the first reads in every round, nor what the archive says was accepted."""
    file = write_federation(tmp_path, ["a"], rounds=2)
    federation = read_federation(file)
    archive = Archive(federation.archive_path)
    (archive.path / "round-0000").mkdir(parents=True)
    archive.write_note("federation", dict(describe_federation(federation)))
    write_rendered(federation)
    before = files_below(tmp_path)
    file.write_text(file.read_text().replace("rounds: 2", "rounds: 9"))
    with only_one(federation):
        for command in (lambda: run_federation(file, live=False, accepted=True), lambda: render_alone(federation)):
            with pytest.raises(TransientError, match="another `crossfed run`"):
                command()
    after = files_below(tmp_path)
    assert {path: after[path] for path in before if path != file} == {p: before[p] for p in before if p != file}
    assert not archive.read_note("accepted")
    assert render_alone(read_federation(file))


@pytest.mark.parametrize("shared", ["workdir", "folder", "renamed"])
def test_federations_that_share_a_place_do_not_run_at_once(tmp_path: Path, shared: str):
    """The second removed the first's events and database, or rendered its own settings over those that the first one's
    steps read in every round; so it was where `archive:` was edited during a run."""
    file = write_federation(tmp_path / "x", ["a"], rounds=1)
    other = write_federation(tmp_path / "y", ["a"], rounds=1, name="other", archive="../archive-y")
    if shared == "workdir":
        other.write_text(other.read_text().replace("../work", str(tmp_path / "x" / "work")))
    else:
        moved = file.with_name("other.yml")
        moved.write_text(other.read_text().replace("../work", "../work-y"))
        other = moved
    first = read_federation(file)
    if shared == "renamed":
        other = other.rename(file)
    with only_run(first) as locks:
        assert len(locks) == 3
        place = "works in" if shared == "workdir" else "rendered in"
        with pytest.raises(TransientError, match=f"{place}.*of its own"):
            run_federation(other, live=False)
        if shared != "workdir":
            with pytest.raises(TransientError, match="rendered in"):
                render_alone(read_federation(other))
    assert not list(tmp_path.rglob("streamflow.yml"))
    with only_run(read_federation(other)):
        pass


def test_rendering_alone_leaves_no_lock_behind(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a"], rounds=1))
    render_alone(federation)
    assert not list(tmp_path.rglob("*.lock"))
    with only_run(federation):
        pass
    assert (federation.file.parent / RENDERED_LOCK).exists()


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow  # two whole runs; that each place is its own is the first law above
def test_two_federations_of_one_account_run_at_once(tmp_path: Path):
    """Under one HOME; each keeps StreamFlow's database and temporary files to itself."""
    files = [write_federation(tmp_path / name, ["a"], rounds=1, name=name, final_evaluation=False) for name in "xy"]
    processes = [crossfed("run", "--quiet", "-f", file, folder=tmp_path / "machine") for file in files]
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    assert [len(weights(file)) for file in files] == [1, 1]
    assert not any("starting again" in text for text in texts), texts
    assert not list((tmp_path / "machine" / "home").rglob("*.db"))


@pytest.mark.slow
def test_an_archive_that_start_refuses_ends_the_run_at_once_with_the_reason(tmp_path: Path):
    file = write_federation(tmp_path, ["a"], rounds=1)
    federation = read_federation(file)
    write_rendered(federation)
    Archive(federation.archive_path).begin(federation.path(federation.model), "another")
    process = crossfed("run", "--quiet", "-f", file, folder=tmp_path / "machine")
    text, _ = process.communicate(timeout=200)
    assert process.returncode not in (0, 75) and "belongs to federation 'another'" in text, text
    assert "starting again" not in text and "Traceback" not in text


def test_the_end_of_a_run_names_the_model_and_the_report_as_they_are_called(tmp_path: Path):
    """A folder in brackets was taken for a style, and left out."""
    federation = read_federation(made_federation(tmp_path / "[bold] texts"))
    archive, shown = Archive(federation.archive_path), io.StringIO()
    assert _show_end(federation, archive, Console(file=shown, width=1000), 0, "") == 0
    told = shown.getvalue()
    assert str(archive.path / "report.html") in told and str(archive.round_directory(2) / "model") in told
