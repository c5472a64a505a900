"""Who is who: every scheduler's environment, and laws over whole jobs of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facility import launch
from facility.exchange.errors import ConfigurationError
from facility.launching.hostlist import expand_counts, expand_hosts
from facility.launching.place import Place, attempt_of, master_port, place_ranks, read_tasks
from tests.schedulers.recordings import recorded

Environment = dict[str, str]
Builder = Callable[[list[int], int, int], tuple[Environment, str | None]]
"""(ranks a node, node, rank on the node) -> the environment of that task, one task a rank, and the host file's text."""


def hosts(counts: list[int]) -> list[str]:
    return [f"node{number:03d}" for number in range(len(counts))]


def slurm(counts: list[int], node: int, local: int) -> tuple[Environment, str | None]:
    return {
        "SLURM_JOB_ID": "41",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(sum(counts[:node]) + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_NTASKS": "99",
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_JOB_NODELIST": f"node[000-{len(counts) - 1:03d}]",
    }, None


def pbs_open_mpi(counts: list[int], node: int, local: int) -> tuple[Environment, str | None]:
    return {
        "PBS_JOBID": "41.server",
        "OMPI_COMM_WORLD_RANK": str(sum(counts[:node]) + local),
        "OMPI_COMM_WORLD_SIZE": str(sum(counts)),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(counts[node]),
    }, "\n".join(name for name, count in zip(hosts(counts), counts, strict=True) for _ in range(count))


def slurm_open_mpi(counts: list[int], node: int, local: int) -> tuple[Environment, str | None]:
    """mpirun in a batch script: its daemons on the other nodes are a step, whose variables their tasks inherit."""
    environment, _ = pbs_open_mpi(counts, node, local)
    del environment["PBS_JOBID"]
    environment |= {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": ",".join(hosts(counts)), "PMIX_NAMESPACE": "prterun-1"}
    if node:
        environment |= {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": ",".join(hosts(counts)[1:])}
    return environment, None


def pbs_pals(counts: list[int], node: int, local: int) -> tuple[Environment, str | None]:
    return {
        "PBS_JOBID": "41.server",
        "PALS_RANKID": str(sum(counts[:node]) + local),
        "PMI_SIZE": str(sum(counts)),
        "PALS_NODEID": str(node),
        "PALS_LOCAL_RANKID": str(local),
        "PALS_LOCAL_SIZE": str(counts[node]),
        "PALS_APID": "5d1c",
    }, "\n".join(hosts(counts))


def pbsdsh(node: int, hosts: list[str]) -> Environment:
    """A task of pbsdsh as templates/pbs.sh starts it; only the first node has the node file."""
    return {"PBS_JOBID": "41.server", "PBS_NODENUM": str(node), "CROSSFED_HOSTS": ",".join(hosts)}


def mpich(counts: list[int], node: int, local: int) -> tuple[Environment, str | None]:
    names = [name for name, count in zip(hosts(counts), counts, strict=True) for _ in range(count)]
    return {
        "PMI_RANK": str(sum(counts[:node]) + local),
        "PMI_SIZE": str(sum(counts)),
        "MPI_LOCALRANKID": str(local),
        "MPI_LOCALNRANKS": str(counts[node]),
        "CROSSFED_HOSTS": " ".join(names),
    }, None


BUILDERS: dict[str, Builder] = {
    "slurm": slurm,
    "open-mpi": pbs_open_mpi,
    "pals": pbs_pals,
    "pmi": mpich,
}


STARTS: dict[str, tuple[Builder, Environment]] = {
    "slurm": (slurm, {"SLURM_STEP_ID": "1"}),
    "open-mpi": (pbs_open_mpi, {"PMIX_NAMESPACE": "prterun-2"}),
    "open-mpi under Slurm": (slurm_open_mpi, {"PMIX_NAMESPACE": "prterun-2"}),
    "pals": (pbs_pals, {"PALS_APID": "5d1d"}),
    "pmi": (mpich, {}),
}
"""What the next start in the same job has of its own; {}: nothing but what a template sets."""


def whole_job(builder: Builder, counts: list[int]) -> list[Place]:
    """Every task of a job with one task a rank."""
    places = []
    for node, count in enumerate(counts):
        for local in range(count):
            environment, file = builder(counts, node, local)
            places.append(place_ranks(read_tasks(environment, file), environment, ranks=1))
    return places


def check(places: list[Place], counts: list[int]) -> None:
    """The law: ranks are 0..n-1, each once; everyone names the same meeting point; local numbers fit the node."""
    told = [p.environment(index) for p in places for index in range(len(p.local_ranks))]
    world = sum(counts)
    assert sorted(int(t["RANK"]) for t in told) == list(range(world))
    assert {t["WORLD_SIZE"] for t in told} == {str(world)}
    assert len({(t["MASTER_ADDR"], t["MASTER_PORT"]) for t in told}) == 1
    by_node: dict[str, list[int]] = {}
    for t in told:
        by_node.setdefault(t["GROUP_RANK"], []).append(int(t["LOCAL_RANK"]))
        assert int(t["LOCAL_WORLD_SIZE"]) == counts[int(t["GROUP_RANK"])]
    assert {int(node): sorted(locals_) for node, locals_ in by_node.items()} == {
        n: list(range(c)) for n, c in enumerate(counts)
    }
    assert sum(p.tasks.first for p in places) == 1


@pytest.mark.parametrize("counts", [[4], [4, 4], [4, 4, 2], [1, 3]], ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_one_task_a_rank(name: str, counts: list[int]):
    if name in ("pals",) and counts == [1, 3]:
        counts = [3, 1]
    check(whole_job(BUILDERS[name], counts), counts)


@pytest.mark.parametrize("name", BUILDERS)
@given(counts=st.lists(st.integers(2, 6), min_size=1, max_size=5))
def test_one_task_a_rank_for_any_nodes(name: str, counts: list[int]):
    check(whole_job(BUILDERS[name], counts), counts)


@pytest.mark.parametrize("name", BUILDERS)
@given(counts=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_one_task_a_node_with_uneven_ranks(name: str, counts: list[int]):
    """The scheduler starts one task a node; what each node has is told by the nodes (`counts`)."""
    ones = [1] * len(counts)
    places = []
    for node, count in enumerate(counts):
        environment, file = BUILDERS[name](ones, node, 0)
        tasks = read_tasks(environment, file)
        assert not tasks.per_rank
        places.append(place_ranks(tasks, environment, ranks=count, counts=counts if len(counts) > 1 else ()))
    check(places, counts)


@pytest.mark.parametrize("ranks", [1, 8])
def test_512_nodes(ranks: int):
    """No message is needed: each of 512 nodes finds its own ranks from its own environment."""
    counts, ones = [ranks] * 512, [1] * 512
    places = []
    for node in range(512):
        environment, _ = slurm(ones, node, 0)
        environment |= {"SLURM_STEP_TASKS_PER_NODE": "1(x512)", "SLURM_STEP_NODELIST": "node[000-511]"}
        places.append(place_ranks(read_tasks(environment), environment, ranks=ranks))
    check(places, counts)
    assert places[511].master_address == "node000"


def test_flux():
    counts = [1, 1, 1]
    places = []
    for node in range(3):
        environment = {
            "FLUX_JOB_ID": "f2Y8x",
            "FLUX_JOB_SIZE": "3",
            "FLUX_JOB_NNODES": "3",
            "FLUX_TASK_RANK": str(node),
            "FLUX_TASK_LOCAL_ID": "0",
            "CROSSFED_HOSTS": "a[1-3]",
        }
        places.append(place_ranks(read_tasks(environment), environment, ranks=2))
    check(places, [2, 2, 2])
    assert places[0].master_address == "a1" and counts


@given(counts=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_pbsdsh_starts_one_task_a_node(counts: list[int]):
    environments = [pbsdsh(node, hosts(counts)) for node in range(len(counts))]
    tasks = [read_tasks(environment) for environment in environments]
    assert not any(task.per_rank for task in tasks)
    check(
        [
            place_ranks(task, environment, ranks=count, counts=counts if len(counts) > 1 else ())
            for task, environment, count in zip(tasks, environments, counts, strict=True)
        ],
        counts,
    )


def test_pbsdsh_as_two_real_nodes_were_recorded():
    """What each task saw, with the hosts that the template reads from the node file on the first node."""
    text = recorded("pbs-pbsdsh-two-nodes").out
    names = text.partition("== nodefile")[2].partition("== pbsdsh")[0].splitlines()[1:]
    seen = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in text.splitlines() if line.startswith("TASK on")]
    environments = [one | {"CROSSFED_HOSTS": ",".join(names)} for one in seen]
    places = [place_ranks(read_tasks(one), one, ranks=2) for one in environments]
    check(places, [2, 2])
    assert {one.master_address for one in places} == {"pbshead"}


def test_torchrun_keeps_what_it_set():
    environment = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29501",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
    }
    told = place_ranks(read_tasks(environment), environment, ranks=4).environment(0)
    assert told.items() <= environment.items()


def test_nothing_means_this_machine_alone():
    tasks = read_tasks({})
    assert (tasks.scheduler, tasks.tasks, tasks.first) == ("none", 1, True)
    here = place_ranks(tasks, {}, ranks=3, port=21000)
    check([here], [3])
    assert here.master_address == "127.0.0.1" and here.master_port == 21000


def test_the_batch_script_of_one_node_is_this_machine_alone():
    """sbatch sets SLURM_PROCID=0 in the script; that is not a task."""
    environment = {
        "SLURM_JOB_ID": "9",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_END_TIME": "1700000000",
    }
    tasks = read_tasks(environment)
    assert (tasks.tasks, tasks.nodes, tasks.devices_here, tasks.end_time) == (1, 1, 4, 1700000000.0)


def test_open_mpi_under_slurm():
    check(whole_job(slurm_open_mpi, [2, 2, 2]), [2, 2, 2])
    tasks = [read_tasks(slurm_open_mpi([1, 1, 1], node, 0)[0]) for node in range(3)]
    assert [(one.node, one.nodes, one.per_rank, one.host) for one in tasks] == [
        (node, 3, False, "node000") for node in range(3)
    ]


@pytest.mark.parametrize("name", STARTS)
def test_all_tasks_of_a_start_read_the_same_notes_and_those_of_the_next_start_others(name: str):
    builder, another = STARTS[name]
    first = [builder([2, 2], node, local)[0] for node in range(2) for local in range(2)]
    (attempt,) = {attempt_of(environment) for environment in first}
    for change in (another, {"CROSSFED_START": "again"}, {"SLURM_RESTART_COUNT": "1"}):
        (changed,) = {attempt_of(environment | change) for environment in first}
        assert (changed != attempt) == bool(change)


def test_the_innermost_launcher_counts():
    outer, _ = slurm([1, 1], 1, 0)
    inner = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert read_tasks(outer | inner).scheduler == "Open MPI"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}, "was started on one of them only"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "2"}, "calls this task 3 of 2"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, "is 'x', expected a number"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, "nothing names the nodes"),
        (pbsdsh(0, ["n1", "n1", "n2"]), "cannot be distinguished"),
        ({"CROSSFED_HOSTS": "n[1-"}, "brackets do not match"),
    ],
)
def test_what_cannot_be_is_refused(environment: Environment, message: str):
    with pytest.raises(ConfigurationError, match=message):
        read_tasks(environment)


def test_ranks_per_node_from_the_template():
    environment, _ = slurm([1, 1, 1], 2, 0)
    environment["CROSSFED_RANKS_PER_NODE"] = "4(x2),2"
    here = place_ranks(read_tasks(environment), environment, ranks=1)
    assert (here.first_rank, here.local_ranks, here.world) == (8, (0, 1), 10)
    environment["CROSSFED_RANKS_PER_NODE"] = "4,4"
    with pytest.raises(ConfigurationError, match="expected 3 numbers"):
        place_ranks(read_tasks(environment), environment, ranks=1)


def test_gpus_that_a_scheduler_names():
    for value, count in {"4": 4, "a100:4": 4, "gpu:a100:2": 2, "a100:2,v100:1": 3, "": 0}.items():
        assert read_tasks({"SLURM_JOB_ID": "1", "SLURM_GPUS_PER_NODE": value}).devices_per_node == count, value


def test_jobs_side_by_side_meet_at_ports_of_their_own():
    ports = [master_port(str(number)) for number in range(700_000, 712_000)]
    assert len(set(ports)) == 12_000 and min(ports) >= 1024 and max(ports) < 32_768
    arrays = [master_port(f"1234[{number}].server") for number in range(100)]
    assert len(set(arrays)) == 100
    assert master_port("f2Y8x") == master_port("f2Y8x") != master_port("f2Y8y")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7],gpu1", ["n01", "n02", "n03", "n7", "gpu1"]),
        ("r[1-2]c[1-2]-ib", ["r1c1-ib", "r1c2-ib", "r2c1-ib", "r2c2-ib"]),
        ("a b,c", ["a", "b", "c"]),
        ("", []),
    ],
)
def test_host_lists(text: str, expected: list[str]):
    assert expand_hosts(text) == expected


@pytest.mark.parametrize("text", ["n[1", "n]", "n[a]", "n[1-999999999]", "n[[1]]"])
def test_no_host_list(text: str):
    with pytest.raises(ConfigurationError):
        expand_hosts(text)


def test_counts():
    assert expand_counts("4(x2),2") == [4, 4, 2]
    for text in ("", "4x2", "-1", "4(x99999999)"):
        with pytest.raises(ConfigurationError):
            expand_counts(text)


@pytest.mark.parametrize(
    ("now", "left"),
    [(0.0, 3600.0), (600.0, 3000.0), (-7200.0, 3600.0), (7200.0, 3600.0), (3595.0, 5.0)],
    ids=["begins", "later", "two hours behind", "two hours ahead", "at its end"],
)
def test_a_node_whose_clock_is_off_has_its_job_s_whole_time(monkeypatch: pytest.MonkeyPatch, now: float, left: float):
    """A job of an hour; ahead of its end, each job had one second, saved, and came back for ever."""
    began = 1_700_000_000
    tasks = read_tasks(
        {"SLURM_JOB_ID": "9", "SLURM_JOB_START_TIME": str(began), "SLURM_JOB_END_TIME": str(began + 3600)}
    )
    monkeypatch.setattr(launch.time, "time", lambda: began + now)
    given = argparse.Namespace(time_limit=0.0, grace=1.0, save=10.0, silence=60.0)
    assert launch.limits_from(given, tasks).total == left - 2.0
