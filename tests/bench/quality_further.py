"""Arms for what the table of `quality_arms.py` leaves open, one change at a time, the most telling first.

Federations of ten long rounds over unlike data; late facilities; the server learning rate over the rounds; first
moments; the mean of the last models, which every federation measures beside its final one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.bench.quality_arms import ARMS, DEFAULT, NESTEROV, RATE, SHARED, Arm, Cell, Group, ordered, short, unlike

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


def parts() -> list[list[Group]]:
    """Measured with every seed before the next part begins."""
    base = [(name, ARMS[name]) for name in ("pooled", DEFAULT)]
    arms = long_rounds()
    return [
        [
            ([FOUR_LONG], [*base, *arms[:6]]),
            ([TWO_LONG], [*base, *arms[:4]]),
            ([RANDOM], [short(pair) for pair in [*base, *arms[:4]]]),
            ([FOUR_LONG], arms[6:]),
            ([TWO_SHORT, FOUR_SHORT], [(DEFAULT, ARMS[DEFAULT]), arms[0], arms[1], FIRST_MOMENTS, *DECAYS]),
            ([TWO_SHORT, FOUR_SHORT], list(LATE)),
            ([TWO_LONG], arms[4:]),
            ([RANDOM], [short(pair) for pair in arms[4:10]]),
        ]
    ]


def further(seeds: Sequence[int], width: int = 64) -> list[Cell]:
    """Every cell in the order of importance, none twice."""
    return ordered(parts(), seeds, width)
