"""`crossfed check --submit`: a job of one second, where the scheduler cannot test one without taking it.

The job is the facility's own template with `sleep 1` in place of the training. It is waited for for a minute; one that
still waits then is cancelled, and has shown that the queue takes it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

from coordinator.config.deployments import Deployment
from coordinator.preflight.remote import Answer, run_there
from coordinator.preflight.row import Row, fail, ok, warning
from coordinator.schedulers.scheduler import FORGOTTEN, BatchScheduler
from facility.exchange.messages.strict_json import clean_text

SECONDS = 60.0
LOOK_SECONDS = 2.0
CHECK, OUTPUT = "submitted job", "crossfed-check.log"


def try_job(
    name: str,
    deployment: Deployment,
    queue: BatchScheduler,
    job: str,
    ask: Callable[[str], Answer] | None = None,
    seconds: float = SECONDS,
) -> Row:
    """Submit `job`, a filled template, and watch it. `ask`: runs a shell line at the facility."""
    ask = ask or (lambda line: run_there(deployment, f"{line}\n"))
    place = shlex.quote(deployment.workdir or ".")
    submit = queue.submission(f"crossfed-check-{name}", OUTPUT)
    answer = ask(f"mkdir -p {place} && cd {place} && {submit} <<'CROSSFED_JOB' 2>&1\n{job}\nCROSSFED_JOB")
    if answer.code != 0 or not (id := queue.read_id(answer.out)):
        said = clean_text("; ".join((answer.out + answer.error).split("\n")[-6:]).strip("; "), 300)
        return fail(name, CHECK, f"{queue.title} refuses it: {said}", "correct the template; the words are the site's")
    deadline = time.monotonic() + seconds
    while True:
        states = _states(queue, id, ask)
        if queue.ended(states, [id]):
            return _judged(name, queue, id, ask)
        if time.monotonic() >= deadline:
            ask(queue.line(queue.cancel_ids([id])))
            state = states.get(id, "without an answer")
            return ok(name, CHECK, f"taken as job {id}, {state.lower()} after {seconds:g} s; cancelled")
        time.sleep(min(LOOK_SECONDS, seconds))


def _states(queue: BatchScheduler, id: str, ask: Callable[[str], Answer]) -> dict[str, str]:
    answer = ask(queue.line(queue.query([id])))
    return queue.read_states(answer.out, answer.code, [id])


def _judged(name: str, queue: BatchScheduler, id: str, ask: Callable[[str], Answer]) -> Row:
    """How the job ended."""
    answer = ask(queue.line(queue.query_ending(id)))
    ending = queue.read_ending(answer.out, answer.code, id)
    if ending is not None and ending.code == 0:
        return ok(name, CHECK, f"job {id} ran and ended well")
    if ending is None or ending.state == FORGOTTEN:
        found = f"job {id} was taken; how it ended {queue.title} does not say"
        return warning(name, CHECK, found, f"look at {OUTPUT} in the work directory")
    found = f"job {id} ended with {clean_text(ending.detail or ending.state, 200)}"
    return fail(name, CHECK, found, f"look at {OUTPUT} in the work directory: does the template load its modules?")
