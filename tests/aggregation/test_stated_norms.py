"""Norms that facilities state save a reading and change nothing: neither a bit of the model nor what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation import streams
from coordinator.aggregation.record import RoundRecord
from coordinator.aggregation.settings import AggregationSettings
from coordinator.steps.expectation import Expected
from coordinator.steps.receive import receive
from facility.contract import Call
from facility.exchange.checkpoints import native, step_norms
from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.checkpoints.delta import encode_update
from facility.exchange.checkpoints.spans import PIECE
from facility.exchange.checkpoints.step_norms import NAME, StepNorms, read_step_norms
from facility.exchange.messages.manifest import read_manifest, write_manifest
from facility.exchange.messages.settings import FacilitySettings
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.aggregation.test_reads_once import SLACK, read_by, size

pytestmark = pytest.mark.skipif(native.library() is None, reason="norms are stated by the compiled kernel")
SETTINGS = AggregationSettings(rule="mean+nesterov")
SHAPES: dict[str, tuple[int, ...]] = {"large": (300, 203), "odd": (777,), "one": (1,), "norm": (65536,)}
"""Lengths that fill neither a piece nor a run, and one that fills a piece."""
LONG = {"odd": (777,), "large": (36, 16831)}
"""More than a span, as `short_spans` leaves it."""


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of an eighth of their length, on both sides: no law depends on it, and a tensor of several is made soon."""
    for module in (step_norms, streams):
        monkeypatch.setattr(module, "SPAN", 8 * PIECE)


def states(update: Path, base: Path) -> Path:
    """As a facility of several ranks leaves it."""
    with StepNorms(open_checkpoint(base)) as norms:
        norms.read(open_checkpoint(update))
        norms.write(update)
    assert (update / NAME).exists()
    return resealed(update)


def resealed(update: Path) -> Path:
    write_manifest(update, dataclasses.replace(read_manifest(update), files={}))
    return update


def a_round(
    root: Path, count: int, dtype: torch.dtype = torch.bfloat16, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> tuple[Path, list[Path]]:
    """A model and `count` updates of unequal length, which state their norms."""
    start = make.random_tensors(0, shapes, dtype)
    base = make.model(root / "base", start)
    updates = []
    for i in range(count):
        moved = make.moved(start, i + 1, 1e-3 * (1 + 0.1 * i))
        updates.append(states(make.update(root / f"u{i}", moved, base=base, facility=f"f{i:02}"), base))
    return base, updates


def combined(root: Path, base: Path, updates: list[Path], **more: Any) -> tuple[dict[str, str], RoundRecord]:
    """Digests of the next model and state, and the record."""
    more = more | {"settings": more.get("settings", SETTINGS), "verify_base": True, "verify_updates": True}
    record = aggregate(base=base, updates=updates, out=root / "model", state_out=root / "state", **more)
    digests = {part: read_manifest(root / part).content_sha256 for part in ("model", "state")}
    return digests, record


def without_statements(updates: list[Path]) -> None:
    for update in updates:
        (update / NAME).unlink(missing_ok=True)
        resealed(update)


def compare(root: Path, base: Path, updates: list[Path], **more: Any) -> tuple[RoundRecord, RoundRecord]:
    """The records with and without statements, of equal models, states and rounds."""
    (first, second) = (root / "first", root / "second")
    first.mkdir()
    second.mkdir()
    stated, record = combined(first, base, updates, **more)
    without_statements(updates)
    measured, plain = combined(second, base, updates, **more)
    assert stated == measured
    assert alike(record) == alike(plain)
    return record, plain


def alike(record: RoundRecord) -> dict[str, Any]:
    told = dataclasses.asdict(record)
    for changing in ("seconds", "bytes_read"):
        del told[changing]
    return told


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_model_is_that_of_two_passes_to_the_last_bit(tmp_path: Path, dtype: torch.dtype):
    base, updates = a_round(tmp_path, 3, dtype, LONG)
    record, plain = compare(tmp_path, base, updates)
    assert record.bytes_read * 1.9 < plain.bytes_read
    assert min(record.details["clip_factors"].values()) < 1, "the longer half is clipped"


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc/self/io")
@pytest.mark.parametrize("count", [3, 4, 16])
def test_updates_are_read_once_however_many_there_are(tmp_path: Path, count: int):
    base, updates = a_round(tmp_path, count)
    needed = sum(map(size, (base, *updates)))
    found = read_by(lambda: combined(tmp_path, base, updates))
    assert needed <= found <= needed + SLACK + 60_000 * count


@pytest.mark.parametrize("wrong", ["more", "a little", "less than nothing", "not a number", "a span less", "no tensor"])
def test_a_wrong_statement_changes_nothing(tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture):
    base, updates = a_round(tmp_path, 4)
    told = json.loads((updates[2] / NAME).read_text())
    spans = told["squares"]["large"]
    if wrong == "no tensor":
        del told["squares"]["odd"]
    elif wrong == "a span less":
        spans.pop()
    else:
        values = {"more": spans[0] * 4, "a little": spans[0] * (1 + 1e-12), "less than nothing": -1.0}
        spans[0] = values.get(wrong, "nan")
    (updates[2] / NAME).write_text(json.dumps(told))
    resealed(updates[2])
    with caplog.at_level(logging.WARNING):
        compare(tmp_path, base, updates)
    assert ("f02 states a squared norm" in caplog.text) == (wrong in ("more", "a little"))


@pytest.mark.parametrize("scale", [30.0, -3.0], ids=["far", "turned"])
def test_an_outlier_is_quarantined_as_before(tmp_path: Path, scale: float):
    """By its norm, which is known before the pass, and by its direction, which only the pass finds."""
    start = make.random_tensors(0, SHAPES, torch.float32)
    step = make.random_tensors(1, SHAPES, torch.float32, 1e-3)
    base = make.model(tmp_path / "base", start)
    updates = []
    for i, factor in enumerate([1.0, 1.1, 0.9, scale]):
        moved = {name: value + factor * step[name] for name, value in start.items()}
        updates.append(states(make.update(tmp_path / f"u{i}", moved, base=base, facility=f"f{i}"), base))
    record, _ = compare(tmp_path, base, updates)
    assert set(record.quarantined) == {"f3"}


@pytest.mark.parametrize(
    "settings",
    [
        AggregationSettings(rule="geometric_median"),
        AggregationSettings(rule="median"),
        AggregationSettings(rule="mean", statistics="sample"),
        AggregationSettings(rule="mean", accumulate="float64"),
        AggregationSettings(rule="mean", exclude=["odd"]),
        AggregationSettings(rule="mean", clip_norm=0.5),
    ],
    ids=lambda settings: settings.rule + settings.statistics + settings.accumulate + "".join(settings.exclude),
)
def test_other_settings_get_the_same_model_too(tmp_path: Path, settings: AggregationSettings):
    base, updates = a_round(tmp_path, 3)
    compare(tmp_path, base, updates, settings=settings)


def test_a_tensor_that_comes_in_another_order_is_not_stated(tmp_path: Path):
    base, (update,) = a_round(tmp_path, 1)
    opened = open_checkpoint(base)
    values = np.zeros(777, np.float32)
    for starts in ([512, 0], [0, 300]):
        (tmp_path / "out").mkdir(exist_ok=True)
        with StepNorms(opened) as norms:
            for start in starts:
                norms.take("odd", "F32", start, values[start : start + 300 if start == 0 else 777])
            norms.write(tmp_path / "out")
        assert not (tmp_path / "out" / NAME).exists()
    assert read_step_norms(update, open_checkpoint(update).tensors) is not None


@pytest.mark.parametrize("asked", [True, False])
def test_a_trainer_of_ones_own_states_its_norm_where_it_is_asked_to(tmp_path: Path, asked: bool):
    base, (update,) = a_round(tmp_path, 1)
    settings = FacilitySettings(federation="test", facility="f00", rounds=3, seed=0, step_norms=asked)
    folders = {name: tmp_path / name for name in ("dataset", "out", "state")}
    call = Call(model=base, base=read_manifest(base), settings=settings, round=0, signals=[], **folders)
    trained = make.read_all(update)
    call.deliver(
        lambda out: save_tensors(out, trained.items()), tokens=8, loss_received=2, loss_returned=1, training_loss=1
    )
    assert (tmp_path / "out" / NAME).exists() == asked
    if asked:
        tensors = open_checkpoint(update).tensors
        told = read_step_norms(update, tensors)
        assert told is not None and read_step_norms(tmp_path / "out", tensors) == told


def test_nothing_is_stated_without_the_compiled_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base, (update,) = a_round(tmp_path, 1)
    (update / NAME).unlink()
    monkeypatch.setattr(step_norms.native, "library", lambda: None)
    with StepNorms(open_checkpoint(base)) as norms:
        norms.read(open_checkpoint(update))
        norms.write(update)
    assert not (update / NAME).exists()


def travelled(root: Path, base: Path, count: int, encoding: str, settings: AggregationSettings) -> list[Path]:
    """Updates that came as differences, as the receive step leaves them; each message brings figures of its own."""
    start, updates = make.read_all(base), []
    for i in range(count):
        moved = {name: value.float() for name, value in make.moved(start, i + 1, 1e-3 * (1 + 0.1 * i)).items()}
        full = make.update(root / f"full{i}", moved, base=base, facility=f"f{i:02}")
        message, decoded = root / f"message{i}", root / f"decoded{i}"
        encode_update(full=full, reference=base, out=message, encoding=encoding)
        (message / NAME).write_text(json.dumps({"format": 1, "span": step_norms.SPAN, "squares": {}}))
        resealed(message)
        told = receive(
            message,
            Expected(facility=f"f{i:02}", round=0, model=base, evaluation=False, settings=settings, content=False),
            decoded=decoded,
        )
        assert told is None, told
        updates.append(decoded)
    return updates


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        ("delta-int8", torch.float32),
        pytest.param("delta-int4", torch.bfloat16, marks=pytest.mark.slow),
        ("sparse", torch.bfloat16),
    ],
    ids=str,
)
def test_updates_that_came_as_differences_are_averaged_in_one_pass(tmp_path: Path, encoding: str, dtype: torch.dtype):
    base = make.model(tmp_path / "base", make.random_tensors(0, LONG, dtype))
    updates = travelled(tmp_path, base, 3, encoding, SETTINGS)
    record, plain = compare(tmp_path, base, updates)
    assert record.bytes_read * 1.9 < plain.bytes_read
    assert min(record.details["clip_factors"].values()) < 1, "the longer half is clipped"


def test_differences_get_no_norms_where_the_rule_must_know_more(tmp_path: Path):
    base = make.model(tmp_path / "base", make.random_tensors(0, SHAPES, torch.bfloat16))
    (update,) = travelled(tmp_path, base, 1, "delta-int8", AggregationSettings(rule="krum"))
    assert not (update / NAME).exists(), "neither the coordinator's nor what the message brought"


def test_figures_that_are_not_finite_are_not_stated(tmp_path: Path):
    base = make.model(tmp_path / "base", make.random_tensors(0, SHAPES, torch.bfloat16))
    with StepNorms(open_checkpoint(base)) as norms:
        norms.take("odd", "F32", 0, np.full(777, np.inf, np.float32), np.zeros(777, np.uint16))
        norms.write(tmp_path)
    assert not (tmp_path / NAME).exists()
