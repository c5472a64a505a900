"""What a facility's rounds will cost: GPU memory, bytes and seconds on the link, node-hours."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, Federation
from coordinator.config.settings import SendingSettings
from coordinator.memory.figures import EVERYTHING, ModelFigures
from coordinator.memory.need import needed_by_plan, needed_bytes, smallest_ranks
from coordinator.preflight.remote import Answer, run_there
from coordinator.preflight.row import Row, fail, ok, skipped, warning
from coordinator.preflight.scheduler import wanted_hours, wanted_nodes
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.plan import Plan
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.sizes import format_bytes
from facility.exchange.text import number_of

PROBE_BYTES = 16_000_000
LOGINS_DIFFER = 0.1
"""Two logins may differ by this share of one: a transfer that took less than that was not measured beside them."""


def check_memory(
    facility: Facility,
    deployment: Deployment,
    model: ModelFigures,
    block_tokens: int,
    template: str,
    plan: Plan | None = None,
    *,
    private: bool = False,
) -> Row:
    """A row on whether the training fits, and on how many GPUs. `plan`: the facility's, where it can be read here;
    `private`: with differential privacy."""
    nodes, gpus = wanted_nodes(deployment, template)
    ranks = nodes * gpus or facility.training.ranks
    training = facility.training
    device = "cuda" if gpus or deployment.gpu_memory_gb or training.device == "cuda" else "cpu"
    try:
        if plan is not None:
            need = int(max(needed_by_plan(model, training, plan, block_tokens, device=device).values()))
        else:
            need = needed_bytes(model, training, block_tokens, ranks, device=device, local_ranks=gpus, private=private)
    except ConfigurationError as error:
        return fail(facility.name, "memory", str(error), "change training.layout, or the ranks that the job starts")
    sharding = arrangement(training, ranks, planned=plan is not None)
    if not deployment.gpu_memory_gb:
        return ok(
            facility.name,
            "memory",
            f"about {format_bytes(need)} on each rank, {sharding}, beside interpreter and libraries, which take half a "
            "GB or more of the node's memory (set gpu_memory_gb to have it compared)",
        )
    memory = deployment.gpu_memory_gb * 1e9
    least = smallest_ranks(
        model, training, block_tokens, memory * 0.95, device=device, local_ranks=gpus, private=private
    )
    if need > memory * 0.95:
        fix = (
            f"ask for at least {number_of(least, 'GPU')}"
            if least
            else "lower micro_batch_sequences or prepare shorter blocks"
        )
        return fail(
            facility.name,
            "memory",
            f"about {format_bytes(need)} are needed on each GPU, {sharding}, each has {format_bytes(memory)}",
            f"{fix}, or compute in bfloat16, or with a smaller micro_batch_sequences",
        )
    return ok(
        facility.name,
        "memory",
        f"about {format_bytes(need)} of {format_bytes(memory)} on each GPU, {sharding}; {least} would do",
    )


def arrangement(training: TrainingSettings, ranks: int, *, planned: bool) -> str:
    """How the model lies over the ranks, in words."""
    layout = training.layout
    if planned:
        return "as its plan says"
    if ranks == 1:
        return "on one rank"
    if layout.stages > 1:
        return f"over {ranks} ranks, {layout.stages} stages"
    return f"a replica on each of {ranks} ranks" if layout.sharding == "NO_SHARD" else f"sharded over {ranks} ranks"


def check_link(
    facility: Facility,
    deployment: Deployment,
    model: ModelFigures,
    sending: SendingSettings,
    *,
    federated: Patterns = EVERYTHING,
    masked_bits: int = 0,
    changed: int | None = None,
) -> Row:
    """Send a little over ssh and scale it to a round's models, of which updates hold what is `federated`.

    `masked_bits`: of a value under masks, under which second moments come back as well; 0: updates are not masked.
    `changed`: values of a model that a round changes; None: those that this facility trains.
    """
    training = facility.training
    changed = model.changed(training, federated=federated) if changed is None else changed
    there = model.travelling(model.received(training), sending.encoding, sending.sparse_density, changed)
    walk, moments = model.mean_walk(training), model.moments(training)
    there += walk + moments
    back = model.sent_back(training, federated, masked_bits=masked_bits)
    named = ((walk, "the mean walk"), (moments, "moments"))
    parts = ", ".join(f"{format_bytes(amount)} of it {what}" for amount, what in named if amount)
    sent = f"{format_bytes(there)} there{f' ({parts})' if parts else ''}"
    if not deployment.host:
        return ok(facility.name, "link", f"{sent} and {format_bytes(back)} back a round, on this machine")
    found = measure_link(
        facility.name,
        lambda data, seconds: run_there(deployment, "cat >/dev/null", seconds=seconds, data=data),
        advice="look at the link; a separate data host can be named by `transfer:`",
    )
    if isinstance(found, Row):
        return found
    took = f"{'at most' if found.least else 'about'} {(there + back) / found.bytes_per_second:,.0f} s"
    return ok(facility.name, "link", f"{sent} and {format_bytes(back)} back a round: {took} at {found.words}")


class LinkSpeed(NamedTuple):
    """How fast one stream is."""

    bytes_per_second: float
    words: str
    least: bool
    """It is faster: a login takes so long that the transfer could not be measured beside it."""


def measure_link(name: str, send: Callable[[bytes, float], Answer], *, advice: str) -> LinkSpeed | Row:
    """Time a login alone and one that takes `PROBE_BYTES`; the row of the facility `name` where that fails.

    `send(data, seconds)`: have the facility read `data` within so many seconds. `advice`: where it takes longer.
    """
    began = time.monotonic()
    if send(b"", 60).code != 0:
        return skipped(name, "link", "could not be measured")
    login = time.monotonic() - began
    began = time.monotonic()
    if send(os.urandom(PROBE_BYTES), 120).code != 0:
        return warning(name, "link", f"{format_bytes(PROBE_BYTES)} did not get through in 120 s", advice)
    return link_speed(login, time.monotonic() - began)


def link_speed(login: float, transfer: float) -> LinkSpeed:
    """Of the seconds of a login alone and of one that took `PROBE_BYTES`; a lower bound where both took nearly the
    same."""
    seconds, shortest = transfer - login, max(LOGINS_DIFFER * login, 0.01)
    if seconds >= shortest:
        return LinkSpeed(PROBE_BYTES / seconds, f"{format_bytes(PROBE_BYTES / seconds)}/s (one stream)", least=False)
    why = f"a login takes {login:.1f} s, which hides more"
    told = f"at least {format_bytes(PROBE_BYTES / shortest)}/s (one stream; {why})"
    return LinkSpeed(PROBE_BYTES / shortest, told, least=True)


def check_hours(federation: Federation, facility: Facility, deployment: Deployment, template: str) -> Row:
    """The most node-hours that can be charged where no job comes back: every job runs to its limit."""
    nodes, gpus = wanted_nodes(deployment, template)
    hours = wanted_hours(deployment, template)
    if not hours:
        return warning(
            facility.name,
            "node-hours",
            "neither the template nor `options:` sets a time limit",
            "set one: a hung job would run until the queue's own limit",
        )
    limit = re.sub(r"\.0+$", "", f"{jobs_of(federation) * nodes * hours:.1f}")
    with_gpus = f" with {number_of(gpus, 'GPU')}" if gpus else ""
    each = f"{number_of(nodes, 'node')}{with_gpus}, {hours:g} h each"
    return ok(
        facility.name,
        "node-hours",
        f"at most {limit} ({describe_jobs(federation)} of {each}){describe_further_jobs(federation)}",
    )


def jobs_of(federation: Federation) -> int:
    """Jobs of one facility that runs each round once, without those of the comparison of models."""
    return federation.rounds + federation.final_evaluation


def describe_jobs(federation: Federation) -> str:
    """Rounds and final evaluation, whose jobs a facility runs, in words."""
    final = " and the final evaluation" if federation.final_evaluation else ""
    return f"{number_of(federation.rounds, 'round')}{final}"


def describe_further_jobs(federation: Federation) -> str:
    """What makes more jobs of these."""
    repeated = ["run out of time and come back"] if federation.come_backs else []
    repeated += ["fail and are repeated"] if federation.retries else []
    repeated += ["are submitted ahead and end without their model"] if federation.ahead else []
    return f"; more where jobs {' or '.join(repeated)}" if repeated else ""
