"""What a coordinator sees of a facility's gradients in a round are those of plain PyTorch on its data."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from coordinator.aggregation.squared_gradients import RowsOfUpdates
from coordinator.aggregation.updates import Update
from facility.dataset import open_dataset
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import Factors, write_factors
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in

BATCH = 4


def rows_of_gradients(model: Path, dataset: Path) -> dict[str, np.ndarray]:
    """Row means of the squared gradients of the mean loss over the whole data set, a vector's by value."""
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.from_numpy(np.asarray(open_dataset(dataset).split("train"), dtype=np.int64))
    trained(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {}
    for name, parameter in trained.named_parameters():
        assert parameter.grad is not None
        squares = parameter.grad.double() ** 2
        found[name] = (squares.flatten(1).mean(1) if squares.ndim > 1 else squares).numpy()
    return found


def add_received(model: Path, out: Path) -> None:
    """Write a copy of the model with second moments of other facilities, about as large as its own."""
    shutil.copytree(model, out)
    rng, factors = np.random.default_rng(0), {}
    for name, entry in open_checkpoint(model).tensors.items():
        rows = (rng.random(entry.shape[0]) * 1e-3).astype(np.float32)
        columns = rng.random(entry.elements // entry.shape[0])
        of_one_matrix = (columns * (rows.mean() / columns.mean())).astype(np.float32)
        factors[name] = Factors(rows, of_one_matrix if len(entry.shape) > 1 else None)
    write_factors(out, factors, steps=9)


def test_rounds_of_one_step_show_the_gradients_of_that_step_with_and_without_received_second_moments(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data", train=BATCH), save_pico(tmp_path / "model")
    following = tmp_path / "following"
    add_received(model, following)
    training = {"optimizer_state": "shared", "steps": 1, "batch_sequences": BATCH, "clip_norm": 0.0}
    first = arguments(tmp_path / "0", model, dataset, **training)
    second = arguments(tmp_path / "1", following, dataset, 1, **training)
    second[second.index("--state") + 1] = str(tmp_path / "0" / "state")
    rounds_in([("first", first), ("second", second)])
    shapes = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items()}
    expected = rows_of_gradients(model, dataset)
    for number, sent in enumerate((model, following)):
        out = tmp_path / str(number) / "out"
        update = Update(facility="a", directory=out, checkpoint=open_checkpoint(out), report=None, staleness=0)
        seen = RowsOfUpdates([update], open_checkpoint(sent), shapes)
        for name, rows in expected.items():
            found = seen.of(name)
            assert found is not None and found.width == np.prod(shapes[name][1:], dtype=int)
            assert np.allclose(found.values[0], rows, rtol=1e-3, atol=1e-8), (number, name)
    assert expected["model.embed_tokens.weight"].max() > 1e-5
