"""A device's name and its free memory."""

from __future__ import annotations

import math
import platform
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import torch

from facility.exchange.errors import ConfigurationError


def device_id(device: torch.device, local_rank: int) -> str:
    """Stable name: host, kind and local index; the same from run to run on the same place."""
    return f"{socket.gethostname()}:{device.type}{local_rank}"


def device_name(device: torch.device) -> str:
    """Name of the hardware, as the driver or the kernel calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has computed all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_of(device: torch.device) -> tuple[str, str, str]:
    """A GPU's host, UUID and name."""
    properties = torch.cuda.get_device_properties(device)
    return socket.gethostname(), str(properties.uuid), properties.name


def check_own_gpus(gpus: Sequence[Sequence[str]]) -> None:
    """Raise `ConfigurationError` unless every rank has a GPU of its own, which NCCL needs.

    `gpus`: host, UUID and name of each rank's GPU, in the order of the ranks.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, (host, uuid, name) in enumerate(gpus):
        other = first.setdefault((host, uuid), rank)
        if other != rank:
            raise ConfigurationError(
                f"ranks {other} and {rank} found one GPU between them ({name} of {host}), expected a GPU for each: ask "
                "the scheduler for as many GPUs as ranks on every node, or start fewer ranks (training.ranks), or set "
                "training.device to 'cpu'"
            )


def free_bytes(device: torch.device, local_world: int) -> float:
    """Free memory of a GPU, or this rank's part of the host's within the process's own limit: what the planner uses
    and the trainer checks."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return min(free_host_bytes() / max(1, local_world), free_address_space())


def address_space_limit() -> float:
    """Bytes of addresses that this process may have (`ulimit -v`, which Grid Engine's h_vmem sets); infinite: any."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if limit == resource.RLIM_INFINITY else float(limit)


def free_address_space(statm: Path = Path("/proc/self/statm")) -> float:
    """What the limit of addresses leaves to this process, which has some for libraries and mapped files too."""
    limit = address_space_limit()
    if math.isinf(limit):
        return limit
    return max(0.0, limit - int(statm.read_text(encoding="utf-8").split()[0]) * resource.getpagesize())


def free_host_bytes(root: Path = Path("/")) -> float:
    """Memory that the kernel can give, within the limits of the job's cgroups; page cache of the job counts as free.

    Slurm and the like limit a cgroup above the process's own (job_N of job_N/step_0/user/task_0): all are asked.
    """
    available = _available_bytes(root)
    for folder, limit, used in _cgroups(root):
        try:
            found = (folder / limit).read_text(encoding="utf-8").strip()
            if found != "max":
                occupied = float((folder / used).read_text(encoding="utf-8")) - _page_cache(folder)
                available = min(available, max(0.0, float(found) - occupied))
        except (OSError, ValueError):
            continue
    return available


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Directories of the cgroups that this process is in, from its own to the topmost, and their files of the limit
    and of what is used: of version 2 (`0::/path` in /proc/self/cgroup) and of version 1's memory controller."""
    mounts = {"": ("sys/fs/cgroup", "memory.max", "memory.current")}
    mounts["memory"] = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    paths = dict.fromkeys(mounts, PurePosixPath())
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        for controller in controllers.split(","):
            if controller in paths and ".." not in path.split("/"):
                paths[controller] = PurePosixPath(path.lstrip("/"))
    for controller, (mount, limit, used) in mounts.items():
        for group in (paths[controller], *paths[controller].parents):
            yield root / mount / group, limit, used


def _page_cache(folder: Path) -> float:
    """Bytes of files that the cgroup and those below it hold in memory and the kernel may drop."""
    try:
        figures = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return 0.0
    # Version 1 counts those below under names of their own; version 2 always does.
    return sum(float(figures.get(f"total_{name}", figures.get(name, 0))) for name in ("inactive_file", "active_file"))


def _available_bytes(root: Path) -> float:
    for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024.0 * float(line.split()[1])
    return float("inf")
