"""Names of a federation's jobs in a facility's queue, by which coordinator and gate find and cancel them."""

from __future__ import annotations

from facility.exchange.messages.ahead import SUFFIX

MARK = "CROSSFED_JOB"
"""Environment variable that names our processes on a host without a queue."""


def job_name(federation: str, facility: str) -> str:
    """Name of the job of a round: `crossfed-FEDERATION-FACILITY`, with every hyphen of the federation's name doubled.

    So no two pairs have one name: `heron-nest` at `alpha` is `crossfed-heron--nest-alpha`, `heron` at `nest-alpha` is
    `crossfed-heron-nest-alpha`, and a facility's name begins with no hyphen.
    """
    return f"crossfed-{federation.replace('-', '--')}-{facility}"


def waiting_name(of_round: str) -> str:
    """Name of the job that waits for a round; `of_round`: the name of the round's own job.

    A facility `alpha-ahead` of the same federation would have it too: `coordinator.config.facility_names` rejects that.
    """
    return f"{of_round}{SUFFIX}"
