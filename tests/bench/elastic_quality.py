"""Perplexity where facilities take unlike numbers of steps in a round (`rounds: {steps: elastic}`), beside equal steps.

    python tests/bench/elastic_quality.py --out DIR --seeds 1 2 3 > elastic.json

Four languages at four facilities, models of 0.16 M parameters really trained (`federated_learner`), rounds of 10 steps
on a simulated clock; equal steps wait for all, 30 rounds. The steps are those that `coordinator.steps.elastic` asks
for, by two causes. `pace`: the last facility is four times slower, so that it takes a quarter of the others' steps in
every round. `queues`: log-normal queues (sigma 1) whose median is as long as a round's training; the steps vary from
round to round within the default bounds. Perplexity after as many steps of all facilities together (`tokens`) and after
as much simulated time (`time`), waiting for all or with a quorum of three quarters and no grace; a late update is
rebased and weighed as the coordinator does: by its steps over the work of all rounds, with `--by-rounds` by its steps
alone. Its learning rate passes over its round's part of the schedule. What was trained is kept in OUT/elastic.jsonl and
not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.config.closing import ClosingSettings, EvenSettings
from coordinator.planning.budget import FacilityPace
from coordinator.steps.elastic import Elastic, common_end
from tests.bench.federated_quality import DATA, base_model, geometric, texts_of
from tests.bench.lateness import LOCAL, SLOW, STEPS, Queued, learn
from tests.bench.quality_texts import LANGUAGES
from tests.streamflow_plugin.course import Course, course_of

ROUNDS = 30
EVEN = EvenSettings(steps="elastic")
QUORUM = ClosingSettings(quorum=0.75, grace=0.0)
EQUAL = "equal steps, all"
RULE = "nesterov"
Steps = dict[tuple[str, int], int]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A course of a federation, and the steps of each facility by the round that it began in (None: equal)."""

    course: Course
    steps: Steps | None

    @property
    def made(self) -> int:
        """Steps of all updates that were averaged."""
        if self.steps is None:
            return STEPS * self.course.updates
        return sum(self.steps[name, began] for by in self.course.delivered for name, began in by.items())


def pace(rounds: int, *, elastic: bool) -> Way:
    """The last facility takes four times as long for a step; there are no queues. Times in rounds of the fast ones."""
    slow = LANGUAGES[-1]
    seconds = {name: (SLOW if name == slow else 1.0) / STEPS for name in LANGUAGES}
    least, most = EVEN.bounds(STEPS)
    facilities = [
        Elastic(
            pace=FacilityPace(name=name, seconds_per_step=one, samples_per_step=1.0),
            waits=[0.0],
            least=least,
            most=most,
        )
        for name, one in seconds.items()
    ]
    end = common_end(facilities, STEPS * len(facilities))
    taken = {
        one.pace.name: min(max(math.floor(end / one.pace.seconds_per_step + 1e-9), least), most) for one in facilities
    }
    steps = {(name, number): taken[name] for name in LANGUAGES for number in range(rounds)} if elastic else None

    def lasts(name: str, number: int) -> float:
        return (STEPS if steps is None else steps[name, number]) * seconds[name]

    return Way(course=course_of(None, list(LANGUAGES), lasts, rounds), steps=steps)


def queued(rounds: int, seed: int, settings: ClosingSettings | None, *, elastic: bool) -> Way:
    """Every job waits at random before it trains; what of a step does not fit until the round's end is not begun."""
    waits = numpy.random.default_rng(seed).lognormal(0.0, 1.0, (len(LANGUAGES), 20 * ROUNDS))
    queue = Queued(list(LANGUAGES), waits, None, elastic=elastic)
    course = course_of(settings, list(LANGUAGES), queue, rounds)
    least, most = EVEN.bounds(STEPS)
    taken = {which: min(max(math.floor(units * STEPS + 1e-9), least), most) for which, units in queue.units.items()}
    return Way(course=course, steps=taken if elastic else None)


def ways(seed: int, *, late: bool) -> dict[str, Way]:
    """What is compared, by name, the baselines first. `late`: with a quorum, too, and the slow machine's equal time."""
    found = {EQUAL: pace(ROUNDS, elastic=False)}
    whole = queued(ROUNDS, seed, None, elastic=False)
    many = range(ROUNDS // 2, 4 * ROUNDS)

    def matched(label: str, tried: list[Way], limit: float) -> None:
        found[f"{label}, tokens"] = min(tried, key=lambda one: abs(one.made - found[EQUAL].made))
        if limit < math.inf:
            in_time = [one for one in tried if one.course.closed[-1] <= limit]
            found[f"{label}, time"] = max(in_time, key=lambda one: len(one.course.closed))

    paces = [pace(rounds, elastic=True) for rounds in many]
    matched("pace, elastic, all", paces, found[EQUAL].course.closed[-1] if late else math.inf)
    matched("queues, elastic, all", [queued(n, seed, None, elastic=True) for n in many], whole.course.closed[-1])
    if late:
        for label, elastic in (("equal steps", False), ("elastic", True)):
            tried = [queued(n, seed, QUORUM, elastic=elastic) for n in many]
            matched(f"queues, {label}, quorum 3/4", tried, whole.course.closed[-1])
    return found


def described(way: Way) -> dict[str, Any]:
    """Rounds, time and steps of a course."""
    steps = [] if way.steps is None else [way.steps[n, b] for by in way.course.delivered for n, b in by.items()]
    spread = {"least": min(steps), "most": max(steps), "deviation": round(float(numpy.std(steps)), 2)} if steps else {}
    return {
        "rounds": len(way.course.closed),
        "units": round(way.course.closed[-1], 1),
        "updates": way.course.updates,
        "steps": way.made,
    } | spread


def measured(
    out: Path, way: Way, label: str, seed: int, *, shared: bool, data: Path, by_work: bool
) -> dict[str, float]:
    """Perplexity by language after one training, or after that of an earlier start."""
    file, key = out / "elastic.jsonl", [label, seed, "shared" if shared else "personal"]
    key += ["by work"] if way.steps is not None and by_work else []
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if (row := next((row for row in rows if row["key"] == key), None)) is not None:
        return dict(row["languages"])
    texts, began = texts_of(out, data), time.perf_counter()
    local = replace(LOCAL, optimizer_state="shared", betas=(0.9, 0.99)) if shared else LOCAL
    model = base_model(out, texts, seed, 64)
    found = learn(model, texts, way.course, RULE, seed, "participation", "whole", local, way.steps, by_work)
    row = {"key": key, "languages": found, "seconds": round(time.perf_counter() - began, 1)} | described(way)
    with open(file, "a") as kept:
        kept.write(json.dumps(row) + "\n")
    return found


def compared(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Geometric means, over that of equal steps, and the last language's, which is the slow machine's, likewise."""
    base, last = found[EQUAL], LANGUAGES[-1]
    return {
        label: {
            "perplexity": round(geometric(list(one.values())), 3),
            "over_equal": round(geometric(list(one.values())) / geometric(list(base.values())), 4),
            "last_language_over_equal": round(one[last] / base[last], 4),
        }
        for label, one in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quality"), help="for datasets, base models and results")
    parser.add_argument("--data", type=Path, default=DATA, help="directory of LANGUAGE/train.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--late", action="store_true", help="quorums and the slow machine's equal time, too")
    parser.add_argument("--personal", action="store_true", help="moments stay at each facility (default: shared)")
    parser.add_argument(
        "--by-rounds",
        action="store_true",
        help="weigh by tokens, not by them over the work of all rounds",
    )
    parser.add_argument("--courses", action="store_true", help="print rounds, times and steps; train nothing")
    a = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for seed in a.seeds:
        asked = ways(seed, late=a.late)
        row: dict[str, Any] = {"seed": seed, "courses": {label: described(way) for label, way in asked.items()}}
        if not a.courses:
            found = {
                label: measured(a.out, way, label, seed, shared=not a.personal, data=a.data, by_work=not a.by_rounds)
                for label, way in asked.items()
            }
            row["perplexity"] = compared(found)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
