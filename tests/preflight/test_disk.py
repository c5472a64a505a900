"""The bounds on disk, by hand; that real runs keep them: tests/engine/test_disk.py."""

from __future__ import annotations

from coordinator.preflight.disk import coordinator_disk, facility_disk
from coordinator.preflight.estimates import ModelFigures
from facility.exchange.messages.settings import TrainingSettings

P = 1024
MODEL = ModelFigures(parameters=P, bytes=2 * P, vocabulary=50, positions=0, hidden=8, layers=2, heads=2)


def test_a_facility_holds_two_models_an_update_a_state_and_what_a_round_writes_at_its_end():
    assert facility_disk(MODEL, TrainingSettings()).bytes == 2 * 2 * P + 2 * P + 8 * P + 12 * P
    without = TrainingSettings(keep_optimizer=False)
    assert facility_disk(MODEL, without).bytes == 2 * 2 * P + 2 * P + 12 * P
    assert facility_disk(MODEL, without, "delta-int8").bytes == 3 * 2 * P + 2 * P + 12 * P
    encoded = TrainingSettings(keep_optimizer=False, encoding="delta-int8", export_dtype="float32")
    assert facility_disk(MODEL, encoded).bytes == 2 * 2 * P + 4 * P + (P + 4 * P // 256) + 2 * 4 * P + 12 * P


def test_the_coordinator_does_not_need_more_for_more_rounds():
    one, two = TrainingSettings(), TrainingSettings(export_dtype="float32")
    few, many = (
        coordinator_disk(MODEL, {"a": one, "b": two}, rule="fedavgm", rounds=rounds, keep_rounds=3)
        for rounds in (3, 3000)
    )
    assert few.bytes == many.bytes == (1 + 3 + 1) * 2 * P + (2 * P + 4 * P) + 2 * (4 + 4) * P
    plain = coordinator_disk(MODEL, {"a": one}, rule="mean", rounds=5, keep_rounds=0)
    assert plain.bytes == (1 + 5 + 1) * 2 * P + 2 * P + 2 * 4 * P
    assert "server state, old and new 8.19 kB" in str(plain)
