"""A step from received adapters is the step that peft's own model takes on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from facility.exchange.messages.report import read_report
from tests.training.family_trial import TRAINING, plain_step, recorded
from tests.training.layouts import arguments, rounds_in


def sent_on(update: Path, place: Path) -> Path:
    """An update as the model of the next round."""
    update.rename(place)
    (place / "manifest.json").unlink()
    return place


def check_step_is_pefts(
    folder: Path, dataset: Path, model: Path, lora: dict[str, Any], load: Callable[[Path], Any], *, within: float
) -> list[str]:
    """Train two rounds, and by peft the second one; returns the names of the parameters that peft trained.

    `load`: peft's model of the adapters in a directory. `within`: the largest difference of a value.
    """
    rounds_in([("r0", arguments(folder / "r0", model, dataset, lora=lora, learning_rate=1e-2))])
    assert read_report(folder / "r0/out").loss_returned < read_report(folder / "r0/out").loss_received
    received = sent_on(folder / "r0/out", folder / "received")
    with recorded() as batches:
        more = TRAINING | {"lora": lora | {"base": str(model)}}
        rounds_in([("r1", arguments(folder / "r1", received, dataset, round=1, **more))])
    plain, found = load(received), load(folder / "r1/out")
    trained = {name: one for name, one in plain.named_parameters() if one.requires_grad}
    before = {name: one.detach().clone() for name, one in trained.items()}
    plain_step(plain, trained.values(), batches)
    after = dict(found.named_parameters())
    for name, one in trained.items():
        assert (after[name] - one).abs().max() < within, name
        assert not after[name].equal(before[name]), name
    return list(trained)
