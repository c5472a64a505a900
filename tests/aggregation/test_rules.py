"""Every rule against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.aggregation import clipping
from coordinator.aggregation.plan import make_plan
from coordinator.aggregation.rules import (
    bulyan,
    dare,
    geometric_median,
    heloco,
    krum,
    mean,
    median,
    radial_directional,
    ties,
    trimmed_mean,
)
from coordinator.aggregation.rules.contract import RoundUpdates
from coordinator.aggregation.server_optimizers import fedadagrad, fedadam, fedavgm, fedyogi, nesterov, slowmo
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS, build
from coordinator.aggregation.settings import AggregationSettings, split_rule
from facility.exchange.checkpoints import magnitudes
from facility.exchange.errors import ConfigurationError, InputError


def optimizer_of(settings: AggregationSettings, round: int):
    entry = SERVER_OPTIMIZERS.get(settings.server_optimizer)
    return build(settings.server_optimizer, round, settings.values_of(entry))


@pytest.mark.parametrize(
    ("rule", "count", "least"),
    [
        ("krum", 4, "krum with byzantine 1 needs at least 5 updates"),
        ("multi_krum", 4, "at least 5"),
        ("bulyan", 6, "at least 7 updates, found 6"),
        ("trimmed_mean", 2, "at least 3 updates, found 2"),
    ],
)
def test_too_few_updates_for_a_rule(rule: str, count: int, least: str):
    settings = AggregationSettings(rule=rule, byzantine=1)
    shares, names = [1 / count] * count, [str(i) for i in range(count)]
    with pytest.raises(InputError, match=least):
        make_plan(settings, RoundUpdates(facilities=names, weights=shares, inner_products=np.eye(count)))


def f32(*values):
    return np.array(values, np.float32)


def test_mean_of_three_by_tokens():
    # 0.5 * 2 + 0.3 * 4 + 0.2 * -1 = 2.0;  0.5 * 0 + 0.3 * 10 + 0.2 * 5 = 4.0
    np.testing.assert_allclose(mean.combine(f32([2, 0], [4, 10], [-1, 5]), [0.5, 0.3, 0.2]), [2.0, 4.0], rtol=1e-6)


def test_fedavgm_two_rounds():
    # v1 = 1, w1 = 10 + 0.5;  v2 = 0.9 * 1 + 2 = 2.9, w2 = 10.5 + 0.5 * 2.9 = 11.95
    w, slots = fedavgm.apply(f32(10), f32(1), [f32(0)], learning_rate=0.5, momentum=0.9)
    assert w == 10.5 and slots[0] == 1
    w, slots = fedavgm.apply(w, f32(2), slots, learning_rate=0.5, momentum=0.9)
    np.testing.assert_allclose([w[0], slots[0][0]], [11.95, 2.9], rtol=1e-6)


def test_nesterov_two_rounds_and_as_pytorch_does_it():
    # v1 = 1, w1 = 10 + 0.7 (1 + 0.9) = 11.33;  v2 = 0.9 + 2 = 2.9, w2 = 11.33 + 0.7 (2 + 2.61) = 14.557
    w, slots = nesterov.apply(f32(10), f32(1), [f32(0)], learning_rate=0.7, momentum=0.9)
    np.testing.assert_allclose(w, 11.33, rtol=1e-6)
    w, slots = nesterov.apply(w, f32(2), slots, learning_rate=0.7, momentum=0.9)
    np.testing.assert_allclose([w[0], slots[0][0]], [14.557, 2.9], rtol=1e-6)

    import torch

    parameter = torch.tensor([10.0], requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for step in (1.0, 2.0):
        parameter.grad = torch.tensor([-step])
        optimizer.step()
    np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=1e-6)


def test_slowmo_two_rounds_with_a_changing_learning_rate():
    # gamma 0.1: u1 = 1 / 0.1 = 10, x1 = 0 + 1 * 0.1 * 10 = 1;  gamma 0.05: u2 = 0.5 * 10 + 2 / 0.05 = 45, x2 = 1 + 2.25
    w, slots = slowmo.apply(f32(0), f32(1), [f32(0)], learning_rate=1, momentum=0.5, local_learning_rate=0.1)
    np.testing.assert_allclose([w[0], slots[0][0]], [1, 10], rtol=1e-6)
    w, slots = slowmo.apply(w, f32(2), slots, learning_rate=1, momentum=0.5, local_learning_rate=0.05)
    np.testing.assert_allclose([w[0], slots[0][0]], [3.25, 45], rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "more", "second", "moved"),
    [
        # step 2, beta1 0.9: m = 0.2.  v: adam 0.99 * 0.01 + 0.01 * 4 = 0.0499, yogi 0.01 + 0.01 * 4 = 0.05,
        # adagrad 0.01 + 4 = 4.01.  moved = 0.5 * 0.2 / (sqrt(v) + 0.1)
        (fedadam, {"beta2": 0.99}, 0.0499, 0.1 / (0.0499**0.5 + 0.1)),
        (fedyogi, {"beta2": 0.99}, 0.05, 0.1 / (0.05**0.5 + 0.1)),
        (fedadagrad, {}, 4.01, 0.1 / (4.01**0.5 + 0.1)),
    ],
)
def test_adaptive_servers(rule, more, second, moved):
    apply, starts = rule.build(0, server_learning_rate=0.5, momentum=0.9, tau=0.1, **more)
    assert starts == (0.0, pytest.approx(0.01))
    w, slots = apply(f32(1), f32(2), [f32(s) for s in starts])
    np.testing.assert_allclose([w[0], slots[0][0], slots[1][0]], [1 + moved, 0.2, second], rtol=1e-5)


def test_yogi_lowers_the_second_moment_by_at_most_its_step():
    # v = 1 > step^2 = 0.25: v - 0.01 * 0.25;  equal: unchanged
    apply, _ = fedyogi.build(0, server_learning_rate=1, momentum=0.9, beta2=0.99, tau=1)
    _, slots = apply(f32(0, 0), f32(0.5, 1), [f32(0, 0), f32(1, 1)])
    np.testing.assert_allclose(slots[1], [0.9975, 1.0], rtol=1e-6)


def test_outer_steps_take_torch_tensors():
    import torch

    apply, _ = fedyogi.build(0, server_learning_rate=1, momentum=0.0, beta2=0.9, tau=1)
    w, slots = apply(torch.ones(2), torch.ones(2), [torch.zeros(2), torch.ones(2)])
    assert torch.equal(w, torch.full((2,), 1.5)) and torch.equal(slots[1], torch.ones(2))


def test_median_of_odd_and_even():
    rows = f32([1, 9], [100, -5], [3, 4])
    assert median.combine(rows).tolist() == [3, 4]
    assert median.combine(np.vstack([rows, f32([5, 6])])).tolist() == [4, 5]


def test_trimmed_mean_drops_both_ends():
    assert trimmed_mean.dropped(5, 0.2) == 1 and trimmed_mean.dropped(10, 0.25) == 2
    # 1, 2, 3, 4, 1000 without ends: (2 + 3 + 4) / 3
    assert trimmed_mean.combine(f32([1], [2], [3], [4], [1000]), 1).tolist() == [3]


def test_geometric_median_of_a_line_is_the_median():
    points = np.array([[0.0], [1.0], [10.0]])
    beta = geometric_median.coefficients(points @ points.T, np.ones(3), iterations=200)
    assert float(beta @ points[:, 0]) == pytest.approx(1.0, abs=1e-3)
    # An equilateral triangle: its centre, by symmetry.
    triangle = np.array([[1, 0], [-0.5, 3**0.5 / 2], [-0.5, -(3**0.5) / 2]])
    np.testing.assert_allclose(geometric_median.coefficients(triangle @ triangle.T, np.ones(3), iterations=50), 1 / 3)


@pytest.mark.parametrize("angle", [0.0, 30.0, 78.0, 80.0, 89.0, 90.0, 91.0, 135.0, 180.0])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 20.0])
def test_a_late_step_is_turned_towards_the_momentum_as_the_paper_writes_it(angle: float, ratio: float):
    momentum = np.array([0.0, 2.0])
    step = 2 * ratio * np.array([np.sin(np.radians(angle)), np.cos(np.radians(angle))])
    own, other = heloco.correction(2 * ratio, 2.0, float(step @ momentum))
    found = own * step + other * momentum
    cosine = np.cos(np.radians(angle))
    confidence = 2 * ratio / (2 * ratio + 6)
    if cosine >= 0.2:
        expected = step
    elif cosine < -1e-12:
        expected = step - min(0.5 * -cosine * confidence, 0.5) * cosine * np.linalg.norm(step) * momentum / 2
    else:
        mixed = (1 - min((1 - cosine) * confidence, 1)) * step / np.linalg.norm(step)
        mixed = mixed + min((1 - cosine) * confidence, 1) * momentum / 2
        expected = np.linalg.norm(step) * mixed / np.linalg.norm(mixed)
        assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(step))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    assert found @ momentum >= step @ momentum - 1e-9


def test_without_a_momentum_a_late_step_is_as_it_is():
    assert heloco.correction(1.0, 0.0, 0.0) == heloco.correction(0.0, 1.0, 0.0) == (1.0, 0.0)


def test_heloco_without_a_momentum_to_turn_to_is_refused():
    with pytest.raises(ConfigurationError, match="heloco\\+nesterov"):
        AggregationSettings(rule="heloco")


def test_radial_directional_by_hand():
    # lengths 3 and 1, at right angles, weights 0.5: length 2 along (1, 1) / sqrt(2)
    steps = f32([3, 0], [0, 1])
    gram = steps @ steps.T
    found = radial_directional.coefficients(gram, np.array([0.5, 0.5]))
    np.testing.assert_allclose(found @ steps, [2**0.5, 2**0.5], rtol=1e-6)
    # one direction: the plain mean; opposite ones of one length cancel: the plain mean; a step of nothing adds nothing
    same = radial_directional.coefficients(np.array([[4.0, 2.0], [2.0, 1.0]]), np.array([0.25, 0.75]))
    np.testing.assert_allclose(same @ np.array([2.0, 1.0]), 1.25)
    np.testing.assert_allclose(radial_directional.coefficients(np.array([[1.0, -1.0], [-1.0, 1.0]]), [0.5, 0.5]), 0.5)
    assert radial_directional.coefficients(np.array([[4.0, 0.0], [0.0, 0.0]]), [0.5, 0.5])[1] == 0


def test_the_length_of_a_radial_directional_step_is_the_mean_length_whatever_the_number_of_updates():
    draw = np.random.default_rng(0)
    for count in (2, 5, 9):
        steps = draw.normal(size=(count, 400))
        weights = draw.dirichlet(np.ones(count))
        found = radial_directional.coefficients(steps @ steps.T, weights) @ steps
        np.testing.assert_allclose(np.linalg.norm(found), weights @ np.linalg.norm(steps, axis=1), rtol=1e-9)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.5, 0.3, 0.2], [0.25] * 4])
def test_of_numbers_with_opposite_signs_a_radial_directional_step_is_no_longer_than_they_are(weights: list[float]):
    """A parameter of one value, as a gate or a scale: directions cancel, and what rounding leaves is not a step."""
    draw, signs = np.random.default_rng(0), f32(1, -1, -1, 1)[: len(weights)]
    for sizes in draw.random((500, len(weights))).astype("f4"):
        steps = sizes * signs
        found = radial_directional.coefficients(np.outer(steps, steps.astype("f8")), np.array(weights))
        assert abs(mean.combine(steps[:, None], found.tolist())[0]) <= 1.01 * (np.array(weights) @ sizes)


def test_krum_scores_by_hand():
    points = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]])
    distances = krum.squared_distances(points @ points.T)
    assert distances[0].tolist() == [0, 1, 4, 9, 10000]
    # n = 5, f = 1: the two closest others.  0: 1 + 4; 1: 1 + 1; 2: 1 + 1; 3: 1 + 4; 100: 97^2 + 98^2
    assert krum.scores(distances, 1).tolist() == [5, 2, 2, 5, 97**2 + 98**2]
    assert krum.select(points @ points.T, 1, most=1) == [1]
    assert krum.select(points @ points.T, 1, most=4) == [0, 1, 2, 3]


def test_bulyan_by_hand():
    points = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [1000.0]])
    chosen = bulyan.select(points @ points.T, 1)
    assert len(chosen) == 5 and 6 not in chosen
    # Of 1, 2, 3, 4, 50 the three closest to the median 3 are 2, 3 and 4.
    assert bulyan.combine(f32([1], [2], [3], [4], [50]), 1).tolist() == [3]


def test_of_two_updates_alike_the_earlier_one_counts_clipped_or_not():
    """With one neighbour the two closest have the same score, which is so whenever krum compares three."""
    draw = np.random.default_rng(0)
    settings = AggregationSettings(rule="krum", clip_norm=0.5)
    for _ in range(50):
        steps = draw.standard_normal((3, 5)) * [[1.0], [1.7], [2.9]]
        updates = RoundUpdates(facilities="abc", weights=[1 / 3] * 3, inner_products=steps @ steps.T)
        plan = make_plan(settings, updates)
        clipped = steps * 0.5 / np.linalg.norm(steps, axis=1)[:, None]
        apart = {pair: np.linalg.norm(clipped[pair[0]] - clipped[pair[1]]) for pair in ((0, 1), (0, 2), (1, 2))}
        first, _ = min(apart, key=apart.__getitem__)
        assert plan.details["selected"] == ["abc"[first]]


def test_ties_by_hand():
    # Thresholds 1: 0.5 is trimmed. Signs elected: +, -, and a tie that gives 0.
    steps = f32([3, -4, 2, 0.5], [1, 2, -2, 0.5], [-2, -2, 0, 0.5])
    # column 0: 3 + 1 - 2 > 0: mean(3, 1);  column 1: -4 + 2 - 2 < 0: mean(-4, -2);  column 2: 0
    assert ties.combine(steps, [1, 1, 1], [1, 1, 1], [1, 1, 1]).tolist() == [2, -3, 0, 0]


def test_ties_keeps_the_values_that_are_the_threshold_of_a_clipped_update():
    """Many values of an update are its threshold: clipped, all of them still reach it, however the product rounds."""
    moved = f32([1.25] * 4 + [0] * 4)
    for factor in np.random.default_rng(0).uniform(0.01, 1, 200).tolist():
        updates = RoundUpdates(
            facilities=["a"], weights=[1.0], histograms=[magnitudes.histogram(moved[0])], clip_factors=[factor]
        )
        combine = ties.plan(updates, density=0.5).combine
        clipped = moved * np.float32(factor)
        assert combine is not None and combine(clipped, "w", 0).tolist() == clipped[0].tolist(), factor


def test_ties_threshold_keeps_the_largest():
    values = np.arange(1, 101, dtype=np.float32)
    limit = magnitudes.threshold_for(magnitudes.histogram(values), 0.2)
    assert (np.abs(values) >= limit).mean() >= 0.2 and 80 <= limit <= 81
    assert magnitudes.threshold_for(magnitudes.histogram(f32(1, 2, 3)), 1.0) <= 1


def test_dare_keeps_the_density_and_the_expectation():
    mask = dare.kept(0, 1, "alpha", "w", 0, 60_000, 0.25)
    assert abs(mask.mean() - 0.25) < 0.01
    assert np.array_equal(mask, dare.kept(0, 1, "alpha", "w", 0, 60_000, 0.25))
    assert not np.array_equal(mask, dare.kept(0, 1, "beta", "w", 0, 60_000, 0.25))
    assert not np.array_equal(mask[:9], dare.kept(0, 1, "alpha", "w", 1 << 16, 9, 0.25))
    pieces = [dare.kept(0, 1, "alpha", "w", at, min(32_768, 60_000 - at), 0.25) for at in (0, 32_768)]
    assert np.array_equal(mask, np.concatenate(pieces))
    assert dare.kept(0, 0, "a", "w", 0, 100, 1.0).all()
    # (4 / 0.5) * 0.5 where kept by both;  kept by the first only: 0.5 * 4 / 0.5
    got = dare.combine(f32([4, 4], [2, 2]), [np.array([True, True]), np.array([True, False])], [0.5, 0.5], 0.5)
    assert got.tolist() == [6, 4]


def test_clipping():
    assert clipping.factors([1, 4], 2) == [1, 0.5]
    assert clipping.limit_of([1, 2, 9], clip_norm=0, clip_ratio=1.5) == 3
    assert clipping.limit_of([1, 2, 9], clip_norm=2.5, clip_ratio=1.5) == 2.5
    assert clipping.limit_of([0, 0, 9], clip_norm=0, clip_ratio=1.5) == float("inf"), "most did not move"


def test_rules_by_name():
    assert split_rule("mean") == ("mean", "plain")
    assert split_rule("fedadam") == ("mean", "fedadam")
    assert split_rule("median+nesterov") == split_rule("nesterov+median") == ("median", "nesterov")
    for wrong in ("fedsgd", "mean+median", "", "krum+"):
        with pytest.raises(ConfigurationError, match="expected one of bulyan, .*mean"):
            AggregationSettings(rule=wrong)


def test_the_default_is_dilocos_step_and_a_rule_by_itself_is_plain():
    default = AggregationSettings()
    assert (default.aggregation_rule, default.server_optimizer, default.server_learning_rate, default.momentum) == (
        ("mean", "nesterov", 1.0, 0.8)
    )
    # Steps of 1 with momentum 0, 1/4, 2/5: v = 1, 1.25, 1.5;  w += 1, 1 + 1.25 / 4, 1 + 1.5 * 2 / 5
    # and with 0.8 from the first: v = 1, 1.8, 2.44;  w += 1.8, 2.44, 2.952
    constant = AggregationSettings(momentum_warmup=False)
    # and with t / (t + 1), 0, 1/2, 2/3: v = 1, 1.5, 2;  w += 1, 1 + 1.5 / 2, 1 + 2 * 2 / 3
    sooner = AggregationSettings(momentum_friction=1.0)
    for settings, moves in (
        (default, [1, 1.3125, 1.6]),
        (constant, [1.8, 2.44, 2.952]),
        (sooner, [1, 1.75, 7 / 3]),
    ):
        w, slots = f32(0), [f32(0)]
        for number, move in enumerate(moves):
            before, (w, slots) = w, optimizer_of(settings, number)[0](w, f32(1), slots)
            np.testing.assert_allclose(w - before, move, rtol=1e-6)
    assert [nesterov.momentum_of(n, 0.8) for n in (0, 3, 12, 1000)] == [0, 0.5, 0.8, 0.8]
    assert [nesterov.momentum_of(n, 0.8, 1.0) for n in (0, 1, 3, 9)] == [0, 0.5, 0.75, 0.8]
    for rule in ("mean", "median", "krum"):
        outer, starts = optimizer_of(AggregationSettings(rule=rule), 3)
        assert outer(f32(10), f32(1), [])[0].tolist() == [11] and starts == ()
    assert AggregationSettings(rule="fedadam").server_learning_rate == 0.01
    given = AggregationSettings(rule="nesterov", server_learning_rate=1, momentum=0)
    assert (given.server_learning_rate, given.momentum) == (1, 0)
    for wrong in ({"server_learning_rate": -1}, {"momentum": 1}, {"momentum": -0.5}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            AggregationSettings(**wrong)
