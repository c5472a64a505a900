"""Who a device is and what memory it has free."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import torch


def device_id(device: torch.device, local_rank: int) -> str:
    """Stable name: host, kind and local index; the same from run to run on the same place."""
    return f"{socket.gethostname()}:{device.type}{local_rank}"


def device_name(device: torch.device) -> str:
    """Of the hardware, as the driver or the kernel calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def free_bytes(device: torch.device, local_world: int) -> float:
    """Free memory of a GPU, or this rank's part of the host's (within the job's limit)."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    available = _available_bytes()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            found = Path(limit).read_text().strip()
            if found != "max":
                available = min(available, max(0.0, float(found) - float(Path(used).read_text())))
        except (OSError, ValueError):
            continue
    return available / max(1, local_world)


def _available_bytes() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024.0 * float(line.split()[1])
    return float("inf")
