"""Names of a federation's jobs in a facility's queue, by which coordinator and gate find and cancel them."""

from __future__ import annotations

from facility.exchange.messages.ahead import SUFFIX


def job_name(federation: str, facility: str) -> str:
    """Name of the job of a round."""
    return f"crossfed-{federation}-{facility}"


def waiting_name(of_round: str) -> str:
    """Name of the job that waits for a round; `of_round`: the name of the round's own job."""
    return f"{of_round}{SUFFIX}"
