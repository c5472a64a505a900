"""Jobs of facilities that have left federation.yml, after a run that was killed: nothing would look for them any more.

Their queues stand in what was rendered before, and nowhere else.
"""

from __future__ import annotations

import yaml
from rich.console import Console

from coordinator.archive.summary import shown
from coordinator.config.federation import Federation
from coordinator.engine.queues import Queue, at_all, read_queues
from facility.exchange.job_names import job_name


def cancel_left(federation: Federation, console: Console) -> None:
    """Cancel them, before federation.yml is rendered anew; a facility that does not answer holds nothing up."""
    queues = queues_left(federation)
    found = at_all(queues, lambda one: one.cancel())
    for name, jobs in sorted(found.jobs.items()):
        for job in jobs:
            said = f"cancelled job {job.id} ({job.state}) at {name}, which has left the federation"
            console.print(shown(said), markup=False, highlight=False)
    for sentence in found.silent:
        said = f"{sentence}; it has left the federation, and jobs of it may be left in its queue"
        console.print(shown(said), markup=False, highlight=False)


def queues_left(federation: Federation) -> list[Queue]:
    """Queues that the last rendering names, of facilities of this federation that federation.yml no longer does."""
    staying = {facility.name for facility in federation.facilities}
    try:
        before = read_queues(federation.file.parent / "streamflow.yml")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return []  # there was no run, or the file is no longer what was rendered
    return [
        one for one in before if one.facility not in staying and one.job_name == job_name(federation.name, one.facility)
    ]
