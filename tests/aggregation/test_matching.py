"""Tensors that only the update or only the base has a name for: tied weights, and what looks like some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from facility.exchange.errors import UpdateRefused
from tests.aggregation import make
from tests.aggregation.make import aggregate


def test_tied_weights_written_once_or_twice(tmp_path: Path):
    embedding = make.random_tensors(0, {"e": (40, 8)}, torch.bfloat16)["e"]
    base = make.model(tmp_path / "base", {"embed": embedding, "w": torch.ones(3)})
    moved = embedding + 0.01
    once = make.update(tmp_path / "once", {"embed": moved, "w": torch.ones(3)}, base=base, facility="once")
    twice = make.update(
        tmp_path / "twice", {"embed": moved, "lm_head": moved.clone(), "w": torch.ones(3)}, base=base, facility="twice"
    )
    aggregate(base=base, updates=[once, twice], out=tmp_path / "out")
    assert torch.equal(make.read_all(tmp_path / "out")["embed"], moved)
    both = make.model(tmp_path / "both", {"embed": embedding, "lm_head": embedding.clone(), "w": torch.ones(3)})
    lone = make.update(tmp_path / "lone", {"embed": moved, "w": torch.ones(3)}, base=both, facility="lone")
    aggregate(base=both, updates=[lone], out=tmp_path / "out2")
    assert torch.equal(make.read_all(tmp_path / "out2")["lm_head"], moved)
    untied = make.update(
        tmp_path / "untied", {"embed": moved, "lm_head": moved + 1, "w": torch.ones(3)}, base=base, facility="untied"
    )
    with pytest.raises(UpdateRefused, match="'untied'.*unknown .*lm_head"):
        aggregate(base=base, updates=[untied], out=tmp_path / "out3")


def test_norms_of_a_new_model_are_no_tied_weights(tmp_path: Path):
    """All of them are ones at first: an update that lacks one was averaged with another one's values in its place."""
    names = [f"layers.{i}.norm.weight" for i in range(3)]
    base = make.model(tmp_path / "base", {name: torch.ones(6) for name in names})
    held = {name: torch.ones(6) + 0.1 * place for place, name in enumerate(names[:2])}
    lacking = make.update(tmp_path / "lacking", held, base=base, facility="lacking")
    with pytest.raises(UpdateRefused, match=r"'lacking'.*1 missing \['layers.2.norm.weight'\]"):
        aggregate(base=base, updates=[lacking], out=tmp_path / "out")
