"""Law: what is one weight under two names, in the model and in every update, is one in the next model by every rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.aggregation.one_weight import one_weight
from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.delta import encode_update
from facility.exchange.checkpoints.second_moments import Factors, write_factors
from facility.exchange.messages.manifest import read_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES: dict[str, tuple[int, ...]] = {EMBEDDING: (40, 120), "a.weight": (40, 120), "a.norm": (7,), "b.norm": (7,)}


def tied(seed: int, scale: float) -> make.Tensors:
    drawn = make.random_tensors(seed, SHAPES, torch.float32, scale)
    return drawn | {HEAD: drawn[EMBEDDING].clone()}


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A new model, whose norms are alike, and the updates of five facilities with second moments of each parameter."""
    start = tied(0, 0.3) | {name: torch.ones(7) for name in ("a.norm", "b.norm")}
    start = {name: value.bfloat16() for name, value in start.items()}
    base, updates = make.model(tmp_path / "m0", start), {}
    for number, who in enumerate("abcde"):
        steps, rng = tied(10 + number, 0.01), np.random.default_rng(number)
        after = {name: (value.float() + steps[name]).bfloat16() for name, value in start.items()}
        updates[who] = make.update(tmp_path / who, after, base=base, facility=who)
        squares = {name: rng.lognormal(sigma=1.5, size=shape) for name, shape in SHAPES.items()}
        factors = {
            name: Factors(one.astype("f4")) if one.ndim < 2 else Factors(*(one.mean(i).astype("f4") for i in (1, 0)))
            for name, one in squares.items()
        }
        write_factors(updates[who], factors, steps=4)
        write_manifest(updates[who], read_manifest(updates[who]))
    return base, updates


@pytest.mark.parametrize("encoding", ["full", "delta-int8"])
@pytest.mark.parametrize("rule", RULES.names())
def test_a_tied_weight_that_is_stored_twice_stays_one(
    begun: tuple[Path, dict[str, Path]], tmp_path: Path, rule: str, encoding: str
):
    """Of its second moments only those of the embedding travel, and a random choice is drawn for each name."""
    base, updates = begun
    if encoding != "full":
        for who, path in updates.items():
            encode_update(full=path, reference=base, out=tmp_path / f"{who}-message", encoding=encoding)
        updates = {who: tmp_path / f"{who}-message" for who in updates}
    settings = AggregationSettings(rule=f"{rule}+nesterov" if rule == "heloco" else rule)
    aggregate(base=base, updates=updates, out=tmp_path / "m1", settings=settings)
    found = make.read_all(tmp_path / "m1")
    assert torch.equal(found[EMBEDDING], found[HEAD]) and not torch.equal(found[EMBEDDING], found["a.weight"])
    if rule == "fisher":  # weighed, and not both averaged plainly
        aggregate(base=base, updates=updates, out=tmp_path / "mean", settings=AggregationSettings(rule="mean"))
        assert not torch.equal(found[HEAD], make.read_all(tmp_path / "mean")[HEAD])


def test_what_is_alike_in_the_model_alone_is_no_one_weight(begun: tuple[Path, dict[str, Path]]):
    base, updates = (open_checkpoint(begun[0]).tensors, [open_checkpoint(path).tensors for path in begun[1].values()])
    pair = sorted((EMBEDDING, HEAD), key=list(base).index)
    assert one_weight(base, updates) == dict.fromkeys(pair, pair)
    norms = {"a.norm", "b.norm"}
    assert one_weight(base, []).keys() == {*pair, *norms}
    only = {name: entry for name, entry in base.items() if name != HEAD}  # the update has the weight once
    assert one_weight(base, [{**only, HEAD: only[EMBEDDING]}]).keys() == {*pair, *norms}
