"""`lost_replicas` in the details of `report.json`: replicas that left during a round that the others finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from facility.exchange.errors import ManifestError
from facility.exchange.messages.plausible import MOST_COUNT
from facility.exchange.messages.report import MOST_REASON, Report
from facility.exchange.messages.strict_json import Fields

KEY = "lost_replicas"
MOST_REPLICAS = 10_000


@dataclass(frozen=True, kw_only=True)
class LostReplica:
    """One replica that left and did not come back."""

    replica: int
    step: int
    """The last step that it is known to have made in this round."""
    blocks_trained: int
    """Sequences whose steps were exchanged before it left: they are in the update."""
    blocks_not_trained: int
    """Sequences of its share of the round that are not in the update."""
    reason: str

    def __str__(self) -> str:
        return (
            f"replica {self.replica} lost after step {self.step} ({self.reason}): "
            f"{self.blocks_trained} of its blocks trained, {self.blocks_not_trained} not"
        )

    def to_json(self) -> dict[str, Any]:
        """One item of the list."""
        return asdict(self)


def lost_in(report: Report) -> list[LostReplica]:
    """Lost replicas that a report lists. Raises `ManifestError` where the list is malformed."""
    found = Fields(raw=report.details, where=f"report.json of {report.facility}")
    return found.items(KEY, MOST_REPLICAS, _lost)


def note_on(report: Report) -> str:
    """What a person is to know of a round that went well; empty: nothing. Never refuses a report."""
    try:
        return "; ".join(map(str, lost_in(report)))
    except ManifestError as error:
        return f"what it says of lost replicas cannot be read: {error}"


def _lost(found: Fields, key: str) -> LostReplica:
    one = found.inside(key).only_of(LostReplica)
    return LostReplica(
        replica=one.whole("replica", most=MOST_REPLICAS),
        step=one.whole("step", most=MOST_COUNT),
        blocks_trained=one.whole("blocks_trained", most=MOST_COUNT),
        blocks_not_trained=one.whole("blocks_not_trained", most=MOST_COUNT),
        reason=one.words("reason", "", longest=MOST_REASON),
    )
