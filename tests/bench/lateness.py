"""What rounds that do not wait gain in useful tokens a day and in perplexity, with late facilities and random queues.

    python -m tests.bench.lateness queues > queues.json
    python -m tests.bench.lateness closing > closing.json
    python -m tests.bench.lateness quality --out DIR --seeds 1 2 > quality.json

All run the coordinator's own closing of rounds (`coordinator.streamflow_plugin.closing`) on a clock that jumps from
event to event: no engine, no transfers. `queues`: log-normal queues (sigma 1) whose median is as long as a round's
training, and no lateness at all. `closing`: the same queues under every quorum, with and without `submit_ahead`, whose
moment `coordinator.rounds.ahead_time` chooses from what each facility saw. `quality`: four languages at four
facilities, one of which takes four times as long (`--random`: with queues as above); models of 0.16 M parameters
really trained (`federated_learner`), late updates rebased and weighed as the coordinator does, perplexity after equal
time and after equal updates. `--shared` is the default for pretrained models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.config.ahead import AheadSettings
from coordinator.config.closing import ClosingSettings, EvenSettings
from coordinator.planning.budget import FacilityPace
from coordinator.rounds.ahead_time import Seen, when_to_submit
from coordinator.rounds.common_end import WINDOW
from coordinator.rounds.participation import participation
from coordinator.steps.elastic import Elastic, common_end
from tests.bench.federated_learner import (
    Learner,
    Local,
    SecondMoments,
    batches,
    mean_second_moments,
    perplexity,
    rounded,
    take_second_moments,
)
from tests.bench.federated_quality import base_model, texts_of
from tests.bench.quality_texts import dealt
from tests.reproductions.server_in_memory import Server
from tests.streamflow_plugin.course import MOST_LATE, Course, course_of

SLOW = 4.0
LOCAL = Local(learning_rate=1e-3, batch=16)
STEPS, ROUNDS = 10, 20
EVEN, UNIT = EvenSettings(steps="elastic"), 100
"""Elastic steps, of which a unit of training has so many."""
WAITING = "waiting for all"
HOW = ((0.0, False), ("auto", False), (0.0, True))
"""Grace, and whether steps are elastic."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one course."""

    useful: float
    """Units of training a unit of time, each at the discount of its lateness."""
    all: float
    """Without it."""
    idle: float
    """Units that a job waited for its model."""
    units: float
    """Of training in an update."""


def queues(rounds: int = 60, seeds: int = 8) -> dict[str, Any]:
    """Useful updates a unit of time over those of waiting for all; a unit is a round's training."""
    rows: dict[str, Any] = {}
    for facilities in (4, 8):
        names = [f"f{number}" for number in range(facilities)]
        for label, settings in (
            ("quorum half, grace auto", ClosingSettings(quorum=0.5)),
            ("quorum half, grace 0", ClosingSettings(quorum=0.5, grace=0.0)),
            ("quorum 1, grace 0", ClosingSettings(quorum=1, grace=0.0)),
        ):
            found = []
            for seed in range(seeds):
                waits = numpy.random.default_rng(seed).lognormal(0.0, 1.0, (facilities, rounds * facilities))
                whole = _rates(None, names, waits, rounds)
                many = rounds * (facilities // settings.needed(facilities))
                found.append([a / b for a, b in zip(_rates(settings, names, waits, many), whole, strict=True)])
            mean = numpy.array(found).mean(0)
            spread = numpy.array(found).std(0)
            rows[f"{facilities} facilities, {label}"] = {
                "useful": round(float(mean[0]), 3),
                "useful_deviation": round(float(spread[0]), 3),
                "all": round(float(mean[1]), 3),
            }
    return {"random_queues": rows, "seeds": seeds, "no_lateness": _alike(rounds)}


def closing(rounds: int = 40, seeds: int = 6) -> dict[str, Any]:
    """Updates a unit of time over those of waiting for all, and node time lost to waiting in jobs."""
    rows: dict[str, Any] = {}
    for facilities in (4, 8):
        whole = [_course(None, facilities, seed, rounds, None) for seed in range(seeds)]
        for ahead in (None, AheadSettings(wait=0.5), AheadSettings(wait=0.5, idle=0.2)):
            submitted = "" if ahead is None else f", submit_ahead idle {ahead.idle:g}"
            for quorum in (0.5, 0.625, 0.75, 0.875, "all"):
                for grace, elastic in HOW if quorum != "all" else [one for one in HOW if one[0] != "auto"]:
                    settings = ClosingSettings(quorum=quorum, grace=grace) if quorum != "all" else None  # type: ignore[arg-type]
                    label = f"{facilities} facilities, quorum {quorum}, grace {grace}{submitted}"
                    found = [
                        _course(settings, facilities, seed, rounds, ahead, elastic=elastic) for seed in range(seeds)
                    ]
                    rows[label + (", elastic" if elastic else "")] = _compared(found, whole)
    return {"closing": rows, "seeds": seeds}


def _compared(found: list[Figures], whole: list[Figures]) -> dict[str, float]:
    """Means over seeds, of updates and of training as multiples of waiting for all."""
    over = [one.useful / waiting.useful for one, waiting in zip(found, whole, strict=True)]
    return {
        "useful": round(float(numpy.mean(over)), 3),
        "useful_deviation": round(float(numpy.std(over)), 3),
        "all": round(float(numpy.mean([one.all / waiting.all for one, waiting in zip(found, whole, strict=True)])), 3),
        "idle": round(float(numpy.mean([one.idle for one in found])), 3),
        "units_an_update": round(float(numpy.mean([one.units for one in found])), 3),
    }


def _course(
    settings: ClosingSettings | None,
    facilities: int,
    seed: int,
    rounds: int,
    ahead: AheadSettings | None,
    *,
    elastic: bool = False,
) -> Figures:
    names = [f"f{number}" for number in range(facilities)]
    waits = numpy.random.default_rng(seed).lognormal(0.0, 1.0, (facilities, 4 * rounds * facilities))
    queue = Queued(names, waits, ahead, elastic=elastic)
    many = rounds * (facilities // settings.needed(facilities)) if settings else rounds
    course = course_of(settings, names, queue, many)
    delivered = [
        (1 + number - began, queue.units[name, began])
        for number, by in enumerate(course.delivered)
        for name, began in by.items()
    ]
    units = sum(one for _, one in delivered)
    return Figures(
        useful=sum(one * late**-0.5 for late, one in delivered) / course.closed[-1],
        all=units / course.closed[-1],
        idle=queue.idle / queue.jobs,
        units=units / course.updates,
    )


class Queued:
    """Seconds from when a facility has its model to the end of its training, in a job that may be ahead.

    `elastic`: a job trains until the round is expected to end, by `coordinator.steps.elastic` from the facilities'
    latest waits and within the default bounds; else for one unit.
    """

    def __init__(self, names: list[str], waits: Any, ahead: AheadSettings | None, *, elastic: bool = False) -> None:
        self.waits, self.ahead = {name: iter(row) for name, row in zip(names, waits, strict=True)}, ahead
        self.seen, self.began = {name: Seen() for name in names}, dict.fromkeys(names, -1.0)
        self.idle, self.jobs = 0.0, 0
        self.elastic = elastic
        self.left: dict[str, list[float]] = {name: [] for name in names}
        """By facility, what was left of the queue once the model was there."""
        self.units: dict[tuple[str, int], float] = {}
        """Training by facility and round."""
        self.ends: dict[int, float] = {}
        """By round, when it is expected to end, in units after its beginning."""

    def __call__(self, name: str, number: int) -> float:
        now = asyncio.get_running_loop().time()
        if number not in self.ends:
            self.ends[number] = self._end()
        queued = self._queued(name, now)
        self.left[name].append(queued)
        self.began[name], self.jobs = now + queued, self.jobs + 1
        units = 1.0
        if self.elastic and math.isfinite(end := self.ends[number]):
            units = min(max(end - queued, EVEN.least_steps), EVEN.most_steps)
        self.units[name, number] = units
        return units + queued

    def _end(self) -> float:
        """As the coordinator expects it; inf while a facility has not been timed."""
        if not all(self.left.values()):
            return math.inf
        least, most = EVEN.bounds(UNIT)
        facilities = [
            Elastic(
                pace=FacilityPace(name=name, seconds_per_step=1 / UNIT, samples_per_step=1.0),
                waits=left[-WINDOW:],
                least=least,
                most=most,
            )
            for name, left in self.left.items()
        ]
        return common_end(facilities, UNIT * len(facilities))

    def _latest(self, name: str) -> float:
        """Units of a facility's latest training."""
        return next(units for (one, _), units in reversed(self.units.items()) if one == name)

    def _draw(self, name: str) -> float:
        waits = float(next(self.waits[name]))
        self.seen[name] = self.seen[name].with_wait(waits)
        return waits

    def _queued(self, name: str, now: float) -> float:
        """What is left of the queue once the model is there."""
        before = self.began[name]
        if self.ahead is None or before < 0:
            return self._draw(name)
        choice = when_to_submit(self.seen[name], wait=self.ahead.wait, idle=self.ahead.idle)
        self.seen[name] = self.seen[name].with_span(now - before).with_run(self._latest(name))
        if choice.after is None:
            return self._draw(name)
        placed = before + (choice.after if math.isfinite(choice.after) else self._latest(name))
        while placed < now:
            begins = placed + self._draw(name)
            if begins >= now:
                return begins - now
            waited = min(now - begins, self.ahead.wait)
            self.idle += waited
            self.seen[name] = self.seen[name].with_lost(waited)
            if waited < self.ahead.wait:
                return 0.0
            placed = begins + waited
        return self._draw(name)


def _rates(settings: ClosingSettings | None, names: list[str], waits: Any, rounds: int) -> tuple[float, float]:
    """Useful updates, and all, a unit of time; the n-th job of a facility waits as long whatever its round is."""
    made = dict.fromkeys(names, 0)

    def seconds(name: str, _: int) -> float:
        made[name] += 1
        return 1.0 + float(waits[names.index(name), (made[name] - 1) % waits.shape[1]])

    course = course_of(settings, names, seconds, rounds)
    return course.useful() / course.closed[-1], course.updates / course.closed[-1]


def _alike(rounds: int) -> dict[str, float]:
    """Facilities that differ by up to a tenth: time over that of waiting, and updates that were not in time."""
    names, spread = [f"f{number}" for number in range(4)], numpy.random.default_rng(0).uniform(1.0, 1.1, (4, rounds))

    def seconds(name: str, number: int) -> float:
        return float(spread[names.index(name), number])

    whole = course_of(None, names, seconds, rounds)
    found = course_of(ClosingSettings(quorum=0.75), names, seconds, rounds)
    late = sum(number != one for number, by in enumerate(found.delivered) for one in by.values())
    return {"time": round(found.closed[-1] / whole.closed[-1], 4), "late_updates": late, "updates": found.updates}


def scaled(settings: AggregationSettings, share: float, how: str) -> AggregationSettings:
    """The outer step of a round to which a share of the facilities delivered.

    `rate`: the server learning rate times the share; `both`: also momentum to the power of the share, so that what is
    left of a step after so many updates does not depend on how many rounds they took; `whole`: as always.
    """
    if how == "whole" or share >= 1.0:
        return settings
    rule: Any = settings  # parameters of rules are fields that no type declares
    rate = rule.server_learning_rate * share
    momentum = rule.momentum**share if how == "both" else rule.momentum
    return replace(rule, server_learning_rate=rate, momentum=momentum)


def learn(
    model: torch.nn.Module,
    texts: dict[str, Any],
    course: Course,
    rule: str,
    seed: int,
    late_weight: str,
    outer: str = "whole",
    local: Local = LOCAL,
    steps: Mapping[tuple[str, int], int] | None = None,
    by_work: bool = True,
) -> dict[str, float]:
    """Perplexity on each language's whole validation text after the course's last round. `outer`: as in `scaled`.

    `steps`: of each facility's training by the round that it began in, by which its update is weighed; None: equal.
    `by_work`: participation counts steps, not rounds.
    """
    rounds, names = len(course.closed), list(texts)
    aggregation = AggregationSettings(rule=rule, guard=False, maximum_staleness=MOST_LATE)
    server, keys = Server(aggregation), [str(place) for place, _ in enumerate(model.parameters())]
    learners = {
        name: Learner(model, batches(texts[name].train, local.batch, seed * 1000 + place), local, rounds * STEPS)
        for place, name in enumerate(names)
    }
    sent = [rounded([p.detach() for p in model.parameters()])]
    moments: list[SecondMoments | None] = [None]
    counts: dict[str, float] = {}
    for number, delivered in enumerate(course.delivered):
        updates, weights, staleness = {}, {}, {}
        made = {name: STEPS if steps is None else steps[name, began] for name, began in delivered.items()}
        counts |= {name: counts.get(name, 0.0) + (made[name] / STEPS if by_work else 1) for name in delivered}
        even = participation(counts, list(delivered))
        for name, began in sorted(delivered.items()):
            learner = learners[name]
            learner.load(sent[began])
            if (shared := moments[began]) is not None:
                take_second_moments(learner, shared)
            learner.step_number = began * STEPS  # the schedule spans the federation, as in the trainer
            learner.train(made[name], STEPS)
            own = zip(rounded([p.detach().clone() for p in learner.parameters]), sent[began], sent[number], strict=True)
            updates[name] = dict(zip(keys, (one - then + now for one, then, now in own), strict=True))
            staleness[name] = number - began
            stale = (1 + number - began) ** -aggregation.staleness_exponent
            weights[name] = made[name] / STEPS * (even[name] if late_weight == "participation" else stale)
        base = {key: value.to(torch.bfloat16) for key, value in zip(keys, sent[number], strict=True)}
        server.settings = scaled(aggregation, len(delivered) / len(names), outer)
        following = server.step(base, updates, weights, staleness)
        sent.append([following[key].float() for key in keys])
        if local.optimizer_state == "shared":
            there = sorted(delivered)
            moments.append(mean_second_moments([learners[one] for one in there], [weights[one] for one in there]))
        else:
            moments.append(None)
    learners[names[0]].load(sent[-1])
    judge = learners[names[0]].model
    return {name: round(perplexity(judge, text.validation), 4) for name, text in texts.items()}


def slow_courses(names: Sequence[str]) -> dict[str, Course]:
    """The last of the facilities takes four times as long as the others; a quorum of three in four."""
    slow = names[-1]

    def seconds(name: str, _: int) -> float:
        return SLOW if name == slow else 1.0

    return compared(lambda settings, rounds: course_of(settings, list(names), seconds, rounds), 0.75)


def queued_courses(names: Sequence[str], seed: int) -> dict[str, Course]:
    """Every job waits at random before it trains; a quorum of half, without and with jobs ahead of their model."""
    waits = numpy.random.default_rng(seed).lognormal(0.0, 1.0, (len(names), 20 * ROUNDS))

    def drawn(settings: ClosingSettings | None, rounds: int, ahead: AheadSettings | None = None) -> Course:
        return course_of(settings, list(names), Queued(list(names), waits, ahead), rounds)

    ahead = compared(
        lambda settings, rounds: drawn(settings, rounds, AheadSettings(wait=0.5) if settings else None), 0.5
    )
    return compared(drawn, 0.5) | {f"{label}, submit_ahead": one for label, one in ahead.items() if label != WAITING}


def compared(course: Callable[[ClosingSettings | None, int], Course], quorum: float) -> dict[str, Course]:
    """Waiting for all, and a quorum without grace for as long and with as many updates (just fewer, just more)."""
    whole, settings = course(None, ROUNDS), ClosingSettings(quorum=quorum, grace=0.0)
    others = [course(settings, rounds) for rounds in range(ROUNDS, 5 * ROUNDS)]
    return {
        WAITING: whole,
        "equal time": max((one for one in others if one.closed[-1] <= whole.closed[-1]), key=lambda one: one.updates),
        "equal updates": max((one for one in others if one.updates <= whole.updates), key=lambda one: one.updates),
        "at least as many": min((one for one in others if one.updates >= whole.updates), key=lambda one: one.updates),
    }


def quality(
    out: Path,
    seeds: list[int],
    rules: list[str],
    late_weight: str,
    outer: str = "whole",
    only: Sequence[str] = (),
    *,
    random: bool = False,
    alike: bool = False,
    shared: bool = False,
) -> dict[str, Any]:
    """Perplexity with one of four facilities four times slower, over that of waiting for all.

    `random`: with random queues in place of it. `alike`: each facility has a share of every language. `shared`: second
    moments are averaged between rounds.
    """
    torch.set_num_threads(1)
    texts = texts_of(out)
    names, trained = list(texts), dealt(texts) if alike else texts
    local = replace(LOCAL, optimizer_state="shared", betas=(0.9, 0.99)) if shared else LOCAL
    setup = [
        *(["random queues"] if random else []),
        *(["alike"] if alike else []),
        *(["shared second moments"] if shared else []),
    ]

    found: dict[str, Any] = {"courses": [], "perplexity": []}
    for seed in seeds:
        courses = queued_courses(names, seed) if random else slow_courses(names)
        courses = {label: one for label, one in courses.items() if label == WAITING or not only or label in only}
        found["courses"].append(
            {"seed": seed}
            | {
                label: {"units": round(one.closed[-1], 2), "rounds": len(one.closed), "updates": one.updates}
                for label, one in courses.items()
            }
        )
        model = base_model(out, texts, seed, 64)
        for rule in rules:
            last = {
                label: _kept(
                    *(out, model, trained, one, label, rule, seed),
                    *(("staleness", "whole") if label == WAITING else (late_weight, outer)),
                    *(local, setup),
                )
                for label, one in courses.items()
            }
            over = {label: round(value / last[WAITING], 4) for label, value in last.items()}
            row = {"rule": rule, "seed": seed, "late_weight": late_weight, "outer": outer, "setup": setup}
            found["perplexity"].append(row | {"last": last, "over_waiting": over})
    return found


def _kept(
    out: Path,
    model: torch.nn.Module,
    texts: dict[str, Any],
    course: Course,
    label: str,
    rule: str,
    seed: int,
    late_weight: str,
    outer: str,
    local: Local,
    setup: Sequence[str],
) -> float:
    """Geometric mean of the languages' perplexities after one training, or after that of an earlier start.

    OUT/lateness.jsonl holds every one.
    """
    file, key = out / "lateness.jsonl", [label, rule, seed, *([late_weight] if late_weight != "staleness" else [])]
    key += [*([f"outer {outer}"] if outer != "whole" else []), *setup]
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if (row := next((row for row in rows if row["key"] == key), None)) is not None:
        return float(row["perplexity"])
    began = time.perf_counter()
    languages = learn(model, texts, course, rule, seed, late_weight, outer, local)
    found = round(math.exp(sum(map(math.log, languages.values())) / len(languages)), 4)
    seconds = round(time.perf_counter() - began, 1)
    row = {"key": key, "perplexity": found, "languages": languages, "seconds": seconds}
    with open(file, "a") as kept:
        kept.write(json.dumps(row) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["queues", "closing", "quality"])
    parser.add_argument("--out", type=Path, default=Path("quality"), help="for datasets and base models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rules", nargs="+", default=["mean", "nesterov", "heloco+nesterov"])
    parser.add_argument("--late-weight", choices=["staleness", "participation"], default="staleness")
    parser.add_argument("--outer", choices=["whole", "rate", "both"], default="whole", help="scaled by who delivered")
    parser.add_argument("--random", action="store_true", help="queues in place of one slow facility")
    parser.add_argument("--alike", action="store_true", help="each facility has a share of every language")
    parser.add_argument("--shared", action="store_true", help="second moments are averaged, beta2 is 0.99")
    parser.add_argument("--only", nargs="+", default=[], metavar="COURSE", help="beside waiting; default: all")
    a = parser.parse_args()
    logging.disable(logging.WARNING)
    if a.what == "quality":
        found = quality(
            a.out, a.seeds, a.rules, a.late_weight, a.outer, a.only, random=a.random, alike=a.alike, shared=a.shared
        )
    else:
        found = queues() if a.what == "queues" else closing()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
