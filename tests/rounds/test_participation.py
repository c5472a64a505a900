"""Laws of what an update weighs by how much its facility delivers, against counting by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from coordinator.archive.rounds import FacilityRow, RoundFile
from coordinator.rounds.participation import LIMIT, Done, delivered, participation, weight_of, work_in_a_delivery


@dataclass(frozen=True)
class Figures:
    steps: int
    samples: int = 0
    tokens: int = 0


def work(name: str, done: Done) -> float:
    return done.steps / {"a": 2, "b": 4, "c": 8, "d": 16}[name]


def drawn(seed: int) -> tuple[list[RoundFile], dict[str, Figures]]:
    """Rounds in which facilities deliver, fail, are late, join or leave; and what came in the one that is closed."""
    draw, history = random.Random(seed), list[RoundFile]()
    for number in range(draw.randint(0, 6)):
        rows = []
        for name in sorted(draw.sample("abcd", draw.randint(1, 4))):
            status, told = draw.choice(["ok", "ok", "late", "failed"]), draw.choice([0.0, 0.0, 0.5])
            rows.append(
                FacilityRow(round=number, facility=name, status=status, steps=draw.randint(1, 9), work=told)  # type: ignore[arg-type]
            )
        history.append(RoundFile(round=number, facilities=rows, global_loss=None, decision="go on"))
    now = {name: Figures(steps=draw.randint(1, 9)) for name in sorted(draw.sample("abcd", draw.randint(1, 4)))}
    return history, now


@pytest.mark.parametrize("seed", range(30))
def test_the_share_of_rounds_and_the_work_of_a_delivery_are_those_that_one_counts(seed: int):
    history, now = drawn(seed)
    shares, works = delivered(history, now), work_in_a_delivery(history, now, work)
    waited_for = {row.facility for entry in history[-1:] for row in entry.facilities}
    for name in "abcd":
        rows = [row for entry in history for row in entry.facilities if row.facility == name]
        sound = [row for row in rows if row.status == "ok"]
        count = len(sound) + (name in now)
        assert (name in shares) == (name in works) == (count > 0)
        if count:
            assert shares[name] == count / (len(rows) + (name in now or name in waited_for))
            total = sum(row.work if row.work else work(name, row) for row in sound)
            total += work(name, now[name]) if name in now else 0
            assert works[name] == pytest.approx(total / count)


def test_one_that_delivers_half_as_often_as_the_mean_weighs_twice_and_none_more_than_stated():
    shares = {"a": 1.0, "b": 0.25, "c": 0.25, "d": 0.02}
    mean = 1.52 / 4
    assert participation(shares, "abc") == pytest.approx({"a": mean, "b": mean / 0.25, "c": mean / 0.25})
    assert participation(shares, "d") == {"d": LIMIT}
    assert participation({"a": 1.0, **dict.fromkeys("bcdefghijk", 0.05)}, "a") == {"a": 1 / LIMIT}
    assert participation({}, "") == {}


def test_what_an_update_weighs_is_what_its_facility_says_of_that_kind():
    done = Figures(steps=3, samples=24, tokens=384)
    assert [weight_of(done, kind) for kind in ("equal", "samples", "tokens")] == [1.0, 24.0, 384.0]
