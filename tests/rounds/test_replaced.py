"""What a command of a round finds at its `--out` is removed only where an earlier attempt at a round left it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from facility import keys, unmask
from facility import round as round_module
from facility.exchange.errors import InputError
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.report import FAILURE, read_failure

MAINS: dict[str, tuple[Callable[[list[str]], int], tuple[str, ...]]] = {
    "round": (round_module.main, ("--model", "none")),
    "keys": (keys.main, ()),
    "unmask": (unmask.main, ("--request", "none")),
}


@pytest.fixture(params=MAINS)
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Calls the command, which fails for its settings are not there, with an `--out` and in a working directory."""
    main, more = MAINS[request.param]
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    return lambda out: main([*more, "--settings", "none", "--dataset", "none", "--round", "0", "--out", out])


def theses(place: Path) -> Path:
    place.mkdir(exist_ok=True)
    (place / "thesis.tex").write_text("three years")
    return place / "thesis.tex"


@pytest.mark.parametrize("out", ["", ".", "..", "../data", "../file", "../link", "../data/thesis.tex", "../model"])
def test_what_a_person_keeps_is_not_removed(command: Callable[[str], int], tmp_path: Path, out: str):
    kept = [theses(tmp_path / "data"), theses(tmp_path / "job")]
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("data")
    kept.append(theses(tmp_path / "model"))
    write_manifest(tmp_path / "model", Manifest(kind="model", federation="f", round=0))
    with pytest.raises(InputError, match="would be removed"):
        command(out)
    assert all(one.read_text() == "three years" for one in kept)
    assert (tmp_path / "file").read_text() == "x" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("out", ["a" * 300, "../data/thesis.tex/more", "/" + "a" * 5000])
def test_a_path_that_cannot_be_is_one_error(command: Callable[[str], int], tmp_path: Path, out: str):
    theses(tmp_path / "data")
    with pytest.raises(InputError, match="too long a name|is not a folder"):
        command(out)


@pytest.mark.parametrize("left", ["nothing", "empty", "failure", "update", "job"])
def test_what_an_earlier_attempt_left_is_replaced(command: Callable[[str], int], tmp_path: Path, left: str):
    place = tmp_path / "job" / "update" if left == "job" else tmp_path / "there"
    if left != "nothing":
        place.mkdir()
    if left == "failure":
        (place / FAILURE).write_text(json.dumps({"format": 1}))
    if left == "update":
        write_manifest(place, Manifest(kind="update", federation="f", round=0, facility="a"))
    if left == "job":  # a trainer that was killed as it wrote
        (place / "part").write_text("")
    assert command("update" if left == "job" else str(place)) == Outcome.SKIPPED
    assert read_failure(place) is not None and not (place / "part").exists()
