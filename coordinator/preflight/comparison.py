"""What the comparison of models after the last round will cost a facility: jobs, node-hours, bytes and disk."""

from __future__ import annotations

from coordinator.comparison.models import batches
from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, Federation
from coordinator.memory.figures import ModelFigures
from coordinator.preflight.row import Row, ok
from coordinator.preflight.scheduler import wanted_hours, wanted_nodes
from facility.exchange.messages.comparison import GLOBAL, INITIAL, LAST_OF
from facility.exchange.sizes import format_bytes
from facility.exchange.text import number_of


def check_comparison(
    federation: Federation, facility: Facility, deployment: Deployment, model: ModelFigures | None, template: str
) -> Row | None:
    """None where no models are compared."""
    wanted = federation.evaluation.comparison(masked=bool(federation.masks))
    if wanted is None:
        return None
    each = 1 + wanted.alone
    others = each * len(federation.facilities) if wanted.updates else 0
    always = [GLOBAL, *([INITIAL] if wanted.matrix else []), *([LAST_OF] if wanted.last_models else [])]
    sent = batches([*always, *map(str, range(others))], wanted.models_per_job)
    alone = federation.rounds if wanted.alone else 0
    jobs = alone + len(sent)
    parts = [f"{len(sent)} of {number_of(others + len(always), 'model')}"] + (
        [f"{alone} of training alone"] if alone else []
    )
    found = f"{number_of(jobs, 'more job')} after the last round ({' and '.join(parts)})"
    nodes, _ = wanted_nodes(deployment, template)
    if hours := wanted_hours(deployment, template):
        found += f", at most {jobs * nodes * hours:g} node-hours if each runs to its limit of {hours:g} h"
    if wanted.matrix and not wanted.updates:
        found += f"; it evaluates {each} of its own as well, which are sent to no other facility"
    if alone:
        found += "; a job alone takes as long as a round's"
    if model is not None:
        adapters = facility.training.lora.rank and facility.training.lora.base
        if not adapters:
            many, most = sum(map(len, sent)) + bool(alone), max(map(len, sent))
            found += (
                f"; {format_bytes(many * model.bytes)} sent there, {format_bytes(most * model.bytes)} of disk at once"
            )
    return ok(facility.name, "comparison", found)
