"""Running statistics of batch normalisation take the plain mean, whatever moves the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.manifest import read_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate

COUNTER = torch.tensor(7)


def tensors_of(seed: int) -> make.Tensors:
    drawn = make.random_tensors(seed, {"conv.weight": (4, 3, 2, 2), "norm.running_mean": (4,)}, torch.float32)
    return drawn | {"norm.running_var": torch.rand(4) + 0.01, "norm.num_batches_tracked": COUNTER}


@pytest.mark.parametrize("optimizer", SERVER_OPTIMIZERS.names())
def test_statistics_are_averaged_and_weights_are_moved_by_the_server_optimizer(tmp_path: Path, optimizer: str):
    """Variances fall from round to round, so that momentum would carry them below zero."""
    settings = AggregationSettings(rule=optimizer, server_learning_rate=1.5, weights="equal", **make.UNBOUNDED)
    sent = tensors_of(0)
    base, state = make.model(tmp_path / "m0", sent), None
    for number in range(4):
        scale = 0.1 ** (number + 1)
        updates = {
            who: make.moved(sent, 10 * number + i)
            | {"norm.running_var": torch.full((4,), scale * (i + 1)), "norm.num_batches_tracked": COUNTER}
            for i, who in enumerate(("a", "b"))
        }
        paths = [make.update(tmp_path / f"{w}{number}", u, base=base, facility=w) for w, u in updates.items()]
        out, after = tmp_path / f"m{number + 1}", tmp_path / f"s{number + 1}"
        aggregate(base=base, updates=paths, out=out, settings=settings, state_in=state, state_out=after)
        found = make.read_all(out)
        for name in ("norm.running_mean", "norm.running_var"):
            mean = (updates["a"][name].double() + updates["b"][name].double()) / 2
            torch.testing.assert_close(found[name].double(), mean, rtol=0, atol=1e-6)
        assert found["norm.num_batches_tracked"].equal(COUNTER)
        if optimizer != "plain":
            mean = (updates["a"]["conv.weight"] + updates["b"]["conv.weight"]) / 2
            assert not torch.allclose(found["conv.weight"], mean, rtol=0, atol=1e-7)
        sent, base, state = found, out, after


@pytest.mark.parametrize("rule", RULES.names())
def test_no_rule_takes_a_variance_below_those_of_the_facilities(tmp_path: Path, rule: str):
    """Variances begin at 1 and fall: rules that lengthen a step, or divide it by a density, took them below zero."""
    start = {"conv.weight": torch.zeros(64), "norm.running_var": torch.ones(4096)}
    base = make.model(tmp_path / "m0", start)
    found = [torch.rand(4096, generator=torch.Generator().manual_seed(i)) * 0.5 + 0.01 for i in range(3)]
    paths = [
        make.update(tmp_path / f"u{i}", start | {"norm.running_var": one}, base=base, facility=f"f{i}")
        for i, one in enumerate(found)
    ]
    named = f"{rule}+nesterov" if rule == "heloco" else rule
    settings = AggregationSettings(rule=named, weights="equal", heloco_staleness=0, **make.UNBOUNDED)
    aggregate(base=base, updates=paths, out=tmp_path / "m1", settings=settings)
    assert bool((make.read_all(tmp_path / "m1")["norm.running_var"] >= torch.stack(found).amin(0) - 1e-6).all())


LONGER = """
from coordinator.aggregation.rules.contract import AggregationRule, Plan
DECLARATION = AggregationRule(name="longer", implementation="plan", lengthens=True)
def plan(updates):
    return Plan(coefficients=[3 * weight for weight in updates.weights])
"""


def test_a_rule_of_ones_own_that_lengthens_steps_leaves_variances_alone(tmp_path: Path, monkeypatch):
    (tmp_path / "own_longer").mkdir()
    (tmp_path / "own_longer" / "__init__.py").touch()
    (tmp_path / "own_longer" / "rule.py").write_text(LONGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    start = {"conv.weight": torch.zeros(8), "norm.running_var": torch.ones(8)}
    base = make.model(tmp_path / "m0", start)
    moved = {"conv.weight": torch.ones(8), "norm.running_var": torch.full((8,), 0.5)}
    paths = [make.update(tmp_path / name, moved, base=base, facility=name) for name in ("a", "b")]
    settings = AggregationSettings(rule="own_longer.rule", weights="equal", **make.UNBOUNDED)
    aggregate(base=base, updates=paths, out=tmp_path / "m1", settings=settings)
    found = make.read_all(tmp_path / "m1")
    assert torch.all(found["conv.weight"] == 3) and torch.all(found["norm.running_var"] == 0.5)


def test_a_counter_that_moved_is_refused_unless_it_is_personal(tmp_path: Path):
    sent = tensors_of(0)
    base = make.model(tmp_path / "m0", sent)
    moved = make.moved(sent, 1) | {"norm.num_batches_tracked": COUNTER + 1}
    path = make.update(tmp_path / "a", moved, base=base, facility="a")
    with pytest.raises(UpdateRefused, match="only tensors of BF16, F16, F32, F64 can be averaged"):
        aggregate(base=base, updates=[path], out=tmp_path / "m1", settings=AggregationSettings(rule="mean"))
    bare = {"conv.weight": moved["conv.weight"]}
    path = make.update(tmp_path / "b", bare, base=base, facility="b")
    settings = AggregationSettings(rule="mean", batch_norm="personal", exclude=["nothing.*"])
    aggregate(base=base, updates=[path], out=tmp_path / "m2", settings=settings)
    found = make.read_all(tmp_path / "m2")
    assert all(found[name].equal(sent[name]) == name.startswith("norm.") for name in sent)
    assert settings.personal[0] == "nothing.*" and len(settings.personal) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_variance_below_zero_is_its_own_facilitys_absence(tmp_path: Path, dtype: torch.dtype):
    """In the mean it would stop every facility, each of which refuses such a model."""
    sent = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors_of(0).items()}
    base = make.model(tmp_path / "m0", sent)
    variances = {"a": 1.0, "b": 0.0, "bad": -8.0}
    updates = {
        who: make.update(
            tmp_path / who, sent | {"norm.running_var": torch.full((4,), value, dtype=dtype)}, base=base, facility=who
        )
        for who, value in variances.items()
    }
    with pytest.raises(UpdateRefused, match="'bad'.*below zero"):
        check_update(updates["bad"], open_checkpoint(base), read_manifest(base), "bad", 0, content=False)
    settings = AggregationSettings(rule="mean")
    record = aggregate(base=base, updates=updates, out=tmp_path / "m1", settings=settings, drop_refused=True)
    assert list(record.dropped) == ["bad"] and [one.facility for one in record.participants] == ["a", "b"]
    assert torch.all(make.read_all(tmp_path / "m1")["norm.running_var"] == 0.5)
