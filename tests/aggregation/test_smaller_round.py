"""A facility's update in few bytes, from the end of its training to the coordinator's receive step."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.steps import receive as receive_step
from coordinator.steps.expectation import Expected
from coordinator.steps.receive import receive
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import ConfigurationError
from facility.exchange.files.storage import file_error_sentence
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.smaller import make_smaller, residual_to_resume
from tests.aggregation import make

SHAPES = {"body.weight": (200, 100), "head.weight": (50,)}


@pytest.mark.parametrize("encoding", ["delta-int8", "delta-int4", "sparse"])
def test_two_rounds_there_and_back(tmp_path: Path, encoding: str):
    settings = TrainingSettings(encoding=encoding, export_dtype="float32")
    patterns = Patterns((), ("head.*",))
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    for number in (0, 1):
        base = make.model(tmp_path / f"base{number}", start, round=number)
        before = residual_to_resume(tmp_path / "state", number, settings)
        assert (before is None) == (number == 0)
        begun = {n: t.float() for n, t in start.items()}
        for name, kept in make.read_all(before).items() if before else ():
            begun[name] += kept
        trained = make.moved(begun, number + 1, 1e-4)
        federated = {"body.weight": trained["body.weight"]}
        for _ in range(2):  # the second attempt at a round replaces what the first kept
            update = make.update(tmp_path / "update", federated, base=base, facility="alpha")
            whole = sum(f.stat().st_size for f in update.glob("*.safetensors"))
            make_smaller(
                update, model=base, state=tmp_path / "state", round=number, settings=settings, patterns=patterns
            )
            message = tmp_path / f"{number}-message"
            shutil.rmtree(message, ignore_errors=True)
            update.rename(message)
        assert read_manifest(message).encoding == encoding
        assert sum(f.stat().st_size for f in message.glob("*.safetensors")) < 0.3 * whole
        decoded = tmp_path / f"decoded{number}"
        told = receive(
            message,
            Expected(
                facility="alpha",
                round=number,
                model=base,
                evaluation=False,
                settings=AggregationSettings(exclude=["head.*"]),
            ),
            decoded=decoded,
        )
        assert told is None, told
        verify_manifest(decoded)
        got = make.read_all(decoded)
        assert torch.equal(got["head.weight"], start["head.weight"].float())
        step = trained["body.weight"] - start["body.weight"].float()
        lost = got["body.weight"] - trained["body.weight"]
        assert float(lost.norm() / step.norm()) < 0.2
        kept = make.read_all(residual_to_resume(tmp_path / "state", number + 1, settings))
        assert list(kept) == ["body.weight"]  # nothing is lost: what has not arrived is what is kept
        torch.testing.assert_close(got["body.weight"] + kept["body.weight"], trained["body.weight"])
    assert sorted(p.name for p in (tmp_path / "state" / "residual").iterdir()) == ["round-0", "round-1"]
    whole = residual_to_resume(tmp_path / "state", 2, TrainingSettings())
    assert whole is not None and list(make.read_all(whole)) == ["body.weight"]  # goes with the first whole update
    assert residual_to_resume(tmp_path / "state", 2, TrainingSettings(), built_in=False) is None


def test_another_reference_is_told_to_be_sent_in_full(tmp_path: Path):
    settings = TrainingSettings(encoding="delta-int8", export_dtype="float32")
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    update = make.update(tmp_path / "update", make.moved(start, 1), base=base, facility="alpha")
    make_smaller(update, model=base, state=tmp_path / "state", round=0, settings=settings, patterns=Patterns())
    other = make.model(tmp_path / "other", make.moved(start, 2))
    told = receive(
        update,
        Expected(facility="alpha", round=0, model=other, evaluation=False, settings=AggregationSettings()),
        decoded=tmp_path / "decoded",
    )
    assert told is not None and told.kind == "refused" and "send it in full" in told.reason
    assert not (tmp_path / "decoded").exists()


def test_where_no_round_takes_late_updates_one_of_an_earlier_round_is_refused_in_words(tmp_path: Path):
    """`maximum_staleness` without a quorum: no step is told of the archive, and an assertion was the reason."""
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    update = make.update(tmp_path / "update", make.moved(start, 1), base=base, facility="alpha")
    settings = AggregationSettings(maximum_staleness=2)
    expected = Expected(facility="alpha", round=1, model=base, evaluation=False, settings=settings)
    told = receive(update, expected, decoded=tmp_path / "decoded")
    assert told is not None and told.kind == "refused" and told.reason.endswith("it is of round 0, expected round 1")


def encoded_update(root: Path) -> tuple[Path, Expected]:
    """A sound update in a few bytes, and what the coordinator expects."""
    settings = TrainingSettings(encoding="delta-int8", export_dtype="float32")
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    base = make.model(root / "base", start)
    update = make.update(root / "update", make.moved(start, 1), base=base, facility="alpha")
    make_smaller(update, model=base, state=root / "state", round=0, settings=settings, patterns=Patterns())
    return update, Expected(facility="alpha", round=0, model=base, evaluation=False, settings=AggregationSettings())


@pytest.mark.parametrize("full", ["message", "state"])
def test_of_two_disks_the_one_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str):
    """The message is written into the work directory and what it leaves into the state beside the dataset, at once: a
    full work directory was told with the name of the other."""
    update, base, begun = (
        tmp_path / "work" / "update",
        tmp_path / "base",
        make.random_tensors(0, SHAPES, torch.bfloat16),
    )
    make.model(base, begun)
    make.update(update, make.moved(begun, 1), base=base, facility="alpha")
    disk = str(tmp_path / {"message": "work", "state": "state"}[full])
    pwrite = os.pwrite

    def limited(descriptor: int, content: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(disk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", limited)
    settings = TrainingSettings(encoding="delta-int8", export_dtype="float32")
    with pytest.raises(OSError, match="No space") as raised:
        make_smaller(update, model=base, state=tmp_path / "state", round=0, settings=settings, patterns=Patterns())
    said = file_error_sentence(raised.value)
    assert f" is full: {disk}/" in said and " for this file alone); free some room" in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_coordinator_without_room_refuses_no_facility(tmp_path: Path, monkeypatch, number: int):
    update, expected = encoded_update(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(number, "no", str(tmp_path / "decoded"))

    monkeypatch.setattr(receive_step, "decode_update", full)
    with pytest.raises(OSError) as raised:
        receive(update, expected, decoded=tmp_path / "decoded")
    assert raised.value.errno == number


@pytest.mark.parametrize(
    "fault", [RuntimeError("odd\x1b[31m"), OSError(errno.EACCES, "no"), OSError(errno.EMFILE, "no")]
)
def test_what_an_update_does_to_our_code_is_its_facilitys_failure_and_logged_with_its_place(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture, fault: Exception
):
    update, expected = encoded_update(tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(receive_step, "decode_update", fails)
    with caplog.at_level(logging.WARNING):
        told = receive(update, expected, decoded=tmp_path / "decoded")
    assert told is not None and told.kind == "refused" and "cannot be read" in told.reason
    assert "in check_training" in caplog.text and "\x1b" not in caplog.text + told.reason


def test_half_precision_exports_are_not_encoded():
    with pytest.raises(ConfigurationError, match="needs export_dtype 'float32'"):
        TrainingSettings(encoding="delta-int8", export_dtype="bfloat16")
