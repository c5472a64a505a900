"""The global loss: a mean while the same facilities tell, unmoved by who joins or fails, and bent by no single one."""

from __future__ import annotations

import copy
import random
import time

import pytest

from coordinator.archive.best import best_round
from coordinator.archive.rounds import FacilityRow, RoundFile
from coordinator.config.settings import CoordinatorSettings, StopSettings
from coordinator.rounds.changes import changes_of
from coordinator.steps.decide import Decision, decide, decide_after
from coordinator.steps.global_loss import (
    ALL,
    global_losses,
    later_than,
    losses_by_model,
    losses_known,
    losses_of_rows,
    plausible,
    renewed_in,
    until_known,
    without_each,
)
from coordinator.steps.guard import guard
from tests.rounds.test_changes import BEFORE

Rounds = list[dict[str, float]]
LEVELS = (("a", 3.0), ("b", 5.0))


def decided(told: Rounds, rounds: int = 100, **stop: float) -> Decision:
    settings = CoordinatorSettings(federation="f", rounds=rounds, facilities=["a"], stop=StopSettings(**stop))  # type: ignore[arg-type]
    sound = plausible(told)
    return decide(settings, global_losses(sound), list(without_each(sound).values()))


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
    """Levels of other data are no change: the second facility's was a rise, which halved the server's rate, and made
    the model of the first round the best of all."""
    found = global_losses([{"a": 3.0}, {}, {"b": 5.0}, {"a": 2.0, "b": 4.5}])
    assert found == [3.0, None, 3.0, 2.5]
    assert guard(found).factor == 1 and best_round(found) == 3
    assert global_losses([{}, {"b": 5.0}, {"a": 3.0}, {"a": 2.5}, {"b": 4.0}]) == [None, 5.0, 5.0, 4.5, 4.0]
    assert global_losses([]) == [] and without_each([]) == {}


@pytest.mark.parametrize(
    ("renewed", "harder", "expected"),
    [
        ([[], [], {"a"}, []], "a", [4.0, 3.9, 3.8, 3.7]),
        ([[], [], {ALL}, []], "ab", [4.0, 3.9, 3.9, 3.8]),
        ([{ALL}, [], [], []], "ab", [4.0, 3.9, 6.8, 6.7]),
    ],
    ids=["of one facility", "of all", "not said"],
)
def test_other_validation_data_are_no_change_of_the_model(renewed: list, harder: str, expected: list[float]):
    """A harder validation split was a worse model: the server's rate was halved, `patience` ended the federation."""
    told = [{name: level - 0.1 * n + 3 * (n > 1 and name in harder) for name, level in LEVELS} for n in range(4)]
    assert global_losses(told, renewed) == pytest.approx(expected)
    settings = CoordinatorSettings(federation="f", rounds=9, facilities=["a", "b"], stop=StopSettings(patience=2))
    said = not renewed[0]
    assert decide_after(settings, told, renewed).proceed == said
    assert (guard(global_losses(told, renewed)).factor == 1) == said


def test_what_a_rounds_file_says_of_validation_data_is_understood():
    before, now = copy.deepcopy(BEFORE), copy.deepcopy(BEFORE)
    for number, one in enumerate(now["facilities"].values()):
        one["training.evaluation_sequences"] = 7
        one["dataset"] = f"/other/{number}" if number == 0 else one["dataset"]
    first = next(iter(now["facilities"]))
    told = [str(change) for change in changes_of(before, now, done=1)]
    assert renewed_in([], [], told, ["rounds: 3 -> 4; x", "no dataset: here"]) == [set(), {ALL, first}, set()]
    assert renewed_in([], [f"facilities[{first}].training.evaluation_sequences: 1 -> 2; x"]) == [{first}]


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


def test_a_newcomers_absurd_figure_is_left_out_and_those_of_the_others_are_not():
    assert plausible([{"a": 3.0}, {"a": 2.9, "b": 700.0}, {"a": 2.8, "b": 3.5}])[1] == {"a": 2.9}
    assert plausible([{"a": 3.0, "b": 3.1, "c": 700.0}]) == [{"a": 3.0, "b": 3.1}]


@pytest.mark.parametrize("seed", range(5))
def test_the_losses_without_each_facility_are_those_of_a_federation_of_the_others(seed: int):
    draw = random.Random(seed)
    told = [{name: draw.uniform(2, 4) for name in draw.sample("abcd", draw.randint(0, 3))} for _ in range(6)]
    every = sorted({name for one in told for name in one})
    without = [global_losses([{k: v for k, v in one.items() if k != out} for one in told]) for out in every]
    assert list(without_each(told).values()) == [losses for losses in without if losses[-1] is not None]
    known = [until_known(losses) for losses in without]
    assert list(without_each(told, latest=True).values()) == [losses for losses in known if losses[-1] is not None]


def test_losses_are_known_up_to_the_newest_figure():
    assert until_known([3.0, None, 2.0, None, None]) == [3.0, None, 2.0]
    assert until_known([None, None]) == [None, None] and until_known([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_late_updates_tell_counts_in_the_round_whose_model_it_is_of(seed: int):
    """Oracle: the figures by the model that they are of; round.json of later rounds makes up for those of earlier."""
    draw, rounds = random.Random(seed), 9
    rows: list[list[FacilityRow]] = [[] for _ in range(rounds)]
    told: Rounds = [{} for _ in range(rounds)]
    updates: list[tuple[int, str, int]] = []
    for name in "abcd":
        number = 0
        while (arrives := number + draw.choice([0, 0, 1, 2])) < rounds:
            updates.append((arrives, name, number))
            number = arrives + 1
    for arrives, name, number in sorted(updates):
        loss, late = draw.uniform(2, 3) - 0.1 * number, arrives - number
        what = {"late_loss": loss} if late else {"loss_received": loss}
        rows[arrives].append(FacilityRow(round=arrives, facility=name, status="ok", staleness=late, **what))  # type: ignore[arg-type]
        told[number][name] = loss
    for number, one in enumerate(rows):  # nothing of this counts
        for facility, status, staleness in (("r", "refused", 1), ("o", "ok", number + 1), ("n", "ok", 0)):
            row = FacilityRow(round=number, facility=facility, status=status, staleness=staleness, late_loss=9.0)
            one.append(row)
    history: list[RoundFile] = []
    for number, one in enumerate(rows):
        reported = plausible(losses_by_model([*(entry.facilities for entry in history), one]))
        losses = global_losses(reported)
        later = later_than(history, losses, reported)
        more = {"global_loss": losses[-1], "later_losses": later, "decision": "go on"}
        history.append(RoundFile(round=number, facilities=one, **more))  # type: ignore[arg-type]
    expected = global_losses(plausible(told))
    assert losses_known(history) == expected
    known = {entry.round: entry.global_loss for entry in history}
    for entry in history:
        for number, later_loss in entry.later_losses.items():
            assert known[int(number)] != later_loss.loss and int(number) < entry.round
            known[int(number)] = later_loss.loss
            assert later_loss.over and set(later_loss.over) <= set(told[int(number)])
    assert known == dict(enumerate(expected))
