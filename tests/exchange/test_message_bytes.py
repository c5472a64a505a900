"""Law: what `crossfed check` expects of an encoded update is what it takes, of the smallest models as of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.memory.figures import ModelFigures, model_figures
from facility.exchange.checkpoints.delta import encode_update
from facility.exchange.messages.settings import TrainingSettings
from tests.aggregation import make
from tests.pico import save_pico


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, ModelFigures]:
    """A pico model, an update of it in which each value has moved, and the model's figures."""
    place = tmp_path_factory.mktemp("sent")
    tensors = make.read_all(save_pico(place / "pico"))
    base = make.model(place / "model", tensors)
    figures = model_figures(save_pico(place / "again"))
    return base, make.update(place / "update", make.moved(tensors, 1), base=base, facility="a"), figures


@pytest.mark.parametrize("encoding", ["delta-int8", "delta-int4", "sparse", "sparseloco"])
def test_an_update_takes_what_is_expected(encoding: str, sent: tuple[Path, Path, ModelFigures], tmp_path: Path):
    base, update, figures = sent
    taken = encode_update(full=update, reference=base, out=tmp_path / "message", encoding=encoding).message_bytes
    assert figures.returned(TrainingSettings(encoding=encoding, export_dtype="float32")) == pytest.approx(
        taken, rel=0.1
    )


def test_a_model_takes_no_more_than_is_expected_at_most(sent: tuple[Path, Path, ModelFigures], tmp_path: Path):
    base, _, figures = sent
    draw = torch.Generator().manual_seed(2)
    values = {
        name: torch.randint(-(1 << 15), 1 << 15, one.shape, generator=draw).to(torch.int16).view(torch.bfloat16)
        for name, one in make.read_all(base).items()
    }
    values = {name: torch.where(one.isfinite(), one, 1.0) for name, one in values.items()}
    old = make.model(
        tmp_path / "old", make.random_tensors(3, {k: tuple(v.shape) for k, v in values.items()}, torch.bfloat16)
    )
    new = make.model(tmp_path / "new", values, round=1)
    taken = encode_update(full=new, reference=old, out=tmp_path / "message", encoding="changed").message_bytes
    assert 2 * figures.parameters < taken <= figures.travelling_at_most(2 * figures.parameters, "changed", 1.0)
