"""Updates that travel as differences, and those that differ from nothing that was received."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.checkpoints.checkpoint import ADAPTER
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.smaller import make_smaller


def test_the_first_adapters_of_a_whole_model_travel_in_full(tmp_path: Path):
    update, model = tmp_path / "update", tmp_path / "model"
    for folder in (update, model):
        folder.mkdir()
    (model / "model.safetensors").write_bytes(b"the whole model")
    (update / ADAPTER).write_bytes(b"adapters")
    settings = TrainingSettings(encoding="delta-int8", export_dtype="float32")
    state, patterns = tmp_path / "state", Patterns()
    assert make_smaller(update, model=model, state=state, round=0, settings=settings, patterns=patterns) is None
    assert [path.name for path in update.iterdir()] == [ADAPTER] and (update / ADAPTER).read_bytes() == b"adapters"
    assert not state.exists(), "and nothing is left unsent"
