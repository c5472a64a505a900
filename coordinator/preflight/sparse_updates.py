"""What updates of few values cost in perplexity, by the length of the federation."""

from __future__ import annotations

from coordinator.config.federation import Federation
from coordinator.config.sparse_updates import are_sparse
from coordinator.preflight.row import Row, ok

CHECK = "sparse updates"
MEASURED = ((100, 14), (300, 5), (1000, 2))
"""Rounds of ten steps, and by how many percent the perplexity of a model of 0.16 million parameters was above that of
whole updates. Of 0.5 to 11 million it was 0 to 2 % after 100 (two facilities, tests/bench/README.md)."""


def check_sparse_updates(federation: Federation) -> list[Row]:
    """One row where all updates are sparse: what was measured in the longest federation that is no longer than this."""
    if not are_sparse([one.training for one in federation.facilities]):
        return []
    rounds, percent = max((pair for pair in MEASURED if pair[0] <= federation.rounds), default=MEASURED[0])
    found = (
        "at two facilities perplexity was 0 to 2 % above that of whole updates after 100 rounds of 10 steps with 0.5 "
        f"to 11 million parameters; with 0.16 million {percent} % above it after {rounds}"
    )
    return [ok("federation", CHECK, found)]
