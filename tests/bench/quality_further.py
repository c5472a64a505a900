"""Arms for what the table of `quality_arms.py` leaves open, one change at a time, the most telling first.

Federations of ten long rounds over unlike data; late facilities; the server learning rate over the rounds; first
moments; adapters; a hundred rounds that send little. Every federation measures the mean of its last models as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.bench.federated_incomplete import WAYS
from tests.bench.quality_arms import ARMS, DEFAULT, NESTEROV, RATE, SHARED, Arm, Cell, Group, ordered, short, unlike
from tests.bench.quality_sizes import Size, size_of

FOUR_LONG, FOUR_SHORT, TWO_LONG, TWO_SHORT = (
    ("all-four", "10x30"),
    ("all-four", "30x10"),
    ("it-cs", "10x30"),
    ("it-cs", "30x10"),
)
RANDOM = ("random-it-cs", "5x20")


def outer(name: str, **changes: Any) -> tuple[str, Arm]:
    """The default with other outer settings."""
    return f"{DEFAULT}, {name}", replace(ARMS[DEFAULT], aggregation=NESTEROV | changes)


def inner(name: str, aggregation: dict[str, Any] | None = None, **changes: Any) -> tuple[str, Arm]:
    """The default with other settings of training."""
    local = RATE | SHARED | changes
    return f"{DEFAULT}, {name}", replace(ARMS[DEFAULT], local=local, aggregation=NESTEROV | (aggregation or {}))


def along(momentum: float, name: str = "", **changes: Any) -> tuple[str, Arm]:
    """Momentum within the rounds in place of the server's, over a plain mean."""
    arm = Arm(aggregation={"rule": "mean"}, local=RATE | SHARED | {"along": momentum} | changes)
    return f"mean, shared second moments, momentum {momentum:g} within rounds{name}", arm


CONTROL = inner("drift corrected", control=1.0)
AS_SENT = {"control": 1.0, "as_sent": True}
"""What `training.drift_correction` does."""
SLOW = [0.9, 0.99]
"""AdamW's betas, of second moments that change less within a round."""
FIRST_MOMENTS = inner("first moments too", first_moments="mean")
DECAYS = (
    outer("decay to 0.65 over 0.3", server_decay_share=0.3),
    outer("decay to 0.2 over 0.5", server_decay_share=0.5, server_decay_to=0.2),
)
LATE = (
    unlike(DEFAULT, "late"),
    (
        "heloco, shared second moments, late",
        replace(ARMS[DEFAULT], aggregation=NESTEROV | {"rule": "heloco+nesterov"}, unlike="late"),
    ),
    unlike("mean", "late"),
)


def long_rounds() -> list[tuple[str, Arm]]:
    """What may help ten rounds of 30 steps."""
    return [
        CONTROL,
        along(0.8),
        along(0.8, ", drift corrected", control=1.0),
        inner("drift corrected, beta2 0.99", control=1.0, betas=SLOW),
        outer("constant momentum", momentum_warmup=False),
        inner("drift corrected by half", control=0.5),
        outer("server rate 1.4", server_learning_rate=1.4),
        FIRST_MOMENTS,
        inner("beta2 0.99", betas=SLOW),
        *DECAYS,
        along(0.9),
        outer("constant momentum 0.9", momentum=0.9, momentum_warmup=False),
        inner("drift corrected, first moments too", control=1.0, first_moments="mean"),
        along(0.9, ", drift corrected, beta2 0.99", control=1.0, betas=SLOW),
        inner("server rate 1.4, drift corrected", {"server_learning_rate": 1.4}, control=1.0),
        outer("server rate 2", server_learning_rate=2.0),
        inner("beta2 0.999", betas=[0.9, 0.999]),
    ]


LORA_RATE = {"learning_rate": 1e-2}
"""Of adapters, at which they are compared."""
RANK = {"rank": 8}
DIFFERING = RANK | {"trained": [8, 2]}
"""Every other facility trains two of the eight components."""
FROZEN = RANK | {"freeze_a": True}


def adapters() -> list[tuple[str, Arm]]:
    """LoRA: pooled, the means of factors and of products, the server's momentum, ranks that differ."""

    def one(name: str, aggregation: dict[str, Any] | None, lora: dict[str, Any], **local: Any) -> tuple[str, Arm]:
        return f"lora, {name}", Arm(aggregation=aggregation, local=LORA_RATE | local, lora=lora)

    mean, product = {"rule": "mean"}, RANK | {"product": True}
    return [
        one("pooled", None, RANK),
        one("nesterov", NESTEROV, RANK),
        one("mean", mean, RANK),
        one("product", mean, product),
        one("nesterov, shared second moments", NESTEROV, RANK, **SHARED),
        one("nesterov, ranks 8 and 2", NESTEROV, DIFFERING),
        one("product, ranks 8 and 2", mean, product | DIFFERING),
        one("pooled, rank 2", None, {"rank": 2}),
        one("nesterov, rank 2", NESTEROV, {"rank": 2}),
        one("pooled at 0.02", None, RANK, learning_rate=2e-2),
        one("nesterov 0.5", NESTEROV | {"momentum": 0.5}, RANK),
        one("nesterov 0.3", NESTEROV | {"momentum": 0.3}, RANK),
        one("nesterov at 0.02", NESTEROV, RANK, learning_rate=2e-2),
        one("pooled, frozen A", None, FROZEN),
        one("mean, frozen A", mean, FROZEN),
        one("mean, frozen A, at 0.02", mean, FROZEN, learning_rate=2e-2),
        one("pooled, frozen A, at 0.02", None, FROZEN, learning_rate=2e-2),
        one("mean, frozen A, at 0.04", mean, FROZEN, learning_rate=4e-2),
        one("pooled, frozen A, at 0.04", None, FROZEN, learning_rate=4e-2),
    ]


MANY = ("it-cs", "100x10")


def many_rounds() -> list[tuple[str, Arm]]:
    """A hundred rounds and what SparseLoCo sends of them."""
    return [
        ("pooled", ARMS["pooled"]),
        ("mean", ARMS["mean"]),
        (DEFAULT, ARMS[DEFAULT]),
        ("sparseloco, server rate 2.5", sparse(2.5)),
        ("sparseloco, server rate 3, from a quarter of the unsent", sparse(3.0, unsent_share=0.25)),
    ]


def sparse(rate: float, **more: Any) -> Arm:
    """Sparse updates whose mean moves the model times `rate`."""
    return Arm(
        aggregation={"rule": "mean", "server_learning_rate": rate},
        local={"learning_rate": 4e-3, "betas": SLOW, "optimizer_state": "shared"},
        codec="sparseloco",
        **more,
    )


def combined() -> list[tuple[str, Arm]]:
    """Pairs of what helps alone."""
    slow, fixed = {"betas": SLOW}, {"momentum_warmup": False}
    return [
        inner("server rate 1.4, drift corrected, beta2 0.99", {"server_learning_rate": 1.4}, control=1.0, **slow),
        inner("constant momentum, beta2 0.99", fixed, **slow),
        inner("constant momentum, drift corrected", fixed, control=1.0),
        inner("constant momentum 0.6, drift corrected, beta2 0.99", fixed | {"momentum": 0.6}, control=1.0, **slow),
        outer("constant momentum 0.6", momentum=0.6, momentum_warmup=False),
        inner("server rate 1.2, drift corrected, beta2 0.99", {"server_learning_rate": 1.2}, control=1.0, **slow),
    ]


def larger_steps() -> list[tuple[str, Arm]]:
    """Outer steps above one beside slower second moments: what `auto` takes in long rounds over trained models."""
    fixed, large = {"momentum_warmup": False}, {"server_learning_rate": 1.4}
    return [
        inner("server rate 1.4, constant momentum 0.7, beta2 0.99", large | fixed | {"momentum": 0.7}, betas=SLOW),
        inner("server rate 1.2, beta2 0.99", {"server_learning_rate": 1.2}, betas=SLOW),
        inner("beta2 0.99", betas=SLOW),
        inner("server rate 1.4, constant momentum, beta2 0.99", large | fixed, betas=SLOW),
        inner("server rate 1.4, beta2 0.99", large, betas=SLOW),
        inner("server rate 1.4, momentum t / (t + 1), beta2 0.99", large | {"momentum_friction": 1.0}, betas=SLOW),
    ]


def forms() -> list[tuple[str, Arm]]:
    """How second moments travel and how often, a blend with a facility's own, and first moments beside them."""
    large = {"server_learning_rate": 1.2}

    def one(name: str, **local: Any) -> tuple[str, Arm]:
        return inner(f"server rate 1.2, beta2 0.99, {name}", large, betas=SLOW, **local)

    return [
        one("in full", form="full"),
        one("a byte a value", form="int8"),
        one("in blocks", form="blocks"),
        one("half blended with own", blend=0.5),
        one("every third round", every=3),
        one("first moments too", first_moments="mean"),
    ]


def absences() -> list[tuple[str, Arm]]:
    """Each facility absent in a third of the rounds: pooled training with the same tokens, and what a server may do."""
    absent = replace(ARMS[DEFAULT], local=RATE | SHARED | {"betas": SLOW}, unlike="absent")
    found = [("pooled, absent", replace(ARMS["pooled"], unlike="absent")), unlike("mean", "absent")]
    named = [(f"{DEFAULT}, beta2 0.99, absent" + f", {way}" * bool(way), way) for way in WAYS]
    return [*found, *((name, replace(absent, incomplete=way)) for name, way in named)]


def optimizers(optimizer: str, rate: float) -> list[tuple[str, Arm]]:
    """Another inner optimizer: pooled, plain mean, the server's momentum, and what it keeps averaged."""
    local = {"learning_rate": rate, "optimizer": optimizer}
    first = {"first_moments": "mean"}
    at = "" if rate == RATE["learning_rate"] else f" at {rate:g}"
    half = NESTEROV | {"momentum": 0.5}
    return [
        (f"pooled, {optimizer}{at}", Arm(aggregation=None, local=local)),
        (f"mean, {optimizer}{at}", Arm(aggregation={"rule": "mean"}, local=local)),
        (f"nesterov, {optimizer}{at}", Arm(aggregation=NESTEROV, local=local)),
        (f"nesterov, {optimizer}{at}, second moments averaged", Arm(aggregation=NESTEROV, local=local | SHARED)),
        (f"nesterov, {optimizer}{at}, momentum 0.5", Arm(aggregation=half, local=local)),
        *(
            [
                (f"nesterov, {optimizer}, first moments averaged", Arm(aggregation=NESTEROV, local=local | first)),
                (f"nesterov, {optimizer}, both averaged", Arm(aggregation=NESTEROV, local=local | first | SHARED)),
            ]
            if optimizer == "muon"
            else []
        ),
    ]


def drift() -> list[tuple[str, Arm]]:
    """What the product's correction of drift changes, with the momentum that grows and with a constant one."""
    fixed = {"momentum_warmup": False}
    return [
        inner("drift corrected as sent", **AS_SENT),
        inner("constant momentum, drift corrected as sent", fixed, **AS_SENT),
        inner("drift corrected as sent, beta2 0.99", betas=SLOW, **AS_SENT),
        inner("constant momentum 0.5, drift corrected as sent", fixed | {"momentum": 0.5}, **AS_SENT),
    ]


def parts() -> list[list[Group]]:
    """Measured with every seed before the next part begins."""
    base = [(name, ARMS[name]) for name in ("pooled", DEFAULT)]
    arms = long_rounds()
    told = [arms[0], arms[3], outer("constant momentum", momentum_warmup=False)]
    return [
        [([FOUR_LONG, TWO_LONG], [*base, *told])],
        [
            ([FOUR_LONG, TWO_LONG], combined()),
            ([RANDOM], [short(pair) for pair in combined()]),
            ([FOUR_LONG], [*base, *arms[:6]]),
            ([TWO_LONG], [*base, *arms[:4]]),
            ([RANDOM], [short(pair) for pair in [*base, *arms[:4]]]),
            ([FOUR_LONG], arms[6:]),
            ([TWO_SHORT, FOUR_SHORT], [(DEFAULT, ARMS[DEFAULT]), arms[0], arms[1], FIRST_MOMENTS, *DECAYS]),
            ([TWO_SHORT, FOUR_SHORT], list(LATE)),
            ([TWO_SHORT], adapters()),
            ([MANY], many_rounds()),
            ([TWO_LONG], arms[4:]),
            ([RANDOM], [short(pair) for pair in arms[4:10]]),
            ([FOUR_LONG, TWO_LONG, TWO_SHORT], drift()[:1]),
            ([RANDOM], [short(pair) for pair in drift()[:1]]),
            ([FOUR_LONG], drift()[1:]),
            ([FOUR_LONG], larger_steps()[:1]),
            ([TWO_LONG], larger_steps()[:2]),
            ([TWO_SHORT, FOUR_SHORT], larger_steps()[1:3]),
            ([FOUR_LONG], larger_steps()[3:]),
            ([TWO_LONG], forms()),
            ([TWO_SHORT, FOUR_SHORT], absences()),
            ([TWO_SHORT, FOUR_SHORT], [*optimizers("muon", 2e-3), *optimizers("adafactor", 3e-2)]),
        ],
    ]


def large(size: Size) -> list[Group]:
    """A larger model: Muon by learning rate, pooled and by the rules that are best at 0.16 M; AdamW near its best."""
    half, more, corrected = NESTEROV | {"momentum": 0.5}, NESTEROV | {"momentum": 0.7}, SHARED | AS_SENT
    muon = {"optimizer": "muon", "optimizer_parameters": {"momentum": 0.8}, "betas": SLOW}

    def by_rate(
        name: str, aggregation: dict[str, Any] | None, rates: Sequence[float], **local: Any
    ) -> list[tuple[str, Arm]]:
        return [
            (f"{name} at {rate:g}", Arm(aggregation=aggregation, local={"learning_rate": rate} | local))
            for rate in rates
        ]

    rates, near = [8 * size.rate, 4 * size.rate, 16 * size.rate], [2 * size.rate, 1.4 * size.rate]
    adamw = SHARED | {"betas": SLOW}
    pooled = by_rate("pooled, muon", None, rates, **muon)
    return [
        ([TWO_SHORT], [*pooled, *by_rate("muon, momentum 0.5", half, rates, **muon, **SHARED)]),
        ([FOUR_SHORT], [*pooled, *by_rate("muon, momentum 0.7", more, rates, **muon, **SHARED)]),
        ([TWO_LONG], by_rate("muon, momentum 0.5, drift corrected as sent", half, rates, **muon, **corrected)),
        (
            [FOUR_LONG],
            by_rate(
                "muon, server rate 1.2, momentum 0.5, drift corrected as sent",
                half | {"server_learning_rate": 1.2},
                rates,
                **muon,
                **corrected,
            ),
        ),
        ([TWO_SHORT, FOUR_SHORT], by_rate("pooled, beta2 0.99", None, near[:1], betas=SLOW)),
        ([TWO_SHORT, FOUR_SHORT], by_rate("momentum 0.5, beta2 0.99", half, near, **adamw)),
        (
            [TWO_LONG, FOUR_LONG],
            by_rate("momentum 0.5, beta2 0.99, drift corrected as sent", half, near, **adamw, **AS_SENT),
        ),
        (
            [FOUR_SHORT],
            by_rate(
                "muon, momentum 0.7, first moments averaged",
                more,
                rates[:1],
                **muon,
                **SHARED,
                first_moments="mean",
            ),
        ),
    ]


def further(seeds: Sequence[int], width: int = 64) -> list[Cell]:
    """Every cell in the order of importance, none twice."""
    size = size_of(width)
    if size.rate != RATE["learning_rate"]:
        return ordered([[group] for group in large(size)], seeds, width)
    return ordered(parts(), seeds, width)
