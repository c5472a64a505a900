"""What a gate answers to `hello`, its site's policy in short, read strictly: it comes from another institution."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.preflight.probe_answer import last_line
from facility.exchange.errors import ManifestError
from facility.exchange.messages.strict_json import Fields, clean_text
from facility.exchange.text import number_of

WHERE = "the gate's answer"
LONGEST = 400
"""Characters of a name or a path."""
MOST_NAMES = 100
"""Federations or datasets that are read."""


@dataclass(frozen=True, kw_only=True)
class GateSummary:
    """A site's policy as its gate reports it. Texts are clean, and '' where the gate does not report them."""

    version: int = 1
    """Of the gate's requests; one below 2 cannot test settings."""
    facility: str
    federations: tuple[str, ...]
    scheduler: str
    workdir: str
    datasets: tuple[str, ...] = ()
    """Prepared ones, as the policy names them; empty for a gate of an earlier version."""
    nodes: int = 1
    """Most of one job."""
    hours: float = 0.0
    """Most of one job; 0: the policy does not say."""
    ahead_seconds: float = 0.0
    """That a job which was submitted ahead may wait for its model; a gate of an earlier version lets none wait."""
    masks: bool = False
    """Whether it masks updates for secure aggregation."""
    minimum_sum: int | None = None
    """Updates that a sum needs at least for this site to help to unmask it."""

    def describe(self) -> str:
        """The policy in a sentence for a person."""
        data = ", ".join(self.datasets) or "datasets that it does not tell"
        return (
            f"its gate allows {self.facility} in {', '.join(self.federations)}: jobs of "
            f"{number_of(self.nodes, 'node')} and {self.hours:g} h by {self.scheduler}, models in "
            f"{self.workdir}, training on {data}"
        )


def summary_or_none(text: str) -> GateSummary | None:
    """The summary; None where what answered is not a gate."""
    try:
        return read_gate_answer(text)
    except ManifestError:
        return None


def read_gate_answer(text: str) -> GateSummary:
    """The summary, whose last line is JSON. Raises `ManifestError`."""
    fields = last_line(text, WHERE)
    if not isinstance(fields.raw.get("federations"), list):
        raise ManifestError(f"{WHERE} lists no federations")
    return GateSummary(
        version=fields.whole("gate"),
        facility=fields.words("facility", "", longest=LONGEST),
        federations=_names(fields, "federations"),
        scheduler=fields.words("scheduler", "", longest=LONGEST),
        workdir=fields.words("workdir", "", longest=LONGEST),
        datasets=_names(fields, "datasets"),
        nodes=fields.whole("nodes"),
        hours=fields.number("hours"),
        ahead_seconds=fields.number("ahead_seconds", 0.0),
        masks=fields.flag("masks", False),
        minimum_sum=None if fields.raw.get("minimum_sum") is None else fields.whole("minimum_sum"),
    )


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    """Those that are clean text; others are not names of ours."""
    found = fields.raw.get(name)
    listed = found[:MOST_NAMES] if isinstance(found, list) else []
    return tuple(
        one for one in listed if isinstance(one, str) and 0 < len(one) <= LONGEST and one == clean_text(one, LONGEST)
    )
