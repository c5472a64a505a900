"""Jobs on several nodes: a process that knows the port of the store runs as rank 1 and does not get its seat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError, TransientError
from facility.launching.rendezvous import DIRECTORY, SECRET
from facility.training.processes import torchrun
from tests.launching.test_launch import node
from tests.ports import free_port
from tests.training.test_rendezvous import ROOT

RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from facility.training.processes.exchange import all_gather_json
from facility.training.processes.ranks import from_environment, run_and_exit
from facility.training.processes.rendezvous import further_store, join_ranks

def main():
    ranks = from_environment("cpu")
    place, name = Path(sys.argv[1]), sys.argv[3]
    (place / f"there-{name}-{ranks.rank}").touch()
    while name == "late" and ranks.rank == 1 and not (place / "go").exists():
        time.sleep(0.1)
    join_ranks(ranks, threads=1, timeout_seconds=float(sys.argv[2]))
    store = further_store("more", ranks, timedelta(seconds=200))
    store.set(f"here/{ranks.rank}", "yes")
    store.wait([f"here/{other}" for other in range(ranks.world)])
    total = torch.ones(1)
    dist.all_reduce(total)
    (place / f"sum-{ranks.rank}").write_text(f"{int(total)} {all_gather_json(name)}")
    dist.barrier()
    return 0

run_and_exit(main)
"""
Start = Callable[[int], subprocess.Popen[str]]


def run(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "TORCHEL"))}
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command],
        env=clean | more | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def alone(root: Path, rank: int, port: int, name: str, seconds: float) -> subprocess.Popen[str]:
    """A rank that somebody starts by hand, with all that the environment of a rank says but the directory."""
    told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return run([str(root / "rank.py"), str(root), str(seconds), name], told)


def by_launcher(root: Path, port: int) -> Start:
    def start(number: int) -> subprocess.Popen[str]:
        words = ["-m", "facility.launch", "--cpu", "--shared", str(root), "--", str(root / "rank.py"), str(root), "60"]
        return run([*words, "late"], node(number) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})

    return start


def by_torchrun(root: Path, port: int) -> Start:
    (root / "private").mkdir(mode=0o700)

    def start(number: int) -> subprocess.Popen[str]:
        words = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
        words += ["--master-addr=127.0.0.1", f"--master-port={port}", f"--log-dir={root / 'logs'}"]
        words += [str(root / "rank.py"), str(root), "60", "late"]
        return run(words, {DIRECTORY: str(root / "private")})

    return start


@contextmanager
def ending(*jobs: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, none of them is left."""
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def await_file(pattern: str, root: Path, job: subprocess.Popen[str]) -> Path:
    deadline = time.monotonic() + 200
    while not (found := list(root.glob(pattern))):
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0]
        time.sleep(0.1)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("by", [by_launcher, by_torchrun])
def test_a_process_that_knows_the_port_does_not_get_the_seat_of_rank_1(
    tmp_path: Path, by: Callable[[Path, int], Start]
):
    """It comes before rank 1 does; the ranks of the job meet all the same, and it is left outside."""
    (tmp_path / "rank.py").write_text(RANK)
    port = free_port()
    first, second = map(by(tmp_path, port), range(2))
    with ending(first, second):
        if by is by_torchrun:
            _, port = json.loads(await_file("private/meeting-*.json", tmp_path, first).read_text())
        else:
            await_file("there-late-1", tmp_path, second)
        stranger = alone(tmp_path, 1, port, "stranger", 10)
        with ending(stranger):
            await_file("there-stranger-1", tmp_path, stranger)
            time.sleep(2)
            (tmp_path / "go").touch()
            said = [job.communicate(timeout=200)[0] for job in (first, second)]
            assert [first.returncode, second.returncode] == [0, 0], said
            assert stranger.wait(200) != 0
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2 ['late', 'late']"] * 2


@pytest.mark.slow
def test_where_no_secret_is_asked_for_the_same_process_does_get_it(tmp_path: Path):
    """The attack is one: what is started by hand, without a launcher, has no secret."""
    (tmp_path / "rank.py").write_text(RANK)
    port = free_port()
    first = alone(tmp_path, 0, port, "ours", 200)
    stranger = alone(tmp_path, 1, port, "stranger", 200)
    with ending(first, stranger):
        assert [job.wait(200) for job in (first, stranger)] == [0, 0]
    assert (tmp_path / "sum-0").read_text() == "2 ['ours', 'stranger']"


@pytest.mark.slow
def test_torchrun_on_several_nodes_is_refused_without_a_directory(tmp_path: Path):
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", torchrun.AGENT: "True"}
    (tmp_path / "rank.py").write_text(RANK)
    job = run([str(tmp_path / "rank.py"), str(tmp_path), "10", "ours"], told | {"MASTER_ADDR": "x", "MASTER_PORT": "1"})
    said, _ = job.communicate(timeout=200)
    assert job.returncode == 2 and "start them with `python -m facility.launch`" in said, said


def test_a_directory_of_an_earlier_start_is_refused_and_one_that_stays_empty_waited_for_in_vain(tmp_path: Path):
    told: dict[str, str] = {}
    with pytest.raises(TransientError, match="do all nodes see it"):
        torchrun.find_store(tmp_path, 0.1, told)
    torchrun.announce_store(tmp_path, "10.0.0.1", 2345, told)
    assert torchrun.find_store(tmp_path, 0, told) == ("10.0.0.1", 2345)
    assert (tmp_path / SECRET).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigurationError, match="earlier start"):
        torchrun.announce_store(tmp_path, "10.0.0.1", 2345, told)
    torchrun.announce_store(
        tmp_path, "10.0.0.1", 2346, {torchrun.RESTARTS: "1"}
    )  # torchrun starts the ranks again itself
    assert torchrun.find_store(tmp_path, 0, {torchrun.RESTARTS: "1"}) == ("10.0.0.1", 2346)
