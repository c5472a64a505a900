"""What updates of few values cost in perplexity, by the length of the federation."""

from __future__ import annotations

from coordinator.config.federation import Federation
from coordinator.config.sparse_updates import are_sparse
from coordinator.preflight.row import Row, ok, warning

CHECK = "sparse updates"
MEASURED = ((100, 22), (300, 8), (1000, 1))
"""Rounds of ten steps, and by how many percent the perplexity was above that of whole updates (two facilities, 0.16
million parameters, tests/bench/log/learning.md)."""
HARMLESS = 1
"""Percent."""


def check_sparse_updates(federation: Federation) -> list[Row]:
    """One row where all updates are sparse: what was measured in the longest federation that is no longer than this."""
    if not are_sparse([*federation.training_of.values()]):
        return []
    rounds, percent = max((pair for pair in MEASURED if pair[0] <= federation.rounds), default=MEASURED[0])
    found = f"perplexity was {percent} % above that of whole updates after {rounds} rounds of 10 steps (small models)"
    if percent <= HARMLESS:
        return [ok("federation", CHECK, found)]
    return [
        warning(
            "federation",
            CHECK,
            found,
            "more and shorter rounds, or training.encoding: sparse or delta-int4 where the links allow it",
        )
    ]
