"""A rank that dies takes its replica with it, and nothing else, unless the replicas step together (all-reduce)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.messages.manifest import verify_manifest
from facility.exchange.messages.report import read_report
from tests.forked_trainers import variables
from tests.launching.test_launch import left_in, node
from tests.ports import free_port
from tests.training.federation import write_dataset
from tests.training.layouts import arguments

POLICIES = ("partial_reduce", "local", "diloco", "adpsgd", "adpsgd_blocking", "wave", "central_ps", "sharded_ps")
QUICK = {"heartbeat_seconds": 0.2, "missing_seconds": 10.0, "timeout_seconds": 30.0, "every": 2}
FSDP = {"replicas": 2}
PIPELINE = {"replicas": 2, "stages": 2, "units": [[0, 2], [2, 6]]}
WHOLE = {"sharding": "NO_SHARD"}
STEPS = 30
"""Of a round, four blocks each; the rank is ended after the fourth."""


@dataclass
class Run:
    """One launch that has ended."""

    code: int
    said: str
    out: Path
    state: Path


def launch_and_lose(
    tmp_path: Path, model: Path, *, ranks: int, lose: int, how: signal.Signals = signal.SIGKILL, **training: Any
) -> Run:
    """Start the trainer through the launcher and end rank `lose` after a few steps."""
    dataset = write_dataset(tmp_path / "data", train=200)
    settings = {"steps": STEPS, "batch_sequences": 4, "stall_seconds": 60.0} | training
    command = arguments(tmp_path, model, dataset, **settings)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "facility.launch", "--cpu", "--ranks", str(ranks), "--grace", "3", "--"]
        + ["-m", "facility.train", *command, "--progress"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (variables() if how != signal.SIGSTOP else {}),
        cwd=tmp_path,
    )
    assert launcher.stdout is not None
    said = []
    for line in launcher.stdout:
        said.append(line)
        if "step 4/" in line:
            os.kill(process_of(launcher.pid, lose), how)
            break
    rest, _ = launcher.communicate(timeout=200)
    assert left_in(tmp_path) == [], "the scheduler ends with its ranks"
    return Run(launcher.returncode, "".join(said) + rest, tmp_path / "out", tmp_path / "state")


def process_of(launcher: int, rank: int) -> int:
    """The process of a rank."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no process of rank {rank} under {launcher}")


def finished_without(run: Run, replica: int) -> dict[str, Any]:
    """The update is whole, and the report says what was lost."""
    assert run.code == 0, run.said
    assert f"launch: replica {replica} is lost" in run.said
    verify_manifest(run.out)
    report = read_report(run.out)
    assert report.loss_returned < report.loss_received
    (lost,) = report.details["lost_replicas"]
    assert lost["replica"] == replica and 0 <= lost["step"] < STEPS  # 0: nobody waits for it, and its core was busy
    assert 0 <= lost["blocks_trained"] <= 2 * lost["step"] + 2
    assert lost["blocks_trained"] + lost["blocks_not_trained"] == 2 * STEPS
    assert report.samples >= 2 * STEPS + lost["blocks_trained"]
    assert open_checkpoint(run.state / "round-0").tensors
    return lost


def sync_of(policy: str) -> dict[str, Any]:
    return {"policy": policy} | QUICK


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_other_replicas_finish_the_round(tmp_path: Path, pico_llama: Path, policy: str) -> None:
    run = launch_and_lose(tmp_path, pico_llama, ranks=2, lose=1, layout=WHOLE, sync=sync_of(policy))
    finished_without(run, 1)
    assert "was killed (SIGKILL)" in run.said and "replicas 0 finish the round" in run.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "layout", "lose"),
    [
        ("diloco", WHOLE, 0),
        ("partial_reduce", WHOLE, 0),
        ("sharded_ps", WHOLE, 0),
        ("adpsgd", WHOLE, 0),
        ("local", FSDP, 1),
        ("partial_reduce", FSDP, 3),
        ("diloco", PIPELINE, 0),
        ("partial_reduce", PIPELINE, 3),
        ("central_ps", PIPELINE, 2),
    ],
)
def test_also_without_the_first_rank_and_with_replicas_of_several(
    tmp_path: Path, pico_llama: Path, policy: str, layout: dict[str, Any], lose: int
) -> None:
    """The first rank starts the scheduler; a replica of shards or stages leaves as a whole."""
    ranks = 2 if layout is WHOLE else 4
    run = launch_and_lose(tmp_path, pico_llama, ranks=ranks, lose=lose, layout=layout, sync=sync_of(policy))
    finished_without(run, lose * 2 // ranks)


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGKILL, signal.SIGINT)])
def test_under_all_reduce_the_round_is_to_be_run_again(tmp_path: Path, pico_llama: Path, how: signal.Signals) -> None:
    """A rank that is interrupted says so in a word; no traceback is shown, of the other rank neither."""
    run = launch_and_lose(tmp_path, pico_llama, ranks=2, lose=1, how=how, layout=WHOLE)
    assert run.code == 75, run.said
    assert "launch: rank 1 " in run.said and "the same command, run again, goes on" in run.said
    assert ("interrupted" in run.said) == (how == signal.SIGINT)
    assert "Traceback" not in run.said and not run.out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGSTOP])
def test_a_replica_may_fail_by_an_exception_or_hang(tmp_path: Path, pico_llama: Path, how: signal.Signals) -> None:
    """One that hangs is given up after `missing_seconds` and ended when the others have finished."""
    sync = sync_of("local") | {"missing_seconds": 2.0}
    run = launch_and_lose(tmp_path, pico_llama, ranks=2, lose=1, how=how, layout=WHOLE, sync=sync)
    finished_without(run, 1)


@pytest.mark.slow
def test_without_the_replica_that_serves_the_waves_the_round_is_to_be_run_again(
    tmp_path: Path, pico_llama: Path
) -> None:
    run = launch_and_lose(tmp_path, pico_llama, ranks=2, lose=0, layout=WHOLE, sync=sync_of("wave"))
    assert run.code == 75 and "the replica that serves the waves is gone" in run.said, run.said


def lose_a_node(tmp_path: Path, model: Path, *, nodes: int, lose: int) -> list[tuple[int, str]]:
    """Code and output of each task of a Slurm job, a replica a task: the only rank of task `lose` is killed."""
    dataset = write_dataset(tmp_path / "data", train=200)
    training = {"steps": STEPS, "batch_sequences": 2 * nodes, "layout": WHOLE, "sync": sync_of("local")}
    command = arguments(tmp_path, model, dataset, **training)
    environment = os.environ | {
        **variables(),
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_port()),
        "MASTER_ADDR": "127.0.0.1",
        "CROSSFED_RANKS_PER_NODE": ",".join("1" * nodes),
    }
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "facility.launch", "--cpu", "--ranks", "1", "--grace", "3", "--"]
            + ["-m", "facility.train", *command, "--progress"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | node(number, nodes),
            cwd=tmp_path,
        )
        for number in range(nodes)
    ]
    first = launchers[0].stdout
    assert first is not None
    said = []
    for line in first:
        said.append(line)
        if "step 4/" in line:
            os.kill(process_of(launchers[lose].pid, lose), signal.SIGKILL)
            break
    try:
        rests = [launcher.communicate(timeout=200)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    return [(one.returncode, rest) for one, rest in zip(launchers, ["".join(said) + rests[0], *rests[1:]], strict=True)]


@pytest.mark.slow
def test_also_where_each_node_holds_one_replica(tmp_path: Path, pico_llama: Path) -> None:
    """Two tasks of a Slurm job: the launcher that lost its only replica waits for the other's word."""
    (first, said), (second, lost) = lose_a_node(tmp_path, pico_llama, nodes=2, lose=1)
    assert (first, second) == (0, 0), said + lost
    assert "launch: replica 1 is lost" in lost
    (one,) = read_report(tmp_path / "out").details["lost_replicas"]
    assert one["replica"] == 1


@pytest.mark.slow
def test_without_the_process_where_the_ranks_of_several_nodes_meet_the_round_is_to_be_run_again(
    tmp_path: Path, pico_llama: Path
) -> None:
    """The others had met it for the last time, and tried for ever to form a group without it."""
    (code, said), *others = lose_a_node(tmp_path, pico_llama, nodes=3, lose=0)
    assert code == 75 and "the same command, run again, goes on" in said, said
    for code, told in others:
        assert code and "another node failed first: the training process was killed (SIGKILL)" in told, told
    assert not (tmp_path / "out").exists()
