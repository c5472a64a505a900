"""Real federations of pico models: real engines, real trainer processes, real averaging."""

from __future__ import annotations

import hashlib
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.codecs.sparseloco import CHUNK, kept_of
from facility.exchange.checkpoints.mean_walk import open_mean_walk
from facility.exchange.checkpoints.moments import FIRST, INT8, StoredMoments, shapes_in
from facility.exchange.checkpoints.second_moments import read_factors
from tests.engine.engines import crossfed, cwltool, forked_environment, killed_at, streamflow, weights
from tests.federations import write_federation

shared = pytest.mark.xdist_group("undisturbed")
"""These tests share one federation that ran: one process runs them, and it is made once."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two facilities, one of two processes, that ran under StreamFlow; its federation.yml.

    The blank and the accent in its folder's name reach every path of a step.
    """
    root = tmp_path_factory.mktemp("undisturbed") / "of Zoé"
    root.mkdir()
    path = make(root)
    for name in ("site-a.1", "b_2"):  # something to look for where it must not be
        (root / "sites" / name / "dataset" / f"private-of-{name}.txt").write_text(
            f"a sentence that only {name} may see\n"
        )
    temporary = root.parent / "tmp"
    temporary.mkdir()
    result = streamflow(
        path, root / "engine", environment=forked_environment(root / "engine") | {"TMPDIR": str(temporary)}
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return path


MOMENTS = {"optimizer_state": "shared", "optimizer_state_form": "int8", "first_moments": "mean"}
"""Travel value by value, and so are in the digests of what is compared."""


def make(root: Path, **changes: object) -> Path:
    path = write_federation(root, ["site-a.1", "b_2"], **{"training": MOMENTS} | changes)  # type: ignore[arg-type]
    path.write_text(path.read_text().replace("- name: site-a.1\n", "- name: site-a.1\n  training: {ranks: 2}\n"))
    write_rendered(read_federation(path))
    return path


def archive_of(path: Path) -> Archive:
    return Archive(read_federation(path).archive_path)


@shared
def test_a_run_leaves_nothing_in_the_temporary_folder(undisturbed: Path):
    """Nor does it take a name there that another account may have: /tmp/streamflow was of whoever ran first."""
    assert not list((undisturbed.parents[2] / "tmp").iterdir())


@shared
def test_perplexity_falls_and_the_model_loads(undisturbed: Path):
    from transformers import AutoModelForCausalLM

    data = summary(archive_of(undisturbed))
    assert [entry["decision"] for entry in data["rounds"]] == ["go on", "all 2 rounds are done"]
    falling = [data["initial_perplexity"], *(entry["global_perplexity"] for entry in data["rounds"])]
    assert falling[0] > falling[1] > falling[2], falling
    assert [row["status"] for entry in data["rounds"] for row in entry["facilities"]] == ["ok"] * 4
    assert len(data["final_evaluation"]) == 2
    model = AutoModelForCausalLM.from_pretrained(data["model"])
    assert sum(p.numel() for p in model.parameters()) > 10_000
    last = archive_of(undisturbed).model_for(2)
    moments = StoredMoments(last, shapes_in(open_checkpoint(last))).moments.values()
    assert {moment.form for moment in moments} == {INT8, FIRST}
    rows = (archive_of(undisturbed).path / "history.jsonl").read_text().splitlines()
    assert len(rows) == 4


@shared
@pytest.mark.slow
def test_cwltool_makes_the_same_weights_bit_for_bit(undisturbed: Path, tmp_path: Path):
    path = make(tmp_path)
    result = cwltool(path, tmp_path / "engine")
    assert result.returncode == 0, result.stdout[-4000:]
    assert weights(path) == weights(undisturbed)
    assert len(weights(path)) == 2


@shared
def test_no_dataset_file_leaves_its_facility(undisturbed: Path):
    root = undisturbed.parent.parent
    sites = {name: root / "sites" / name / "dataset" for name in ("site-a.1", "b_2")}
    contents = {path: path.read_bytes() for folder in sites.values() for path in folder.iterdir()}
    assert len(contents) == 8
    # Everything the coordinator and the facilities' job directories hold, and the archive.
    for folder in (root / "work", root / "archive", root / "engine" / "out"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files, folder
        for path in files:
            assert path.name not in {p.name for p in contents}, path
            held = path.read_bytes()
            assert not any(
                held == content or (len(content) > 30 and content in held) for content in contents.values()
            ), path
    databases = list((root / "engine" / "home" / ".streamflow").rglob("*.db"))
    assert databases
    for database in databases:
        with sqlite3.connect(database) as connection:
            dump = "\n".join(connection.iterdump())
        assert '"Directory"' in dump  # the database does hold what is staged, by directory
        for path, content in contents.items():
            assert path.name not in dump
            assert hashlib.sha1(content).hexdigest() not in dump and hashlib.sha256(content).hexdigest() not in dump


@shared
@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(("receiving",), id="once", marks=pytest.mark.nightly),
        pytest.param(("round 0: b_2 training", "receiving", "averaging"), id="thrice"),
    ],
)
def test_killed_anywhere_the_same_command_ends_with_the_same_weights(
    undisturbed: Path, tmp_path: Path, moments: tuple[str, ...]
):
    path = make(tmp_path, final_evaluation=False)
    for moment in moments:
        killed_at(moment, path, tmp_path / "engine")
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert weights(path) == weights(undisturbed)
    assert not list(archive_of(path).path.glob(".*.tmp"))
    again = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = again.communicate(timeout=200)
    assert again.returncode == 0 and not re.search(r": (site-a.1|b_2) training", text), text


@pytest.mark.slow  # the quicker laws are in tests/steps
def test_the_round_goes_on_without_a_facility_that_fails_and_says_so(tmp_path: Path):
    path = make(tmp_path, rounds=1)
    shutil.rmtree(tmp_path / "sites" / "b_2" / "dataset")
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 0, result.stdout[-4000:]
    rows = {row["facility"]: row for row in summary(archive_of(path))["rounds"][0]["facilities"]}
    assert (rows["site-a.1"]["status"], rows["b_2"]["status"]) == ("ok", "failed")
    assert "dataset" in rows["b_2"]["reason"]
    assert rows["site-a.1"]["weight"] == 1.0


@pytest.mark.slow  # the quicker law is in tests/steps
def test_too_few_facilities_end_the_run_with_the_reason_and_no_round(tmp_path: Path):
    path = make(tmp_path, minimum_facilities=2)
    shutil.rmtree(tmp_path / "sites" / "b_2" / "dataset")
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 1
    assert "minimum_facilities is 2" in result.stdout
    assert archive_of(path).rounds() == []


@shared
def test_an_archive_of_another_federation_is_refused(undisturbed: Path, tmp_path: Path):
    archive = archive_of(undisturbed).path
    path = make(tmp_path, name="other", archive=str(archive))
    before = {p: p.stat().st_mtime_ns for p in archive.rglob("*")}
    result = subprocess.run(
        [
            "python3",
            "-m",
            "coordinator.steps.start",
            "--federation",
            "coordinator.json",
            "--archive",
            str(archive),
            "--model",
            "../model",
        ],
        cwd=path.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "belongs to federation 'pico', not 'other'" in result.stderr
    assert {p: p.stat().st_mtime_ns for p in archive.rglob("*")} == before


@pytest.mark.slow  # the quicker laws are in tests/aggregation and tests/training
def test_shared_second_moments_and_walks_go_round_with_models_and_updates_sent_as_differences(tmp_path: Path):
    encoded = {"encoding": "delta-int8", "export_dtype": "float32", "optimizer_state": "shared"}
    encoded |= {"drift_correction": True}
    path = make(tmp_path, rounds=3, training=encoded, sending={"encoding": "delta-int8"})
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 0, result.stdout[-4000:]
    archive = archive_of(path)
    for number in range(3):
        model = archive.model_for(number + 1)
        shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
        factors, steps = read_factors(model, shapes)
        assert factors.keys() == shapes.keys() and steps > 0
        walk, rounds = open_mean_walk(model)
        assert walk.tensors.keys() == shapes.keys() and rounds == {"site-a.1": number, "b_2": number}
    assert [row["status"] for entry in summary(archive)["rounds"] for row in entry["facilities"]] == ["ok"] * 6
    assert "delta-int8" in (archive.path / "round-0002" / "round.json").read_text()


@pytest.mark.slow  # the quicker laws are in tests/aggregation/test_sparseloco.py and tests/steps
def test_few_values_go_round_in_a_long_federation_that_is_killed_on_its_way(tmp_path: Path):
    path = make(tmp_path, rounds=100, keep_rounds=0, training={"encoding": "sparseloco", "export_dtype": "float32"})
    for moment in ("round 2", "round 4"):
        killed_at(moment, path, tmp_path / "engine")
    archive = archive_of(path)
    assert list(archive.rounds())[:4] == [0, 1, 2, 3]
    for number in range(1, 4):
        found = archive.read_round(number)
        assert {(row.facility, row.status, row.sent) for row in found.facilities} == {
            ("site-a.1", "ok", "changed"),
            ("b_2", "ok", "changed"),
        }
        old, new = (open_checkpoint(archive.model_for(one)) for one in (number, number + 1))
        sizes = [entry.elements for entry in new.tensors.values()]
        sent = sum(kept_of(min(CHUNK, size - start)) for size in sizes for start in range(0, size, CHUNK))
        changed = sum(int((old.read(name) != new.read(name)).sum()) for name in new.tensors)
        assert 0 < changed <= 2 * sent < sum(sizes)
