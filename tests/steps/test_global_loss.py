"""The global loss: a mean while the same facilities tell, unmoved by who joins or fails, and bent by no single one."""

from __future__ import annotations

import random
import time

import pytest

from coordinator.archive.rounds import FacilityRow
from coordinator.config.settings import CoordinatorSettings, StopSettings
from coordinator.steps.decide import Decision, decide
from coordinator.steps.global_loss import global_losses, losses_of_rows, plausible, without_each

Rounds = list[dict[str, float]]


def decided(told: Rounds, rounds: int = 100, **stop: float) -> Decision:
    settings = CoordinatorSettings(federation="f", rounds=rounds, facilities=["a"], stop=StopSettings(**stop))  # type: ignore[arg-type]
    sound = plausible(told)
    return decide(settings, global_losses(sound), without_each(sound))


def test_while_the_same_facilities_tell_it_is_the_mean():
    draw = random.Random(0)
    told = [{name: draw.uniform(2, 3) for name in "abc"} for _ in range(6)]
    assert global_losses(plausible(told)) == [sum(one.values()) / 3 for one in told]


def test_a_thousand_rounds_take_no_minutes():
    """Each round was compared with all before it, for the losses without each facility again: 160 s at every commit."""
    told = [{f"f{place}": 3.0 - 0.001 * number + 0.01 * place for place in range(32)} for number in range(1000)]
    began = time.process_time()
    assert len(without_each(plausible(told))) == 32
    assert time.process_time() - began < 30


def test_who_takes_part_is_neither_learning_nor_divergence():
    draw = random.Random(1)
    level = {"a": 2.0, "b": 4.5, "c": 7.0, "d": 9.0}
    told = [{name: level[name] - 0.1 * number for name in draw.sample("abcd", 3)} for number in range(12)]
    losses = global_losses(plausible(told))
    for before, after in zip(losses, losses[1:], strict=False):
        assert after == pytest.approx(before - 0.1)


def test_rounds_without_a_common_facility_or_without_any():
    assert global_losses([{"a": 3.0}, {}, {"b": 5.0}, {"a": 2.0, "b": 4.5}]) == [3.0, None, 5.0, 4.5]
    assert global_losses([]) == without_each([]) == []


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
@pytest.mark.parametrize("lie", [0.0, 0.5, 12.0, 700.0, 1e4, 1e308])
@pytest.mark.parametrize("from_round", [0, 1, 3])
@pytest.mark.parametrize("lasting", [True, False])
def test_what_one_facility_claims_ends_no_federation(names: str, lie: float, from_round: int, lasting: bool):
    stop = {"divergence": 1.0, "target_perplexity": 7.0, "patience": 2}
    told: Rounds = []
    for number in range(6):
        told.append({name: 4.0 - 0.2 * number for name in names})
        if number == from_round or (lasting and number > from_round):
            told[-1][names[-1]] = lie
        assert decided(told, **stop).proceed, (number, told)


@pytest.mark.parametrize("lie", [700.0, 1e4, 1e308])
def test_an_absurd_loss_leaves_the_global_one_as_the_others_tell_it(lie: float):
    told = [{"a": 3.0, "b": 4.0}, {"a": 2.9, "b": lie}, {"a": 2.8, "b": 3.8}]
    sound = plausible(told)
    assert [sorted(one) for one in sound] == [["a", "b"], ["a"], ["a", "b"]]
    assert global_losses(sound) == [3.5, pytest.approx(3.4), pytest.approx(3.3)]


def test_what_all_tell_still_ends_the_federation():
    assert decided([{"a": 2.0, "b": 3.0}, {"a": 4.5, "b": 5.8}], divergence=2.0).broken
    assert "target" in decided([{"a": 2.0, "b": 3.0}, {"a": 1.0, "b": 1.1}], target_perplexity=4.0).reason
    assert "no better" in decided([{"a": 2.0, "b": 3.0}, *[{"a": 2.1, "b": 3.0}] * 2], patience=2).reason
    assert decided([{"a": 2.0}, {"a": 9.0}], divergence=2.0).broken
    assert "the only round is done" in decided([{"a": 2.0, "b": 1e4}], rounds=1).reason


def test_rows_of_older_archives_tell_their_perplexity():
    rows = [
        FacilityRow(round=0, facility="a", status="ok", loss_received=2.0, perplexity_received=1e300),
        FacilityRow(round=0, facility="b", status="ok", perplexity_received=7.5),
        FacilityRow(round=0, facility="c", status="refused", perplexity_received=7.5),
        FacilityRow(round=0, facility="d", status="ok", perplexity_received=0.0),
    ]
    assert losses_of_rows(rows) == {"a": 2.0, "b": pytest.approx(2.0149, abs=1e-4)}
