"""The steps that the coordinator asks for in a round: that many are taken, over the same part of the schedule."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from facility.exchange.messages.report import Report, read_report
from tests.pico import save_pico
from tests.training.federation import train, write_dataset, write_settings


def trained(root: Path, name: str, *options: str, **settings: object) -> tuple[Report, str]:
    """Report and content digest of a round, each from a state of its own."""
    out = root / name / "update"
    out.parent.mkdir()
    described = write_settings(root / name / "settings.json", **settings)  # type: ignore[arg-type]
    train(out, root / "model", root / "data", described, options=options)
    return read_report(out), read_manifest(out).content_sha256


def test_as_many_steps_as_asked_and_none_asked_is_what_the_settings_say(tmp_path: Path):
    write_dataset(tmp_path / "data")
    model = save_pico(tmp_path / "model")
    write_manifest(model, Manifest(kind="model", federation="pico", round=0))
    plain, digest = trained(tmp_path, "plain")
    same, other = trained(tmp_path, "same", "--steps", "3")
    assert plain.steps == same.steps == 3 and digest == other, "bit for bit"
    more, _ = trained(tmp_path, "more", "--steps", "5")
    assert (more.steps, more.samples, more.position) == (5, 20, 20), "weight and position are of what was done"
    constant = {"schedule": "constant", "minimum_learning_rate_ratio": 1.0}
    _, asked = trained(tmp_path, "asked", "--steps", "5", **constant)
    _, five = trained(tmp_path, "five", steps=5, **constant)
    assert asked == five, "at a constant rate it is a round of five steps"
