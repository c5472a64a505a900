"""Start the ranks of this node, without torchrun, as the scheduler's environment says.

    python -m facility.launch [--ranks N] -- -m facility.train --model DIR ...

Slurm, PBS, Flux, Open MPI, PMI and torchrun are understood, one task a node or one task a rank; without any of them the
ranks of one machine are started. What follows `--` are Python's own arguments. Every rank gets RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS. When one rank fails, the others are ended
within the grace period and the first failure is shown; the exit code is that rank's.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from facility.exchange.errors import ConfigurationError, TransientError, exit_on_error
from facility.exchange.logs import add_log_options
from facility.exchange.text import number_of
from facility.launching.compiled import place_of_compiled
from facility.launching.devices import Devices, clean_environment, detect_devices
from facility.launching.notes import Notes
from facility.launching.place import Place, Tasks, attempt_of, master_port, place_ranks, read_tasks
from facility.launching.rendezvous import DIRECTORY, private_directory
from facility.launching.supervise import TRANSIENT, Ending, Limits, supervise_ranks
from facility.launching.tables import ALLOCATIONS, RANKS_PER_NODE, TORCHRUN

log = logging.getLogger("facility.launch")

MEETING_SECONDS = 600.0
"""How long nodes wait for each other."""
FOR_EVER = 1e9
"""Seconds; the scheduler's own limit ends the job."""
MOST_RANKS = 256
"""Of a node with fewer cores: settings come from another institution, and their processes fill its memory."""


def tasks_here() -> Tasks:
    """This process's place among the job's tasks. Raises `ConfigurationError`."""
    file = next((os.environ[name] for one in ALLOCATIONS for name in one.host_file if os.environ.get(name)), None)
    text = Path(file).read_text(encoding="utf-8") if file and Path(file).is_file() else None
    return read_tasks(os.environ, text)


def launch_ranks(
    arguments: Sequence[str],
    *,
    tasks: Tasks,
    ranks: int = 0,
    use_devices: bool = True,
    limits: Limits,
    notes: Notes,
) -> Ending:
    """Start this task's ranks of `python ARGUMENTS` and wait for their end.

    `ranks`: processes on this node where no scheduler says otherwise; 0: one for each GPU, or one. With `use_devices`,
    GPUs that a scheduler gave are one rank each. `notes`: a directory that all nodes of the job see.
    """
    devices = detect_devices(os.environ)
    wanted, why = wanted_ranks(tasks, devices, ranks, use_devices)
    counts: list[int] = []
    if tasks.nodes > 1 and not tasks.per_rank and RANKS_PER_NODE not in os.environ and not tasks.devices_per_node:
        counts = notes.gather(tasks.tasks, tasks.task, wanted, MEETING_SECONDS)
    alone = tasks.tasks == 1
    where = place_ranks(tasks, os.environ, ranks=wanted, counts=counts, port=_free_port(tasks) if alone else 0)
    if tasks.first and not alone and tasks.scheduler != TORCHRUN.name:
        _refuse_taken(where)
    changes, cleaning = clean_environment(os.environ, devices.kind)
    _say(where, f"{why}; {devices.reason}" + (f"; {cleaning}" if cleaning else ""))
    environments = [_environment(where, index, changes) for index in range(len(where.local_ranks))]
    several = tasks.tasks > 1 and tasks.scheduler != TORCHRUN.name

    def elsewhere() -> str:
        others = [note for note in notes.failures() if note.get("task") != tasks.task]
        return f"another node failed first: {others[0].get('reason')}" if others else ""

    with private_directory(tasks, notes, MEETING_SECONDS) as meeting, place_of_compiled(os.environ) as compiled:
        ending = supervise_ranks(
            [sys.executable, *arguments],
            [environment | meeting | compiled for environment in environments],
            limits=limits,
            elsewhere=elsewhere if several else None,
            directory=Path(meeting[DIRECTORY]) if DIRECTORY in meeting else None,
        )
    if several:
        if not ending.missed:
            ending = word_of_others(ending, tasks, notes, limits)
        outcome = asdict(ending) | {"task": tasks.task, "node": tasks.node}
        notes.write(f"{'failed' if ending.code else 'finished'}-{tasks.task}", outcome)
    return ending


def word_of_others(ending: Ending, tasks: Tasks, notes: Notes, limits: Limits) -> Ending:
    """How the round ended: this task's replicas are lost, and those of other tasks may finish without them."""

    notes.write(f"lost-{tasks.task}", ending.reason)
    others = [number for number in range(tasks.tasks) if number != tasks.task]

    def ending_of_others() -> Ending | None:
        found = notes.read_all([f"{end}-{number}" for end in ("finished", "lost") for number in others])
        if any(note is not None for note in found[: len(others)]):
            return Ending(code=0, reason="")
        nobody = all(note is not None for note in found[len(others) :])
        return ending if nobody or notes.failures() else None

    try:
        return notes.wait(ending_of_others, limits.total or FOR_EVER, "the other tasks said nothing of their end")
    except TransientError:
        return ending


def wanted_ranks(tasks: Tasks, devices: Devices, ranks: int, use_devices: bool) -> tuple[int, str]:
    """Ranks for this node, and why. Raises `ConfigurationError` for more than `MOST_RANKS` and its cores allow."""
    if tasks.per_rank:
        return 1, f"{tasks.scheduler} starts one task a rank"
    if use_devices and tasks.job and (granted := tasks.devices_per_node or tasks.devices_here):
        return granted, f"{tasks.scheduler} gave this node {number_of(granted, 'GPU')}: one rank each"
    if use_devices and devices.count and (tasks.job or not ranks):
        return devices.count, f"one rank for each of {number_of(devices.count, 'GPU')}"
    if ranks > (most := max(MOST_RANKS, os.cpu_count() or 1)):
        raise ConfigurationError(f"{str(ranks):.20} ranks are asked for on this node, expected at most {most}")
    return max(
        1, ranks
    ), f"{number_of(max(1, ranks), 'rank')} a node as the settings say" if ranks else "one rank: no GPU, no --ranks"


def _environment(where: Place, index: int, changes: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in (os.environ | dict(changes)).items() if name not in changes or value}
    cores = len(os.sched_getaffinity(0)) // (
        1 if where.tasks.per_rank and where.tasks.local_tasks > 1 else where.local_world
    )
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # torch asks the name server who every peer of its store is, for a log line; on a compute node that reaches no name
    # server each connection would take ten seconds and more.
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    return environment | (where.environment(index) if where.tasks.scheduler != TORCHRUN.name else {})


def _free_port(tasks: Tasks) -> int:
    """A port that is free now, starting from the job's own: all ranks are on this machine."""
    first = master_port(tasks.job or str(os.getpid()))
    for port in range(first, first + 200):
        if not _taken("127.0.0.1", port):
            return port
    raise TransientError(f"ports {first} to {first + 199} are all taken on {socket.gethostname()}")


def _refuse_taken(where: Place) -> None:
    if _taken("", where.master_port):
        raise TransientError(
            f"port {where.master_port} on {socket.gethostname()} is taken, so the ranks cannot meet there; set "
            "MASTER_PORT in the job's template, or submit again (the port follows from the job's number)"
        )


def _taken(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _say(where: Place, why: str) -> None:
    tasks = where.tasks
    numbers = f"{where.first_rank}" + (
        f"-{where.first_rank + len(where.local_ranks) - 1}" if len(where.local_ranks) > 1 else ""
    )
    log.info(
        "%s, node %d of %d, ranks %s of %d, meeting at %s:%d (%s)",
        tasks.scheduler,
        tasks.node,
        tasks.nodes,
        numbers,
        where.world,
        where.master_address,
        where.master_port,
        why,
    )


def show_failure(ending: Ending) -> None:
    """The first failing rank's last lines, once, after everything else; and whether to come back."""
    if ending.code:
        again = "; the same command, run again, goes on from the last checkpoint" if ending.code == TRANSIENT else ""
        log.error("%s%s; its last lines were:\n%s", ending.reason, again, ending.tail)


def limits_from(arguments: argparse.Namespace, tasks: Tasks) -> Limits:
    """The time limit given, or what the scheduler leaves, less the time to end cleanly."""
    total = arguments.time_limit
    if not total and tasks.end_time:
        now = time.time()
        left = tasks.end_time - (tasks.start_time + tasks.elapsed(now) if tasks.start_time else now)
        total = max(1.0, left - 2 * arguments.grace)
    return Limits(grace=arguments.grace, save=arguments.save, total=total, silence=arguments.silence)


def add_limits(parser: argparse.ArgumentParser, *, silence: float) -> None:
    """Options shared with `facility.round`."""
    add = parser.add_argument
    add(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="from the first failure to SIGKILL of the other ranks (default 10)",
    )
    add(
        "--save", type=float, default=120.0, metavar="SECONDS", help="from a SIGTERM passed on to SIGKILL (default 120)"
    )
    add(
        "--time-limit",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="end the ranks after so long (default: the scheduler's own limit, if known)",
    )
    add(
        "--silence",
        type=float,
        default=silence,
        metavar="SECONDS",
        help=f"end the ranks as hung after so long without output, 0: never (default {silence:.0f})",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m facility.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m facility.launch [options] -- -m MODULE [argument ...]",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        metavar="N",
        help="ranks on this node where no scheduler says (default: one for each GPU, or one)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="do not count GPUs: --ranks processes also where there are some"
    )
    parser.add_argument(
        "--shared",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="directory that all nodes of the job see (default: the working directory)",
    )
    add_limits(parser, silence=0.0)
    parser.add_argument("arguments", nargs="+", metavar="argument", help="arguments for Python, after --")
    add_log_options(parser)
    arguments = parser.parse_args()
    if Path(first := arguments.arguments[0]).name.startswith("python"):
        parser.error(f"found {first!r} after --, expected Python's own arguments, such as -- -m facility.train")
    tasks = tasks_here()
    notes = Notes(arguments.shared, tasks.job, attempt_of(os.environ))
    ending = launch_ranks(
        arguments.arguments,
        tasks=tasks,
        ranks=arguments.ranks,
        use_devices=not arguments.cpu,
        limits=limits_from(arguments, tasks),
        notes=notes,
    )
    show_failure(ending)
    return ending.code


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
