"""This process's place among a job's nodes and ranks: one pure function over the environment.

Nothing is asked of a scheduler and nothing is sent: with one task a rank, all numbers stand in the environment; with
one task a node, the ranks per node must be known too, from the scheduler, from `--ranks`, or reported by each node in a
small file (`facility.launching.notes`) where nodes differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.launching.hostlist import expand_counts, expand_hosts
from facility.launching.tables import (
    ALLOCATIONS,
    HOSTS,
    PBSDSH,
    RANKS_PER_NODE,
    START,
    TASKS,
    TORCHRUN,
    AllocationTable,
    TaskTable,
)

PORTS = (20_000, 12_000)
"""First master port and how many: below Linux's ephemeral ports (32768 and up)."""


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """What the environment says of the processes that the scheduler started."""

    scheduler: str
    """What started this task: a table's name, or `none`."""
    task: int
    tasks: int
    node: int
    """Number of this node, from 0."""
    nodes: int
    local_task: int
    """Number of this task on its node, from 0."""
    local_tasks: int
    """Tasks on this node."""
    per_rank: bool
    """True: this task is one rank. False: it represents its node and starts the node's ranks."""
    job: str
    """Identifier of the job, or empty."""
    host: str
    """The first node's name; empty when the job has one node only."""
    devices_per_node: int = 0
    """GPUs that the scheduler gave on every node; 0: it does not say."""
    devices_here: int = 0
    """GPUs that the scheduler gave on this node; 0: it does not say."""
    end_time: float = 0.0
    """When the scheduler will end the job, in seconds since 1970; 0: it does not say."""
    start_time: float = 0.0
    """When the scheduler began the job, in seconds since 1970; 0: it does not say."""

    def elapsed(self, now: float, start: float = 0.0) -> float:
        """Seconds at `now` since the scheduler began the job, or since `start`; 0 where nothing says when, and where
        this node's clock is outside of the job's time: it is off, by hours perhaps, and times nothing."""
        begin = self.start_time or start
        return now - begin if begin and begin <= now and not 0 < self.end_time <= now else 0.0

    @property
    def first(self) -> bool:
        """True if this task reports for the job."""
        return self.task == 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """The ranks that this process starts, among all."""

    tasks: Tasks
    first_rank: int
    """RANK of the first rank started here."""
    local_ranks: tuple[int, ...]
    """LOCAL_RANK of each rank started here."""
    local_world: int
    """Ranks on this node."""
    world: int
    """Ranks of the job."""
    master_address: str
    master_port: int

    def environment(self, index: int) -> dict[str, str]:
        """Environment of the `index`-th rank started here."""
        return {
            "RANK": str(self.first_rank + index),
            "LOCAL_RANK": str(self.local_ranks[index]),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.tasks.node),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def read_tasks(environ: Mapping[str, str], host_file: str | None = None) -> Tasks:
    """Read the tables. `host_file`: text of the file that the allocation's table names, where there is one.

    Raises `ConfigurationError` for numbers that contradict each other, and for a job of several nodes whose script
    started this process on one of them only.
    """
    allocation = next((a for a in ALLOCATIONS if _first(environ, a.job)), None)
    table = _table(environ)
    hosts = _hosts(environ, allocation, table, host_file)
    common: dict[str, Any] = dict(
        job=_first(environ, allocation.job) if allocation else "",
        devices_per_node=_devices(_first(environ, allocation.devices_per_node)) if allocation else 0,
        devices_here=_devices(_first(environ, allocation.devices)) if allocation else 0,
        end_time=float(_first(environ, allocation.end) or 0) if allocation else 0.0,
        start_time=float(_first(environ, allocation.start) or 0) if allocation else 0.0,
    )
    if table is None:
        nodes = len(set(hosts)) or 1
        if nodes > 1:
            name = allocation.name if allocation else HOSTS
            raise ConfigurationError(
                f"{name} gave this job {nodes} nodes ({', '.join(sorted(set(hosts))[:4])}, ...), but this process "
                f"was started on one of them only: {(allocation or AllocationTable(name=HOSTS, job=())).advice}"
            )
        name = allocation.name if allocation else "none"
        return Tasks(
            scheduler=name,
            task=0,
            tasks=1,
            node=0,
            nodes=1,
            local_task=0,
            local_tasks=1,
            per_rank=False,
            host="",
            **common,
        )
    return _of_table(environ, table, hosts, common)


def _of_table(environ: Mapping[str, str], table: TaskTable, hosts: list[str], common: dict[str, Any]) -> Tasks:
    task = _number(environ, table.task, table)
    tasks = len(hosts) if table is PBSDSH else _number(environ, table.tasks, table)
    if task is None or not tasks:
        wanted = " or ".join(table.tasks) or f"PBS_NODEFILE (or {HOSTS})"
        raise ConfigurationError(f"{table.name} does not say how many tasks there are: {wanted} is not set")
    if not 0 <= task < tasks:
        raise ConfigurationError(
            f"{table.name} calls this task {task} of {tasks}: the environment is not that of one job"
        )
    names = list(dict.fromkeys(hosts))
    node: int | None
    local_tasks: int | None
    if table is PBSDSH and len(names) < len(hosts):
        raise ConfigurationError(
            f"PBS starts {len(hosts)} tasks on {len(names)} nodes, and those of one node cannot be distinguished: ask "
            "for one chunk a node without mpiprocs (`select=NODES:ncpus=...`, `place=scatter`), as templates/pbs.sh "
            "does"
        )
    if table is PBSDSH:
        nodes, node, local_tasks, local_task = tasks, task, 1, 0
    else:
        local_tasks = _number(environ, table.local_tasks, table)
        nodes = min(_number(environ, table.nodes, table) or _count_nodes(tasks, local_tasks, names), tasks)
        counts = expand_counts(_first(environ, table.counts)) if _first(environ, table.counts) else []
        node = _number(environ, table.node, table)
        if node is None:
            node = _node_number(task, tasks, nodes, hosts)
        if local_tasks is None:
            local_tasks = counts[node] if len(counts) == nodes else -(-tasks // nodes)
        given = _number(environ, table.local_task, table)
        local_task = given if given is not None else 0 if tasks == nodes else task % local_tasks
    return Tasks(
        scheduler=table.name,
        task=task,
        tasks=tasks,
        node=node,
        nodes=nodes,
        local_task=local_task,
        local_tasks=local_tasks,
        per_rank=table is TORCHRUN or tasks > nodes,
        host=_master_host(environ, table, nodes, names),
        **common,
    )


def place_ranks(
    tasks: Tasks, environ: Mapping[str, str], *, ranks: int, counts: Sequence[int] = (), port: int = 0
) -> Place:
    """Which ranks this process starts.

    `ranks`: how many this node shall have, where the task represents its node. `counts`: ranks of every node, in order;
    needed for several nodes with one task each, unless all have `ranks`. `port`: master port; 0 derives it from the
    job.
    """
    if environ.get("MASTER_PORT") and (tasks.scheduler == TORCHRUN.name or not port):
        port = int(environ["MASTER_PORT"])
    port = port or master_port(tasks.job)
    address = environ.get("MASTER_ADDR") or (tasks.host if tasks.nodes > 1 else "127.0.0.1")
    if tasks.per_rank:
        return Place(
            tasks=tasks,
            first_rank=tasks.task,
            local_ranks=(tasks.local_task,),
            local_world=tasks.local_tasks,
            world=tasks.tasks,
            master_address=address,
            master_port=port,
        )
    if environ.get(RANKS_PER_NODE):
        counts = expand_counts(environ[RANKS_PER_NODE])
        if len(counts) < tasks.nodes:
            counts = list(counts) * tasks.nodes if len(counts) == 1 else counts
    counts = list(counts) or [ranks] * tasks.nodes
    if len(counts) < tasks.nodes or min(counts[: tasks.nodes]) < 1:
        raise ConfigurationError(
            f"ranks per node are {counts}, expected {tasks.nodes} numbers of 1 or more (one for each node of the job)"
        )
    counts = counts[: tasks.nodes]
    here = counts[tasks.node]
    return Place(
        tasks=tasks,
        first_rank=sum(counts[: tasks.node]),
        local_ranks=tuple(range(here)),
        local_world=here,
        world=sum(counts),
        master_address=address,
        master_port=port,
    )


def master_port(job: str) -> int:
    """A port that jobs running side by side do not share: their numbers are close, so they differ modulo 12000.

    Schedulers number jobs one after the other; for identifiers without a number (Flux) the hash decides.
    """
    first, count = PORTS
    found = re.match(r"(\d+)(?:\[(\d+)\])?", job)
    if found:  # 1234.server, 1234[7].server
        return first + (int(found.group(1)) + 37 * int(found.group(2) or 0)) % count
    return first + int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big") % count


def attempt_of(environ: Mapping[str, str]) -> str:
    """Which start of the job, and which of several within it, this is; the same for all of its tasks."""
    table = _table(environ)
    named = (START, *(table.start if table else ()))
    step = [name for a in ALLOCATIONS for name in a.step if not (table and table.daemons_in_step)]
    return f"{environ.get('SLURM_RESTART_COUNT', '0')}-{_first(environ, (*named, *step)) or '0'}"


def _table(environ: Mapping[str, str]) -> TaskTable | None:
    return next((t for t in TASKS if all(environ.get(name) for name in t.marks)), None)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _number(environ: Mapping[str, str], names: tuple[str, ...], table: TaskTable) -> int | None:
    value = _first(environ, names)
    if not value:
        return None
    if not re.fullmatch(r"\d+", value.strip()):
        raise ConfigurationError(f"{table.name}: {' or '.join(names)} is {value!r}, expected a number")
    return int(value)


def _devices(value: str) -> int:
    """GPUs in `4`, `a100:4`, `gpu:a100:4`, `a100:2,v100:2`; 0 when nothing is said."""
    return sum(int(found) for found in re.findall(r"(?:^|[:,])(\d+)(?=,|$|\()", value))


def _hosts(
    environ: Mapping[str, str], allocation: AllocationTable | None, table: TaskTable | None, host_file: str | None
) -> list[str]:
    """The job's hosts in order, repeated as often as the host file repeats them."""
    if environ.get(HOSTS):
        return expand_hosts(environ[HOSTS])
    step = allocation.step_hosts if allocation and not (table and table.daemons_in_step) else ()
    if allocation and (found := _first(environ, (*step, *allocation.hosts))):
        return expand_hosts(found)
    return [line.split()[0] for line in (host_file or "").splitlines() if line.strip()]


def _count_nodes(tasks: int, local_tasks: int | None, names: list[str]) -> int:
    if local_tasks == tasks:
        return 1
    if names:
        return len(names)
    return -(-tasks // local_tasks) if local_tasks else tasks


def _node_number(task: int, tasks: int, nodes: int, hosts: list[str]) -> int:
    """Node of a task where only its number is known: launchers fill one node after the other."""
    if tasks == nodes or nodes == 1:
        return task if tasks == nodes else 0
    if len(hosts) == tasks:
        return list(dict.fromkeys(hosts)).index(hosts[task])
    return task // -(-tasks // nodes)


def _master_host(environ: Mapping[str, str], table: TaskTable, nodes: int, names: list[str]) -> str:
    if nodes == 1:
        return ""
    host = environ.get("MASTER_ADDR") or (names[0] if names else "")
    if not host:
        raise ConfigurationError(
            f"{table.name} started tasks on {nodes} nodes, but nothing names the nodes: set {HOSTS} (a host list) or "
            "MASTER_ADDR in the job's template"
        )
    return host
