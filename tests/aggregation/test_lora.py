"""Adapters: the mean of the factors, the mean of the products, and rounds that hold nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.aggregation import lora
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import ConfigurationError, InputError, UpdateRefused
from facility.exchange.files.durable import write_json
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import read_manifest, verify_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate

NAME = "base_model.model.layer.{}.weight"
LAYER = (12, 8)
RANK = 2


def test_products_by_hand():
    # Rank one: B A = [[1], [0]] [[1, 0]] and [[0], [1]] [[0, 1]]. The mean of the products is half the identity; the
    # factors average to [[.5], [.5]] [[.5, .5]] = a quarter everywhere.
    a, b = [np.array([[1.0, 0]]), np.array([[0.0, 1]])], [np.array([[1.0], [0]]), np.array([[0.0], [1]])]
    mean_a, mean_b = sum(a) / 2, sum(b) / 2
    assert (mean_b @ mean_a).tolist() == [[0.25, 0.25], [0.25, 0.25]]
    # |quarter - half identity| = sqrt(4 / 16) = 1/2, of |half identity| = sqrt(1/2)
    assert lora.relative_error(mean_a, mean_b, a, b, [0.5, 0.5]) == pytest.approx(0.5 / 0.5**0.5)
    # At rank two the products' mean is exact, at rank one half of its energy is lost.
    for rank, error in ((2, 0), (1, 0.5**0.5)):
        best = lora.mean_of_products(a, b, [0.5, 0.5], rank)
        assert lora.relative_error(*best, a, b, [0.5, 0.5]) == pytest.approx(error, abs=1e-7)


def test_truncation_is_the_best_of_its_rank():
    draw = np.random.default_rng(0)
    a = [draw.standard_normal((RANK, 8)) for _ in range(3)]
    b = [draw.standard_normal((12, RANK)) for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    exact = sum(w * y @ x for w, x, y in zip(weights, a, b, strict=True))
    best_a, best_b = lora.mean_of_products(a, b, weights, RANK)
    values = np.linalg.svd(exact, compute_uv=False)
    lost = np.linalg.norm(best_b @ best_a - exact)
    assert lost == pytest.approx(np.sqrt((values[RANK:] ** 2).sum()))
    assert lora.relative_error(best_a, best_b, a, b, weights) == pytest.approx(lost / np.linalg.norm(exact))


def test_one_update_is_itself_factor_by_factor():
    """Refactorised as it comes, a component became another one in every round, and the moments that a facility's
    optimizer keeps of it were those of what was gone."""
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((RANK, 8)), draw.standard_normal((12, RANK))
    for count in (1, 3):
        again = lora.mean_of_products([a] * count, [b] * count, [1 / count] * count, RANK)
        np.testing.assert_allclose(again[0], a, atol=1e-12)
        np.testing.assert_allclose(again[1], b, atol=1e-12)


@pytest.mark.parametrize("step", [1e-2, 1e-4])
def test_factors_go_on_from_where_the_updates_began(step: float):
    """Short steps of several facilities lead to a mean product whose factors are as near to those that were sent."""
    draw = np.random.default_rng(0)
    begun = draw.standard_normal((4, 8)), draw.standard_normal((12, 4))
    a, b = ([one + step * draw.standard_normal(one.shape) for _ in range(3)] for one in begun)
    found = lora.mean_of_products(a, b, [0.5, 0.3, 0.2], 4)
    for one, other in zip(found, begun, strict=True):
        assert np.linalg.norm(one - other) < 3 * step * other.size**0.5


def test_a_component_that_the_updates_disagree_on_does_not_make_the_other_factor_large():
    """The mean of A has next to nothing in the direction of the mean product."""
    a, b = [np.array([[1.0, 0.0]]), np.array([[-1.0, 0.01]])], [np.array([[1.0], [2.0]]), np.array([[-1.0], [-2.0]])]
    mean_a, mean_b = lora.mean_of_products(a, b, [0.5, 0.5], 1)
    assert lora.relative_error(mean_a, mean_b, a, b, [0.5, 0.5]) < 0.01
    assert np.linalg.norm(mean_a) == pytest.approx(np.linalg.norm(mean_b)) and mean_b.max() == np.abs(mean_b).max()


def test_a_layer_that_nobody_moved_can_still_be_trained():
    """B A has no gradient in either factor where both are zero; adapters begin with B alone at zero."""
    draw = np.random.default_rng(0)
    a = [draw.standard_normal((RANK, 8)) for _ in range(2)]
    for b in ([np.zeros((12, RANK))] * 2, [np.ones((12, RANK)), -np.ones((12, RANK))]):
        same = a if not b[0].any() else [a[0], a[0]]  # or steps that cancel
        mean_a, mean_b = lora.mean_of_products(same, b, [0.5, 0.5], RANK)
        np.testing.assert_allclose(mean_a, (same[0] + same[1]) / 2)
        assert not mean_b.any()


def test_no_factor_grows_far_beyond_those_of_the_updates():
    """Square factors are sometimes all but singular, and then lack a direction that the updates' differences have."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        begun = draw.standard_normal((8, 8))
        a = [begun + 0.1 * draw.standard_normal(begun.shape) for _ in range(3)]
        b = [draw.standard_normal((12, 8)) for _ in range(3)]
        mean_a, mean_b = lora.mean_of_products(a, b, [0.4, 0.3, 0.3], 8)
        assert np.linalg.norm(mean_b) <= lora.MOST_GROWN * max(map(np.linalg.norm, b))
        exact = 0.4 * b[0] @ a[0] + 0.3 * b[1] @ a[1] + 0.3 * b[2] @ a[2]
        np.testing.assert_allclose(mean_b @ mean_a, exact, atol=1e-9)


@pytest.mark.parametrize("least", [lora.LEAST_KEPT, np.inf], ids=["continued", "balanced"])
def test_components_that_a_mean_of_lower_rank_leaves_over_can_still_be_trained(
    least: float, monkeypatch: pytest.MonkeyPatch
):
    """As where all that delivered trained fewer (`trained_rank`): with a row of A and a column of B both zero, neither
    would ever move again."""
    monkeypatch.setattr(lora, "LEAST_KEPT", least)
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((4, 8)), np.zeros((12, 4))
    b[:, 1] = draw.standard_normal(12)
    mean_a, mean_b = lora.mean_of_products([a, a], [b, b], [0.5, 0.5], 4)
    np.testing.assert_allclose(mean_b @ mean_a, b @ a, atol=1e-12)
    if least < 1:
        np.testing.assert_allclose(mean_a, a, atol=1e-12)
        np.testing.assert_allclose(mean_b, b, atol=1e-12)
        return
    assert mean_b[:, 0].any() and not mean_b[:, 1:].any()
    left = mean_a[1:]
    np.testing.assert_allclose(left @ left.T, np.eye(3) * np.square(a).sum(axis=1).mean(), atol=1e-9)
    np.testing.assert_allclose(left @ mean_a[0], 0, atol=1e-9)


@pytest.mark.parametrize("rate", [0.25, 1.0, 1.5])
def test_the_server_learning_rate_multiplies_the_step_of_the_mean_of_products(tmp_path: Path, rate: float):
    """Of adapters of full rank, whose products are summed without loss; the first step has no rate."""
    head = "base_model.model.score.weight"
    shapes = {NAME.format("lora_A"): (8, 8), NAME.format("lora_B"): (12, 8), head: (3, 4)}
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER), "score.weight": torch.zeros(3, 4)})
    settings = AggregationSettings(rule="mean", lora="product", weights="equal", server_learning_rate=rate)
    before = None
    for number in range(2):
        sent = [make.random_tensors(10 * number + i, shapes, torch.float32, 1.0) for i in range(2)]
        updates = [adapter_update(tmp_path / f"u{number}-{i}", t, base, f"f{i}") for i, t in enumerate(sent)]
        out = tmp_path / f"m{number + 1}"
        record = aggregate(base=base, updates=updates, out=out, settings=settings)
        assert record.details["error_of_product"]["largest"] < 1e-6
        if before is not None:
            moved = ((make.read_all(out)[name] - make.read_all(base)[name]).square().sum() for name in shapes)
            assert record.step_norm == pytest.approx(float(sum(moved)) ** 0.5, rel=1e-5)
        products, heads = zip(*((_product(one), one[head]) for one in [*sent, make.read_all(out)]), strict=True)
        want = [sum(each[:2]) / 2 for each in (products, heads)]
        if before is not None:
            want = [old + rate * (mean - old) for old, mean in zip(before, want, strict=True)]
        for got, wanted in zip((products[2], heads[2]), want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        before, base = (products[2], heads[2]), out


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_what_half_precision_cannot_hold_of_factors_is_kept_for_later_rounds(tmp_path: Path, rate: float):
    """Of three facilities one moves each value by one unit in its last place: rounded to the nearest, a third of that
    was lost in every round, and no number of rounds moved the model. Against a plain loop in float64."""
    shapes = {NAME.format("lora_A"): (RANK, LAYER[1]), NAME.format("lora_B"): (LAYER[0], RANK)}
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER)})
    settings = AggregationSettings(
        rule="mean", lora="product", weights="equal", server_learning_rate=rate, **make.UNBOUNDED
    )
    state, master = None, None
    a, b = shapes
    for number in range(12):
        out, after = tmp_path / f"m{number + 1}", tmp_path / f"s{number + 1}"
        sent = make.read_all(base) if number else make.random_tensors(1, shapes, torch.bfloat16, 1.0)
        ulps = {name: torch.exp2(torch.floor(torch.log2(sent[name].float().abs())) - 7) for name in shapes}
        moved = [{n: (sent[n].float() + (i == 0) * ulps[n]).bfloat16() for n in shapes} for i in range(3)]
        updates = [adapter_update(tmp_path / f"u{number}-{i}", t, base, f"f{i}") for i, t in enumerate(moved)]
        aggregate(base=base, updates=updates, out=out, settings=settings, state_in=state, state_out=after)
        if master is not None:
            ends = [{n: master[n] + one[n].double() - sent[n].double() for n in shapes} for one in moved]
            mean = sum(one[b] @ one[a] for one in ends) / 3
            u, s, v = torch.linalg.svd(rate * mean + (1 - rate) * master[b] @ master[a])
            exact = u[:, :RANK] @ torch.diag(s[:RANK]) @ v[:RANK]
            found = make.read_all(after / "master")
            torch.testing.assert_close(found[b].double() @ found[a].double(), exact, rtol=1e-5, atol=1e-6)
        master = {name: value.double() for name, value in make.read_all(after / "master").items()}
        held = make.read_all(out)
        assert all(torch.equal(held[name], master[name].bfloat16()) for name in shapes)
        base, state = out, after


def _product(tensors: make.Tensors) -> torch.Tensor:
    return tensors[NAME.format("lora_B")] @ tensors[NAME.format("lora_A")]


def test_halves_without_each_other():
    with pytest.raises(InputError, match="lora_A and lora_B"):
        lora.pairs([NAME.format("lora_A")])


def adapters(seed: int) -> make.Tensors:
    shapes = {NAME.format("lora_A"): (RANK, LAYER[1]), NAME.format("lora_B"): (LAYER[0], RANK)}
    return make.random_tensors(seed, shapes, torch.float32, 1.0)


def adapter_update(directory: Path, tensors: make.Tensors, base: Path, facility: str) -> Path:
    make.update(directory, tensors, base=base, facility=facility)
    write_json(directory / "adapter_config.json", {"peft_type": "LORA", "r": RANK})
    write_manifest(directory, dataclasses.replace(read_manifest(directory), encoding="lora"))
    return directory


@pytest.mark.parametrize("mode", ["factors", "product"])
def test_two_rounds_of_adapters_beside_a_model(tmp_path: Path, mode: str):
    body = {"layer.weight": torch.ones(LAYER, dtype=torch.bfloat16), "steps": torch.arange(3)}
    base, state = make.model(tmp_path / "m0", body), None
    settings = AggregationSettings(rule="mean", lora=mode, weights="equal", **make.UNBOUNDED)
    for number in range(2):
        sent = [adapters(10 * number + i) for i in range(3)]
        updates = [adapter_update(tmp_path / f"u{number}-{i}", t, base, f"f{i}") for i, t in enumerate(sent)]
        for i, path in enumerate(updates):
            check_update(path, open_checkpoint(base), read_manifest(base), f"f{i}", number)
        out, after = tmp_path / f"m{number + 1}", tmp_path / f"s{number + 1}"
        record = aggregate(base=base, updates=updates, out=out, settings=settings, state_in=state, state_out=after)
        manifest, got = verify_manifest(out), make.read_all(out)
        assert (manifest.kind, manifest.round) == ("model", number + 1) and (out / "adapter_config.json").exists()
        assert torch.equal(got["layer.weight"], body["layer.weight"]) and torch.equal(got["steps"], body["steps"])
        a, b = ([t[NAME.format(half)] for t in sent] for half in ("lora_A", "lora_B"))
        if mode == "factors":
            for half, parts in (("lora_A", a), ("lora_B", b)):
                torch.testing.assert_close(got[NAME.format(half)], sum(parts) / 3)
        else:
            exact = sum(y @ x for x, y in zip(a, b, strict=True)) / 3
            u, s, v = torch.linalg.svd(exact)
            best = u[:, :RANK] @ torch.diag(s[:RANK]) @ v[:RANK]
            torch.testing.assert_close(
                got[NAME.format("lora_B")] @ got[NAME.format("lora_A")], best, rtol=1e-4, atol=1e-5
            )
        assert 0 < record.details["error_of_product"]["mean"] < record.details["error_of_factors"]["mean"]
        base, state = out, after


@pytest.mark.parametrize("mode", ["factors", "product"])
def test_a_long_step_of_adapters_counts_as_one_of_the_median_norm(tmp_path: Path, mode: str):
    """Of three facilities: whatever is averaged, one that goes four times as far in its direction gains nothing."""
    start = adapters(0)
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER)} | start)
    steps = [adapters(seed) for seed in (1, 2, 3)]
    lengths = [sum(float(t.square().sum()) for t in step.values()) ** 0.5 for step in steps]
    found = []
    for length in (1.0, 4.0):
        updates = []
        for i, (step, own) in enumerate(zip(steps, lengths, strict=True)):
            scale = (length if i == 2 else 1.0) / own
            moved = {name: start[name] + scale * t for name, t in step.items()}
            updates.append(adapter_update(tmp_path / f"u{length}-{i}", moved, base, f"f{i}"))
        out = tmp_path / f"m{length}"
        record = aggregate(base=base, updates=updates, out=out, settings=AggregationSettings(rule="mean", lora=mode))
        got = make.read_all(out)
        found.append(got[NAME.format("lora_B")] @ got[NAME.format("lora_A")])
    assert record.details["clip_factors"]["f2"] == pytest.approx(0.25, rel=1e-4)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["nesterov", "heloco+nesterov"])
def test_momentum_over_adapters_begins_in_the_second_round(tmp_path: Path, rule: str):
    base, state = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER)}), None
    settings = AggregationSettings(rule=rule, server_learning_rate=0.7, momentum=0.5, weights="equal")
    start = adapters(0)
    first = [adapter_update(tmp_path / f"a{i}", start, base, f"f{i}") for i in range(2)]
    aggregate(base=base, updates=first, out=tmp_path / "m1", settings=settings, state_out=tmp_path / "s1")
    base, state = tmp_path / "m1", tmp_path / "s1"
    moved = {name: t + 1 for name, t in start.items()}
    second = [adapter_update(tmp_path / f"b{i}", moved, base, f"f{i}") for i in range(2)]
    aggregate(
        base=base, updates=second, out=tmp_path / "m2", settings=settings, state_in=state, state_out=tmp_path / "s2"
    )
    for name, tensor in make.read_all(tmp_path / "m2").items():
        if name in start:  # momentum 1 / 4 in round 1: 0.7 * (1 + 0.25 * 1)
            torch.testing.assert_close(tensor, start[name] + 0.875)


def test_adapters_that_do_not_fit(tmp_path: Path):
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER)})
    opened, manifest = open_checkpoint(base), read_manifest(base)
    sound = adapters(0)
    cases = {
        "half": ({NAME.format("lora_A"): sound[NAME.format("lora_A")]}, "pairs"),
        "stranger": (
            {n.replace("layer", "other"): t for n, t in sound.items()},
            "'other.weight', which the base model does not",
        ),
        "large": (
            {n: torch.zeros(t.shape[0] + 1, t.shape[1]) for n, t in sound.items()},
            "does not fit|for a layer of shape",
        ),
    }
    for name, (tensors, words) in cases.items():
        bad = adapter_update(tmp_path / name, tensors, base, name)
        with pytest.raises(UpdateRefused, match=words):
            check_update(bad, opened, manifest, name, 0)
        with pytest.raises((UpdateRefused, InputError), match=words):
            aggregate(base=base, updates=[bad], out=tmp_path / "never")
    whole = make.update(tmp_path / "whole", {"layer.weight": torch.ones(LAYER)}, base=base, facility="whole")
    good = adapter_update(tmp_path / "good", sound, base, "good")
    with pytest.raises(InputError, match="all must be alike"):
        aggregate(base=base, updates=[whole, good], out=tmp_path / "never")
    assert not (tmp_path / "never").exists()
    for rule in ("median", "nesterov", "mean+nesterov"):
        with pytest.raises(
            ConfigurationError, match=f"a mean of its own; rule is '{rule.replace('+', '.')}', expected 'mean'"
        ):
            AggregationSettings(lora="product", rule=rule)


@pytest.mark.parametrize("how", ["factors", "product"])
def test_a_module_that_is_saved_whole_is_averaged_beside_the_adapters(tmp_path: Path, how: str):
    """Its mean, in the next model under peft's name; the base's own stays as it was."""
    head, own = "base_model.model.score.weight", torch.full((3, 4), 5.0)
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER), "score.weight": own})
    settings = AggregationSettings(rule="mean", weights="equal", lora=how)
    sent = [adapters(i) | {head: torch.full((3, 4), float(i))} for i in range(2)]
    updates = [adapter_update(tmp_path / f"u{i}", tensors, base, f"f{i}") for i, tensors in enumerate(sent)]
    told = LoraSettings(rank=RANK, targets=["layer"])
    aggregate(base=base, updates=updates, out=tmp_path / "m1", settings=settings, adapters=told)
    after = make.read_all(tmp_path / "m1")
    torch.testing.assert_close(after[head], torch.full((3, 4), 0.5))
    assert after["score.weight"].equal(own)
    assert '"modules_to_save": [\n    "score"\n  ]' in (tmp_path / "m1/adapter_config.json").read_text()


@pytest.mark.parametrize("how", ["factors", "product"])
def test_a_module_that_is_saved_whole_and_not_federated_begins_as_in_the_base(tmp_path: Path, how: str):
    head, own = "base_model.model.score.weight", torch.full((3, 4), 5.0)
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER), "score.weight": own})
    settings = AggregationSettings(rule="mean", weights="equal", lora=how, exclude=["*score*"])
    sent = [adapters(i) | {head: torch.full((3, 4), float(i))} for i in range(2)]
    updates = [adapter_update(tmp_path / f"u{i}", tensors, base, f"f{i}") for i, tensors in enumerate(sent)]
    aggregate(base=base, updates=updates, out=tmp_path / "m1", settings=settings)
    assert make.read_all(tmp_path / "m1")[head].equal(own)


def test_factors_of_a_product_that_do_not_fit_their_dtype_are_no_model(tmp_path: Path):
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER)})
    large = [{name: torch.full_like(t, 60_000.0).half() for name, t in adapters(i).items()} for i in range(2)]
    updates = [adapter_update(tmp_path / f"u{i}", tensors, base, f"f{i}") for i, tensors in enumerate(large)]
    with pytest.raises(InputError, match="does not fit F16"):
        aggregate(
            base=base, updates=updates, out=tmp_path / "m1", settings=AggregationSettings(rule="mean", lora="product")
        )
    assert not (tmp_path / "m1").exists()


def test_a_module_that_nobody_asked_for_is_refused(tmp_path: Path):
    base = make.model(tmp_path / "m0", {"layer.weight": torch.zeros(LAYER), "lm_head.weight": torch.zeros(3, 4)})
    opened, manifest = open_checkpoint(base), read_manifest(base)
    told = LoraSettings(rank=RANK)
    cases = {
        "uninvited": ({"base_model.model.lm_head.weight": torch.ones(3, 4)}, "'lm_head' whole"),
        "unlike": ({"base_model.model.lm_head.weight": torch.ones(4, 4)}, r"has shape \[4, 4\], the model's \[3, 4\]"),
        "plain": ({"lm_head.weight": torch.ones(3, 4)}, "which none of them trains"),
    }
    for name, (more, words) in cases.items():
        bad = adapter_update(tmp_path / name, adapters(0) | more, base, name)
        with pytest.raises(UpdateRefused, match=words):
            check_update(bad, opened, manifest, name, 0, adapters=told)
