"""Checks of a facility behind a gate: by requests to it, since there is no shell."""

from __future__ import annotations

import shlex

from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, Federation
from coordinator.engine.render import facility_settings
from coordinator.preflight.ahead import check_ahead
from coordinator.preflight.cost import describe_further_jobs, describe_jobs, jobs_of, measure_link
from coordinator.preflight.gate_answer import GateSummary, summary_or_none
from coordinator.preflight.probe_answer import PROBE_SECONDS, ProbeAnswer, answer_or_row
from coordinator.preflight.remote import (
    Answer,
    answer_of,
    answer_seconds,
    other_way,
    ssh_command,
    unknown_to_a_run,
)
from coordinator.preflight.row import Row, fail, ok, warning
from coordinator.preflight.ssh_errors import explain_ssh_failure
from facility.exchange.exit_codes import BROKE
from facility.exchange.gate_requests import GATE
from facility.exchange.messages.strict_json import clean_text


def send_to_gate(deployment: Deployment, *words: str, seconds: float = 60, data: bytes = b"") -> Answer:
    """Send one request to the gate."""
    line = [*ssh_command(deployment), shlex.join([GATE, *words])]
    return answer_of(line, data=data, seconds=seconds)


def check_gate(federation: Federation, facility: Facility, *, link: bool) -> list[Row]:
    """Rows on the gate, its policy, the queue behind it and the link."""
    name, deployment = facility.name, facility.deployment
    if (row := other_way(name, deployment)) is not None:
        return [row]
    answer = send_to_gate(deployment, "hello", seconds=answer_seconds(deployment))
    summary = summary_or_none(answer.out)
    if summary is None:
        if answer.code == BROKE:
            line = ssh_command(deployment)
            return [
                explain_ssh_failure(
                    name, deployment, command=line, code=answer.code, out=answer.out, error=answer.error
                )
            ]
        said = clean_text(answer.error or answer.out, 300)
        return [
            fail(name, "gate", f"no gate answers: {said}", "ask the site: is its policy.yml sound, is our key in it?")
        ]
    if (row := unknown_to_a_run(name, deployment, shlex.join([GATE, "hello"]))) is not None:
        return [row]
    rows = [ok(name, "gate", f"{deployment.host} lets our key through its gate")]
    agreed = _agreed(federation, facility, summary)
    rows += agreed
    if not any(row.verdict == "fail" for row in agreed):
        rows.append(_allowed(federation, facility, summary))
    if deployment.type != "ssh":
        rows.append(_queue(name, deployment))
        hours = jobs_of(federation) * summary.nodes * summary.hours
        found = (
            f"at most {hours:g} ({describe_jobs(federation)}, by the site's policy){describe_further_jobs(federation)}"
        )
        rows.append(ok(name, "node-hours", found))
        rows += _ahead(federation, facility, summary)
    return [*rows, _link(name, deployment)] if link else rows


def _ahead(federation: Federation, facility: Facility, summary: GateSummary) -> list[Row]:
    """What the policy says of jobs that are submitted ahead."""
    row = check_ahead(federation, facility, summary.hours, gate_seconds=summary.ahead_seconds)
    return [row] if row is not None else []


def _agreed(federation: Federation, facility: Facility, summary: GateSummary) -> list[Row]:
    """The policy's names and places against federation.yml's."""
    name, deployment, rows = facility.name, facility.deployment, []
    both = {
        "facility": (summary.facility, name),
        "scheduler": (summary.scheduler, deployment.type),
        "workdir": (summary.workdir, deployment.workdir),
    }
    for key, (theirs, ours) in both.items():
        if theirs != ours:
            rows.append(
                fail(name, "policy", f"the site's policy has {key} {theirs!r}, federation.yml {ours!r}", "agree on one")
            )
    if federation.name not in summary.federations:
        rows.append(
            fail(name, "policy", f"the site's policy does not name {federation.name!r}", "ask the site to add it")
        )
    rows += _masks_agreed(federation, name, summary)
    if not federation.sending.signing_key:
        rows.append(
            fail(
                name,
                "signature",
                "models are not signed, and a gate lets only signed ones be trained",
                "set `sending: {signing_key: ~/.ssh/id_ed25519}` and give the site its .pub",
            )
        )
    return rows


def _allowed(federation: Federation, facility: Facility, summary: GateSummary) -> Row:
    """What the gate says of the facility's settings; one of an earlier version says it of the first job."""
    name, agreed = facility.name, "facility, federation, scheduler and workdir agree; models are signed"
    if summary.version < 2:
        return ok(name, "policy", agreed)
    words, text = ("test-settings", "--dataset", facility.dataset), facility_settings(federation, facility)
    answer = send_to_gate(facility.deployment, *words, seconds=PROBE_SECONDS, data=text.encode())
    if answer.code == 0:
        return ok(name, "policy", f"{agreed}; the policy allows what the settings ask for")
    said = clean_text((answer.error or answer.out).strip(), 300) or f"code {answer.code}"
    return fail(name, "policy", said, "change federation.yml, or ask the site to change policy.yml")


def _masks_agreed(federation: Federation, name: str, summary: GateSummary) -> list[Row]:
    """What the policy says of secure aggregation, where federation.yml asks for it."""
    privacy = federation.masks
    if privacy is None:
        return []
    if not summary.masks:
        problem = "the site's policy names no peer_signers, and without them its gate masks nothing"
        return [fail(name, "policy", problem, "ask the site to set peer_signers in policy.yml")]
    least, ours = summary.minimum_sum, privacy.least_sum_of(len(federation.facilities))
    if least is not None and least > len(federation.facilities):
        problem = (
            f"the site helps to unmask sums of {least} updates or more, of {len(federation.facilities)} facilities"
        )
        return [fail(name, "policy", problem, "ask the site to lower minimum_sum in policy.yml")]
    if least is not None and least > ours:
        problem = f"the site helps to unmask sums of {least} updates or more, privacy.minimum_sum is {ours}"
        return [
            warning(name, "policy", problem, f"set privacy: {{minimum_sum: {least}}}, so that no sum is tried in vain")
        ]
    return []


def _queue(name: str, deployment: Deployment) -> Row:
    answer = send_to_gate(deployment, "test-job")
    said = clean_text((answer.out or answer.error).strip(), 300)
    if answer.code == 0:
        return ok(name, "job accepted", said or "the site's queue takes its template")
    return fail(name, "job accepted", f"the site's own template is refused: {said}", "tell the site")


def _link(name: str, deployment: Deployment) -> Row:
    found = measure_link(
        name,
        lambda data, seconds: send_to_gate(deployment, "sink", seconds=seconds, data=data),
        advice="look at the link",
    )
    return found if isinstance(found, Row) else ok(name, "link", found.words)


def probe_by_gate(deployment: Deployment, dataset: str, reserve: int) -> ProbeAnswer | Row:
    """What the facility's own probe says, run by its gate; or a row that gives the reason for its absence."""
    answer = send_to_gate(deployment, "probe", "--dataset", dataset, "--reserve", str(reserve), seconds=PROBE_SECONDS)
    if answer.code or not answer.out.strip():
        said = clean_text(answer.error or f"code {answer.code}", 300)
        return fail("", "environment", f"the gate runs no probe: {said}", "tell the site")
    return answer_or_row(answer.out)
