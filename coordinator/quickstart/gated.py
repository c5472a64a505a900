"""A site behind a gate: the gate's summary of the site's policy replaces the survey."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from coordinator.config.deployments import GATED, WORKDIR, Deployment
from coordinator.config.federation import Facility
from coordinator.preflight import gate
from coordinator.preflight.row import Row
from coordinator.quickstart.choice import Choice
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.propose import Proposal
from facility.exchange.errors import InputError
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.text import NAME, number_of

log = logging.getLogger(__name__)

LIMITS = (
    "behind a gate: its own people run facility/setup.sh --gate, prepare the data with our tokenizer and choose the "
    "job template; nothing is installed or prepared from here"
)
"""What cannot go through a gate by its nature: its key opens requests, and none of them runs a command of ours."""


@dataclass(frozen=True, kw_only=True)
class GateSummary:
    """A policy as reported by a gate. It is another institution's text: only fields of the expected form are used."""

    facility: str
    federations: tuple[str, ...]
    scheduler: str
    workdir: str
    datasets: tuple[str, ...]
    """Prepared ones, as the policy names them; empty for a gate of an earlier version."""
    nodes: int = 1
    hours: float = 0.0
    """Most hours of one job; 0: the policy does not say."""

    def said(self) -> str:
        data = ", ".join(self.datasets) or "datasets that it does not tell"
        return (
            f"its gate allows {self.facility} in {', '.join(self.federations)}: jobs of "
            f"{number_of(self.nodes, 'node')} and {self.hours:g} h by {self.scheduler}, models in "
            f"{self.workdir}, training on {data}"
        )


def ask_gate(login: Deployment) -> GateSummary | None:
    """The gate's summary; None if nothing answers, or what answers is no gate."""
    summary = gate.told_of(gate.send_to_gate(login, "hello"))
    if summary is None:
        return None
    facility, scheduler, workdir = (str(summary.get(key, "")) for key in ("facility", "scheduler", "workdir"))
    if not NAME.fullmatch(facility) or scheduler not in GATED or not WORKDIR.fullmatch(workdir):
        return None
    return GateSummary(
        facility=facility,
        federations=_words(summary["federations"]),
        scheduler=scheduler,
        workdir=workdir,
        datasets=_words(summary.get("datasets")),
        nodes=int(summary["nodes"]),
        hours=float(summary["hours"]),
    )


def _words(raw: Any) -> tuple[str, ...]:
    found = raw if isinstance(raw, list) else []
    return tuple(
        one for one in found[:100] if isinstance(one, str) and 0 < len(one) <= 400 and one == clean_text(one, 400)
    )


def choose_gated(
    dialog: Dialog, name: str, login: Deployment, found: GateSummary, data: str, federation: str
) -> Choice:
    """The facility as its policy has it. Raises `InputError` where the command line says otherwise."""
    log.info("%s: %s", name, LIMITS)
    if found.facility != name:
        raise InputError(
            f"{name}: the policy behind its gate calls the site {found.facility!r}: give --facility "
            f"{found.facility}={login.user + '@' if login.user else ''}{login.host}, or ask the site to change it"
        )
    if federation not in found.federations:
        known = ", ".join(found.federations) or "none"
        raise InputError(
            f"{name}: the policy behind its gate names these federations: {known}; give --name with one of them, or "
            f"ask the site to add {federation!r}"
        )
    first, *others = found.datasets or ("",)
    proposal = Proposal(value=first, why="a prepared dataset that the site's policy allows", others=tuple(others))

    def unlisted(dataset: str) -> str:
        if not found.datasets or dataset in found.datasets:
            return ""
        return (
            f"{dataset} is no dataset of the policy behind its gate, and text is prepared by the site itself: "
            f"give --data {name}=PATH with one of {', '.join(found.datasets)}"
        )

    if reason := unlisted(data) if data else "":
        raise InputError(f"{name}: {reason}")
    dataset = data or dialog.ask(f"{name}.data", proposal, refuse=unlisted)
    return Choice(
        name=name,
        login=login,
        data=dataset,
        prepared=True,
        dataset=dataset,
        workdir=found.workdir,
        scheduler=found.scheduler,
        gated=True,
        why={"type": "by the policy behind its gate", "workdir": "by the policy behind its gate"},
    )


def blocks_behind(facility: Facility) -> int:
    """Training blocks of the facility's dataset, from the probe that its gate runs. Raises `InputError`."""
    answer = gate.probe_by_gate(facility.deployment, facility.dataset, 0)
    if isinstance(answer, Row) or answer.dataset.error:
        reason = answer.found if isinstance(answer, Row) else answer.dataset.error
        raise InputError(
            f"{facility.name}: no dataset at {facility.dataset} behind the gate: {clean_text(str(reason), 300)}; the "
            "site's own people prepare it"
        )
    return answer.dataset.blocks["train"]
