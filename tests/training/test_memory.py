"""One law of free memory for the planner's measurements and the trainer's check."""

from __future__ import annotations

import argparse
import math
import resource
from pathlib import Path

import pytest
import torch

from facility.exchange.errors import InputError, TransientError
from facility.exchange.messages.settings import TrainingSettings
from facility.training import devices, memory, train_round
from facility.training.processes.ranks import Ranks


def write_host(root: Path, *, available: int, limit: str = "max", used: int = 0, cache: int = 0) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used - cache}\ninactive_file {cache}\nactive_file 0\n")
    return root


@pytest.mark.parametrize(
    "host, expected",
    [
        ({"available": 8 << 30}, 8 << 30),
        ({"available": 8 << 30, "limit": str(4 << 30), "used": 1 << 30}, 3 << 30),
        ({"available": 8 << 30, "limit": str(4 << 30), "used": 4 << 30, "cache": 3 << 30}, 3 << 30),
        ({"available": 2 << 30, "limit": str(4 << 30), "used": 1 << 30}, 2 << 30),
    ],
    ids=["no limit", "limit", "page cache is free", "the machine has less"],
)
def test_free_memory_is_the_kernel_s_within_the_job_s_limit(tmp_path: Path, host: dict, expected: int):
    assert devices.free_host_bytes(write_host(tmp_path / "root", **host)) == expected


def write_group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, str(used), stat), strict=True):
        (folder / name).write_text(f"{value}\n")


def test_a_jobs_limit_stands_above_the_cgroup_of_its_task(tmp_path: Path):
    """Slurm limits job_N, whose task finds no limit at its own cgroup, nor at the mount's top: the node's memory was
    taken for the job's."""
    root = write_host(tmp_path / "2", available=8 << 30)
    (root / "proc/self").mkdir()
    job = "system.slice/slurmstepd.scope/job_7"
    (root / "proc/self/cgroup").write_text(f"0::/{job}/step_0/user/task_0\n")
    assert devices.free_host_bytes(root) == 8 << 30
    top = root / "sys/fs/cgroup"
    files = ("memory.max", "memory.current")
    write_group(top / job / "step_0/user/task_0", files, "max", 0, "")
    write_group(top / job, files, str(4 << 30), 2 << 30, f"inactive_file {1 << 30}")
    assert devices.free_host_bytes(root) == 3 << 30


def test_version_1_keeps_its_limits_and_counts_elsewhere(tmp_path: Path):
    """`inactive_file` is there of the cgroup's own processes alone, which a job's has none of."""
    root = write_host(tmp_path / "1", available=8 << 30)
    (root / "proc/self").mkdir()
    lines = ["5:cpuset:/slurm/uid_1/job_7", "4:memory:/slurm/uid_1/job_7/step_0/task_0", "0::/"]
    (root / "proc/self/cgroup").write_text("\n".join(lines))
    top = root / "sys/fs/cgroup/memory"
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write_group(top, files, str(2**63 - 4096), 0, "")
    stat = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {1 << 30}\ntotal_active_file {1 << 29}"
    write_group(top / "slurm/uid_1/job_7", files, str(4 << 30), 2 << 30, stat)
    assert devices.free_host_bytes(root) == (3 << 30) + (1 << 29)


def test_a_cgroup_outside_of_what_is_mounted_has_no_say(tmp_path: Path):
    root = write_host(tmp_path / "c", available=8 << 30, limit=str(4 << 30), used=1 << 30)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/../../job_7\n")
    assert devices.free_host_bytes(root) == 3 << 30


def test_trainer_and_planner_agree(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "free_host_bytes", lambda: 12e9)
    cpu = torch.device("cpu")
    rank = Ranks(rank=0, world=3, local_rank=0, local_world=3, device=cpu)
    assert (
        memory.available_bytes(rank, TrainingSettings(steps=1, batch_sequences=1)) == devices.free_bytes(cpu, 3) == 4e9
    )


def test_a_full_gpu_is_told_with_who_holds_it():
    """As two facilities' trainings on one H100 left it, and one of them alone."""
    gib = 2**30
    shared = memory.out_of_memory("NVIDIA H100", int(79.18 * gib), 27 * 2**20, int(45.47 * gib))
    assert isinstance(shared, TransientError)
    assert "48.8 GB and other processes 35.2 GB: expected a GPU for this rank alone" in str(shared)
    alone = memory.out_of_memory("NVIDIA H100", int(79.18 * gib), 27 * 2**20, int(78.5 * gib))
    assert isinstance(alone, InputError) and "micro_batch_sequences" in str(alone) and "other" not in str(alone)


def test_a_limit_of_addresses_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Grid Engine's h_vmem is one: a rank was promised the host's memory, and ended in a traceback of torch's."""
    page = resource.getpagesize()
    (tmp_path / "statm").write_text("1000 10 1 1 0 1 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3000 * page, resource.RLIM_INFINITY))
    assert devices.free_address_space(tmp_path / "statm") == 2000 * page
    monkeypatch.setattr(devices, "free_address_space", lambda: 1e9)
    monkeypatch.setattr(devices, "free_host_bytes", lambda: 12e9)
    assert devices.free_bytes(torch.device("cpu"), 3) == 1e9
    monkeypatch.undo()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert devices.free_address_space() == math.inf


@pytest.mark.parametrize("limit, says", [(math.inf, "held 2.5 GB: ask"), (4e9, "limited to 4 GB (ulimit -v): ask")])
def test_a_host_without_memory_is_told_with_what_to_do(limit: float, says: str):
    text = str(memory.out_of_host_memory(2_500_000_000, limit))
    assert says in text and "micro_batch_sequences" in text


def test_torch_s_own_words_for_a_host_without_memory_are_known(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**58, dtype=torch.uint8)
    assert memory.is_out_of_host_memory(refused.value) and memory.is_out_of_host_memory(MemoryError())
    assert not memory.is_out_of_host_memory(RuntimeError("shapes differ"))

    def ends(request: object) -> int:
        raise refused.value

    monkeypatch.setattr(train_round, "_train_round", ends)
    monkeypatch.setattr(train_round, "read_request", lambda *_, **__: None)
    with pytest.raises(InputError, match="out of memory: this rank held .* training.micro_batch_sequences"):
        train_round.train_round(argparse.Namespace())
