"""A site behind a gate: the gate's summary of the site's policy replaces the survey."""

from __future__ import annotations

import logging

from coordinator.config.deployments import GATED, WORKDIR, Deployment
from coordinator.config.federation import Facility
from coordinator.preflight import gate
from coordinator.preflight.gate_answer import GateSummary, summary_or_none
from coordinator.preflight.row import Row
from coordinator.quickstart.choice import Choice
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.propose import Proposal
from facility.exchange.errors import InputError
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.text import NAME

log = logging.getLogger(__name__)

LIMITS = (
    "behind a gate: its own people run facility/setup.sh --gate, prepare the data with our tokenizer and choose the "
    "job template; nothing is installed or prepared from here"
)
"""What cannot go through a gate by its nature: its key opens requests, and none of them runs a command of ours."""


def ask_gate(login: Deployment) -> GateSummary | None:
    """The gate's summary; None if nothing answers, or what answers is not a gate."""
    found = summary_or_none(gate.send_to_gate(login, "hello").out)
    if found is None or not (NAME.fullmatch(found.facility) and WORKDIR.fullmatch(found.workdir)):
        return None
    return found if found.scheduler in GATED else None


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
            f"{dataset} is not a dataset of the policy behind its gate, and text is prepared by the site itself: "
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
