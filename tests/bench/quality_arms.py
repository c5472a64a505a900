"""The ways to train that `federated_quality.py` compares, and its whole table in the order of importance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from facility.exchange.messages.settings import SPARSE_DENSITY
from tests.bench.federated_unlike import UNLIKE
from tests.bench.quality_sizes import Size, size_of


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    aggregation: dict[str, Any] | None
    """Fields of AggregationSettings; None where nothing is aggregated."""
    local: dict[str, Any] = field(default_factory=dict)
    """Fields of Local that differ."""
    codec: str | None = None
    """What travels both ways instead of bfloat16: delta-int8, delta-int4 or sparse; to the server: sparseloco."""
    density: float = SPARSE_DENSITY
    """Of `sparse`."""
    unsent_share: float = 0.0
    """Of `sparseloco`: the share of what was not sent that training begins with."""
    unlike: str = ""
    """How facilities differ beside their text (`federated_unlike.UNLIKE`)."""
    incomplete: str = ""
    """What the server does in rounds that some facilities miss (`federated_incomplete.WAYS`)."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Adapters of `rank` alone are trained; `product`: the mean of their products, not of the factors; `trained`: the
    components that each facility trains, in turn; `freeze_a`: B alone is trained. Empty: the whole model."""
    without: Literal["pooled", "alone", "base"] = "pooled"
    """How to train where nothing is aggregated."""

    @property
    def kind(self) -> str:
        return "federated" if self.aggregation is not None else self.without


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: an arm on an experiment's texts."""

    name: str
    """Of the arm."""
    arm: Arm
    experiment: str
    schedule: str
    """Rounds x local steps."""
    seed: int
    width: int = 64


Group = tuple[list[tuple[str, str]], list[tuple[str, Arm]]]
"""Federations (experiment and schedule) and the arms that are measured there."""
RATE = {"learning_rate": 2e-3}
SHARED = {"optimizer_state": "shared"}
NESTEROV = {"rule": "nesterov", "server_learning_rate": 1.0, "momentum": 0.8}
ARMS = {
    "pooled": Arm(aggregation=None, local=RATE),
    "alone": Arm(aggregation=None, local=RATE, without="alone"),
    "base": Arm(aggregation=None, without="base"),
    "mean, fresh optimizer": Arm(aggregation={"rule": "mean"}, local=RATE | {"keep_optimizer": False}),
    "mean": Arm(aggregation={"rule": "mean"}, local=RATE),
    "mean, shared second moments": Arm(aggregation={"rule": "mean"}, local=RATE | SHARED),
    "fedprox": Arm(aggregation={"rule": "mean"}, local=RATE | {"proximal": 0.01}),
    "fedadam": Arm(aggregation={"rule": "fedadam", "server_learning_rate": 1e-2, "momentum": 0.5}, local=RATE),
    "nesterov": Arm(aggregation=NESTEROV, local=RATE),
    "nesterov, shared second moments": Arm(aggregation=NESTEROV, local=RATE | SHARED),
    "nesterov, constant momentum": Arm(
        aggregation={"rule": "nesterov", "server_learning_rate": 0.8, "momentum": 0.7, "momentum_warmup": False},
        local=RATE,
    ),
    "nesterov, constant momentum, fresh optimizer": Arm(
        aggregation={"rule": "nesterov", "server_learning_rate": 0.8, "momentum": 0.7, "momentum_warmup": False},
        local=RATE | {"keep_optimizer": False},
    ),
}
SCHEDULES = ("30x10", "10x30")
SHORT = {"warmup_steps": 80}
"""Of a federation of 100 steps from random weights: the demo's."""
RATES = (4e-3, 8e-3)
"""Further learning rates, of pooled training and of the default."""
DEFAULT = "nesterov, shared second moments"


def at(rate: float, name: str) -> tuple[str, Arm]:
    """An arm at another learning rate."""
    arm = ARMS[name]
    return f"{name} at {rate:g}", replace(arm, local=arm.local | {"learning_rate": rate})


def shared_with(**changes: Any) -> tuple[str, Arm]:
    """Shared second moments with other outer settings."""
    told = ", ".join(f"{name} {value:g}" for name, value in changes.items())
    return f"{DEFAULT}, {told}", replace(ARMS[DEFAULT], aggregation=NESTEROV | changes)


def with_beta2(beta2: float, rate: float = 2e-3, **outer: Any) -> tuple[str, Arm]:
    """Shared second moments that forget more slowly, and so stay nearer to the shared ones within a round."""
    told = "".join(f", {name} {value:g}" for name, value in outer.items())
    arm = replace(
        ARMS[DEFAULT],
        aggregation=NESTEROV | outer,
        local={"learning_rate": rate, "betas": [0.9, beta2]} | SHARED,
    )
    return f"{DEFAULT}, beta2 {beta2:g}{told}" + (f" at {rate:g}" if rate != 2e-3 else ""), arm


def unlike(name: str, how: str) -> tuple[str, Arm]:
    """An arm over facilities that differ."""
    return f"{name}, {how}", replace(ARMS[name], unlike=how)


def shared_at(rate: float, **outer: float) -> tuple[str, Arm]:
    """Shared second moments at another learning rate with other outer settings."""
    name, arm = shared_with(**outer)
    return f"{name} at {rate:g}", replace(arm, local=arm.local | {"learning_rate": rate})


def short(pair: tuple[str, Arm]) -> tuple[str, Arm]:
    """The same with the warm-up of a short federation."""
    return pair[0], replace(pair[1], local=pair[1].local | SHORT)


def groups() -> list[Group]:
    """Federations (experiment and schedule) and the arms that are measured there, the most telling first."""
    named = [(name, ARMS[name]) for name in ("pooled", DEFAULT)]
    outer = [shared_with(momentum=momentum) for momentum in (0.5, 0.9)]
    random = [*named, *((name, ARMS[name]) for name in ("mean", "nesterov")), outer[0]]
    four, two = [("all-four", one) for one in SCHEDULES], [("it-cs", one) for one in SCHEDULES]
    return [
        ([("random-it-cs", "5x20")], [short(pair) for pair in random]),
        ([*four, *two], named),
        ([four[0]], [at(rate, name) for rate in RATES for name in ("pooled", DEFAULT)]),
        ([four[1]], [outer[0]]),
        ([two[0]], [at(RATES[0], name) for name in ("pooled", DEFAULT)]),
        ([four[1]], [with_beta2(0.99), outer[1], with_beta2(0.99, momentum=0.9)]),
        ([four[0]], [shared_at(8e-3, momentum=0.5)]),
        ([two[0]], [unlike(name, how) for how in UNLIKE[1:5] for name in (DEFAULT, "mean")]),
        ([two[0]], [at(RATES[1], name) for name in ("pooled", DEFAULT)]),
        ([four[1], two[1]], [at(rate, DEFAULT) for rate in RATES]),
        ([four[0]], [with_beta2(0.99, 8e-3)]),
        ([four[1]], [with_beta2(0.999)]),
        ([*two, *four], [(name, ARMS[name]) for name in ("alone", "base")]),
        ([*two, *four], [(name, ARMS[name]) for name in ("nesterov", "mean", "mean, shared second moments")]),
        ([*two, *four], outer),
    ]


def large_groups(size: Size) -> list[Group]:
    """The same for a larger model, whose arms have its own learning rate: the main rows, and each at further rates."""

    def named(*names: str) -> list[tuple[str, Arm]]:
        return [(name, at(size.rate, name)[1] if name != "base" else ARMS[name]) for name in names]

    four, two = [("all-four", one) for one in SCHEDULES], [("it-cs", one) for one in SCHEDULES]
    rates = [at(rate, name) for rate in size.rates for name in ("pooled", DEFAULT)]
    own, fixed = {"learning_rate": size.rate} | SHARED, {"momentum_warmup": False}
    corrected = own | {"control": 1.0, "as_sent": True}

    def changed(name: str, outer: dict[str, Any], local: dict[str, Any]) -> tuple[str, Arm]:
        return f"{DEFAULT}, {name}", Arm(aggregation=NESTEROV | outer, local=local)

    long_rounds = [
        changed("constant momentum", fixed, own),
        changed("drift corrected as sent", {}, corrected),
        changed("constant momentum, drift corrected as sent", fixed, corrected),
    ]
    lower = [
        changed("drift corrected as sent, beta2 0.99", {}, corrected | {"betas": [0.9, 0.99]}),
        changed("momentum 0.5", {"momentum": 0.5}, own),
        changed("constant momentum 0.5", fixed | {"momentum": 0.5}, own),
        changed("constant momentum 0.5, drift corrected as sent", fixed | {"momentum": 0.5}, corrected),
    ]
    return [
        ([*two, *four], named("pooled", DEFAULT)),
        ([*two, *four], named("base", "mean")),
        ([four[1], two[1], four[0], two[0]], long_rounds),
        ([four[1], two[1]], lower),
        ([*two, *four], named("nesterov")),
        ([two[0], four[0]], rates),
        ([two[1], four[1]], rates),
        ([two[0], four[0]], named("alone")),
    ]


FIRST = 2
"""Groups that are measured with every seed before the others begin."""


def table(seeds: Sequence[int], width: int = 64) -> list[Cell]:
    """Every cell in the order of importance, none twice."""
    size = size_of(width)
    if size.rate != RATE["learning_rate"]:
        return ordered([large_groups(size)], seeds, width)
    every = groups()
    return ordered([every[:FIRST], every[FIRST:]], seeds, width)


def ordered(parts: Sequence[list[Group]], seeds: Sequence[int], width: int) -> list[Cell]:
    """Cells of each part with every seed before those of the next, none twice, a training of one schedule once."""
    cells: dict[tuple[str, str, str, int], Cell] = {}
    for part in parts:
        for seed in seeds:
            for federations, arms in part:
                for experiment, schedule in federations:
                    for name, arm in arms:
                        cell = Cell(
                            name=name, arm=arm, experiment=experiment, schedule=schedule, seed=seed, width=width
                        )
                        rounds, steps = map(int, schedule.split("x"))
                        same = schedule if arm.kind == "federated" else str(rounds * steps)
                        cells.setdefault((name, experiment, same, seed), cell)
    return list(cells.values())
