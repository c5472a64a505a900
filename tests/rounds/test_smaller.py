"""Updates that travel as differences, and those that differ from nothing that was received."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from facility.exchange.checkpoints.checkpoint import ADAPTER
from facility.exchange.checkpoints.delta_parts import FILE
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import InputError
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.sealed import find_flaw, write_seal
from facility.rounds.smaller import drop_pending, make_smaller, pending_residual, residual_path, residual_to_resume
from facility.rounds.sweep import forget_earlier

SETTINGS = TrainingSettings(encoding="delta-int8", export_dtype="float32")


@pytest.mark.parametrize("received", [(), (ADAPTER,)], ids=["first", "imported"])
def test_adapters_travel_in_full(tmp_path: Path, received: tuple[str, ...]):
    """Beside a model that holds none yet, or its own and the layers below them."""
    update, model = tmp_path / "update", tmp_path / "model"
    for folder in (update, model):
        folder.mkdir()
    for name in ("model.safetensors", *received):
        (model / name).write_bytes(b"what was received")
    (update / ADAPTER).write_bytes(b"adapters")
    settings = TrainingSettings(encoding="delta-int8", export_dtype="float32")
    state, patterns = tmp_path / "state", Patterns()
    assert make_smaller(update, model=model, state=state, round=0, settings=settings, patterns=patterns) is None
    assert [path.name for path in update.iterdir()] == [ADAPTER] and (update / ADAPTER).read_bytes() == b"adapters"
    assert not state.exists(), "and nothing is left unsent"


def written_by_the_trainer(tmp_path: Path, round: int, left_out: bytes) -> Path:
    """A message, and in the state what it leaves out, as a trainer leaves them."""
    message, pending = tmp_path / f"update-{round}", pending_residual(tmp_path / "state")
    message.mkdir()
    (message / FILE).write_bytes(b"a difference")
    pending.mkdir(parents=True)
    (pending / "model.safetensors").write_bytes(left_out)
    write_seal(pending)
    return message


def finish(tmp_path: Path, message: Path, round: int) -> None:
    made = make_smaller(
        message,
        model=tmp_path / "model",
        state=tmp_path / "state",
        round=round,
        settings=SETTINGS,
        patterns=Patterns(),
    )
    assert made is None and (message / FILE).read_bytes() == b"a difference", "it is not encoded again"


def test_what_a_message_leaves_out_counts_once_its_round_is_complete(tmp_path: Path):
    state = tmp_path / "state"
    for round in range(3):
        message = written_by_the_trainer(tmp_path, round, b"%d" % round)
        before = residual_to_resume(state, round, SETTINGS)
        assert (before.name if before else None) == (f"round-{round - 1}" if round else None)
        assert residual_to_resume(state, round + 1, SETTINGS) == before, "the trainer may have died: nothing was sent"
        finish(tmp_path, message, round)
        kept = residual_to_resume(state, round + 1, SETTINGS)
        assert kept == residual_path(state, round) and find_flaw(kept) == ""
        assert (kept / "model.safetensors").read_bytes() == b"%d" % round
    assert sorted(path.name for path in (state / "residual").iterdir()) == ["round-1", "round-2"]


def test_of_a_repeated_round_the_last_attempt_counts(tmp_path: Path):
    state = tmp_path / "state"
    finish(tmp_path, written_by_the_trainer(tmp_path, 0, b"first"), 0)
    (tmp_path / "update-0").rename(tmp_path / "lost")
    written_by_the_trainer(tmp_path, 0, b"killed")
    drop_pending(state)  # as every attempt begins
    (tmp_path / "update-0").rename(tmp_path / "lost too")
    finish(tmp_path, written_by_the_trainer(tmp_path, 0, b"second"), 0)
    assert (residual_path(state, 0) / "model.safetensors").read_bytes() == b"second"
    assert [path.name for path in (state / "residual").iterdir()] == ["round-0"]


def test_a_message_without_what_it_leaves_out_is_no_update(tmp_path: Path):
    message = written_by_the_trainer(tmp_path, 0, b"lost")
    drop_pending(tmp_path / "state")
    with pytest.raises(InputError, match="run the round again"):
        finish(tmp_path, message, 0)


def test_what_rounds_that_were_set_aside_left_out_is_sent_with_no_later_one(tmp_path: Path):
    state = tmp_path / "state"
    for round in (3, 4, 1):
        finish(tmp_path, written_by_the_trainer(tmp_path, round, b"%d" % round), round)
    assert residual_to_resume(state, 5, SETTINGS) == residual_path(state, 1)


def test_what_was_left_unsent_is_sent_once_where_updates_travel_whole_again(tmp_path: Path):
    """It stayed where it lay, whatever `crossfed run` had said, and went out with the next difference, if ever."""
    state, full = tmp_path / "state", dataclasses.replace(SETTINGS, encoding="full")
    finish(tmp_path, written_by_the_trainer(tmp_path, 0, b"rest"), 0)
    for attempt in range(2):
        assert residual_to_resume(state, 1, full) == residual_path(state, 0), attempt
        assert residual_to_resume(state, 1, full, built_in=False) is None, "a trainer of one's own does not know of it"
        update = tmp_path / f"whole-{attempt}"
        update.mkdir()
        more = {"model": tmp_path, "state": state, "round": 1, "settings": full, "patterns": Patterns()}
        assert make_smaller(update, **more) is None
    for settings in (full, SETTINGS):
        assert residual_to_resume(state, 2, settings) is None
    forget_earlier(state, 2)
    assert [path.name for path in (state / "residual").iterdir()] == ["round-1"]
    assert find_flaw(residual_path(state, 1)) == ""


def test_a_round_whose_update_is_masked_keeps_what_is_unsent_for_the_masks(tmp_path: Path):
    state, full = tmp_path / "state", dataclasses.replace(SETTINGS, encoding="full")
    finish(tmp_path, written_by_the_trainer(tmp_path, 0, b"rest"), 0)
    make_smaller(tmp_path, model=tmp_path, state=state, round=1, settings=full, patterns=Patterns(), masked=True)
    assert not residual_path(state, 1).exists()
