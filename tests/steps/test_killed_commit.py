"""A coordinator that is killed between averaging and the commit closes the round again, with the same moments."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.start import start
from facility.exchange.checkpoints.moments import BLOCKS, FIRST, FULL, INT8
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from tests.aggregation.test_second_moments import with_factors
from tests.aggregation.updates import write_update
from tests.distributed import Started
from tests.moments import with_moments
from tests.pico import save_pico
from tests.steps.killed_commit import SETTINGS

FORMS = {"factors": (), BLOCKS: (BLOCKS,), INT8: (INT8,), FULL: (FULL,), "first": (FIRST,), "both": (INT8, FIRST)}


def begun(directory: Path) -> Archive:
    """An archive with the initial model, which is the same each time."""
    archive = Archive(directory / "archive")
    start(archive, save_pico(directory / "model", dtype="bfloat16"), SETTINGS)
    return archive


def closed(archive: Archive, updates: list[Path]) -> dict[str, str]:
    """Digests of the next model's tensors, its moments included, and of the state."""
    close_round(
        CollectedRound(
            archive=archive, settings=SETTINGS, model=archive.model_for(0), number=0, arrived=sort_out(updates)
        )
    )
    found = {}
    for name in ("model", "state"):
        directory = archive.round_directory(0) / name
        verify_manifest(directory)
        files = read_manifest(directory).files
        found |= {f"{name}/{path}": one.digest for path, one in files.items() if path.endswith(".safetensors")}
    return found


IN_ALL = ("factors", "both")
"""Forms that the default suite tries, which have all parts of the others."""


@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f in IN_ALL else pytest.mark.slow) for f in FORMS])
def test_the_round_is_closed_again_with_the_same_bytes(form: str, tmp_path: Path):
    archive = begun(tmp_path)
    updates = []
    for seed, name in enumerate("abc"):
        update = write_update(tmp_path / name, archive.model_for(0), name, tokens=100 + seed)
        if form == "factors":
            with_factors(update, 1.0 + seed)
        else:
            with_moments(update, *FORMS[form], seed=seed)
        updates.append(update)
    for place in ("averaged", "renaming"):
        said = tmp_path / "said" / place
        killed = Started(
            "tests.steps.killed_commit", [str(archive.path), place, *map(str, updates)], said, dict(os.environ)
        ).ended()
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert archive.rounds() == [] and list(archive.path.glob(".round-0000.*.tmp")), "it was at work"
    found = closed(archive, updates)
    assert archive.rounds() == [0] and not list(archive.path.glob(".round-0000.*.tmp"))
    folders = {path.split("/")[1] for path in found if path.startswith("model/")}
    assert folders >= ({"second_moments"} if form == "factors" else {"moments"})
    quiet = Archive(tmp_path / "quiet" / "archive")
    quiet.path.parent.mkdir()
    start(quiet, tmp_path / "model", SETTINGS)
    sent = read_manifest(quiet.model_for(0))
    assert sent.content_sha256 == read_manifest(archive.model_for(0)).content_sha256
    assert found == closed(quiet, updates)
