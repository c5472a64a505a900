"""Laws of who sits where: another order of ranks, idle ranks and hosts of a torchrun job change nothing but places."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from facility.exchange.messages.report import read_report
from facility.launching.rendezvous import DIRECTORY
from tests.ports import free_port
from tests.training.federation import largest_difference, train, write_dataset, write_settings
from tests.training.layouts import arguments, rounds_in


def write_plan(path: Path, grid: list[list[int]], units: list[list[int]], micro_batches: int) -> Path:
    plan = {
        "stages": len(grid),
        "replicas": len(grid[0]),
        "grid": grid,
        "stage_units": units,
        "micro_batches": micro_batches,
    }
    path.write_text(json.dumps(plan))
    return path


def torchrun(
    module: list[str], *, meeting: Path, nodes: int, ranks: int, timeout: float = 200
) -> list[subprocess.CompletedProcess[str]]:
    """`torchrun` as on so many hosts, all of them this machine; every host must end with 0. `meeting`: made here."""
    meeting.mkdir(mode=0o700)
    port, hosts = free_port(), []
    for node in range(nodes):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={nodes}",
            f"--nproc-per-node={ranks}",
            f"--node-rank={node}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            f"--log-dir={meeting}-logs",  # otherwise one in TMPDIR, which it leaves
            "-m",
            *module,
        ]
        hosts.append(
            subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1", DIRECTORY: str(meeting)},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    results = []
    try:
        for host in hosts:
            output, _ = host.communicate(timeout=timeout)
            results.append(subprocess.CompletedProcess(host.args, host.returncode, output, ""))
    finally:
        for host in hosts:
            if host.poll() is None:
                host.terminate()
                host.wait(timeout=200)
    assert [r.returncode for r in results] == [0] * nodes, "\n".join(r.stdout for r in results)
    return results


def same_round(one: Path, other: Path) -> None:
    assert largest_difference(one, other) < 1e-5
    expected, found = read_report(one), read_report(other)
    for figure in ("loss_received", "loss_returned", "training_loss"):
        assert getattr(found, figure) == pytest.approx(getattr(expected, figure), abs=1e-5), figure


@pytest.mark.slow
def test_a_plan_that_seats_ranks_in_another_order_and_leaves_one_idle(tmp_path: Path, pico_llama: Path):
    """Three ranks; the first stage lies on the last of them, the second on the first."""
    dataset = write_dataset(tmp_path / "data")
    rounds_in([("one", arguments(tmp_path / "one", pico_llama, dataset))])
    plan = write_plan(tmp_path / "plan.json", [[2], [0]], [[0, 2], [2, 6]], 4)
    settings = write_settings(tmp_path / "settings.json")
    said = train(tmp_path / "out", pico_llama, dataset, settings, ranks=3, options=("--plan", str(plan)))
    assert "leaves this rank idle" in said[1].stderr
    same_round(tmp_path / "one/out", tmp_path / "out")


@pytest.mark.slow
def test_two_hosts_of_a_torchrun_job_are_one_process(tmp_path: Path, pico_llama: Path):
    """A host a stage, against the order in which torchrun numbers them."""
    dataset = write_dataset(tmp_path / "data")
    rounds_in([("one", arguments(tmp_path / "one", pico_llama, dataset))])
    plan = write_plan(tmp_path / "plan.json", [[1], [0]], [[0, 4], [4, 6]], 4)
    module = ["facility.train", *arguments(tmp_path / "two", pico_llama, dataset), "--plan", str(plan)]
    torchrun(module, meeting=tmp_path / "meeting", nodes=2, ranks=1)
    same_round(tmp_path / "one/out", tmp_path / "two/out")


@pytest.mark.slow
def test_torchrun_and_the_launcher_agree_on_nodes(tmp_path: Path, pico_llama: Path):
    """Two hosts of two ranks each, with and without the launcher in between: shards within a host, a replica a host.
    Eight processes of torch and four agents."""
    dataset = write_dataset(tmp_path / "data")
    rounds_in([("one", arguments(tmp_path / "one", pico_llama, dataset))])
    for name, before in (("plain", []), ("launched", ["facility.launch", "--shared", str(tmp_path), "--", "-m"])):
        case = arguments(tmp_path / name, pico_llama, dataset, layout={"sharding": "HYBRID_SHARD"})
        torchrun([*before, "facility.train", *case], meeting=tmp_path / f"meeting-{name}", nodes=2, ranks=2)
        layout = read_report(tmp_path / name / "out").details["layout"]
        assert (layout["replicas"], layout["shards"]) == (2, 2)
        same_round(tmp_path / "one/out", tmp_path / name / "out")
