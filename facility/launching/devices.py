"""Which accelerators a process may use, found without vendor tools or libraries, which may be absent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["nvidia", "amd", "cpu"]
NVIDIA = ("CUDA_VISIBLE_DEVICES",)
AMD = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What this process may use."""

    kind: Kind
    count: int
    """Devices that the process sees; 0 for `cpu`."""
    reason: str


def detect_devices(environ: Mapping[str, str], root: Path = Path("/")) -> Devices:
    """Look for driver files below `root`, then narrow to what the environment makes visible.

    NVIDIA: `/dev/nvidia0`, ... or `/proc/driver/nvidia/gpus/*`. AMD: `/dev/kfd` and the nodes with compute units in
    `/sys/class/kfd/kfd/topology/nodes` (the kernel's ROCm interface).
    """
    nvidia = max(
        len([p for p in _listed(root / "dev") if re.fullmatch(r"nvidia\d+", p.name)]),
        len(_listed(root / "proc/driver/nvidia/gpus")),
    )
    if nvidia:
        return _visible("nvidia", nvidia, NVIDIA, environ)
    amd = len([p for p in _listed(root / "sys/class/kfd/kfd/topology/nodes") if _computes(p)])
    if amd and (root / "dev/kfd").exists():
        return _visible("amd", amd, (*AMD, *NVIDIA), environ)
    return Devices(kind="cpu", count=0, reason="no NVIDIA or AMD driver files on this node")


def _visible(kind: Kind, count: int, names: tuple[str, ...], environ: Mapping[str, str]) -> Devices:
    for name in names:
        if name in environ:
            seen = listed_devices(environ[name])
            if not seen:
                return Devices(kind="cpu", count=0, reason=f"{name} hides all {count} {kind} devices")
            return Devices(kind=kind, count=len(seen), reason=f"{len(seen)} {kind} devices in {name}")
    return Devices(kind=kind, count=count, reason=f"{count} {kind} devices on this node")


def listed_devices(value: str) -> list[str]:
    """Devices named by a `*_VISIBLE_DEVICES` value; what follows a negative number is ignored, as the drivers do."""
    names = []
    for item in value.split(","):
        item = item.strip()
        if not item or item.startswith("-") or item in ("NoDevFiles", "void", "none"):
            break
        names.append(item)
    return names


def clean_environment(environ: Mapping[str, str], kind: Kind) -> tuple[dict[str, str], str]:
    """Changes to `environ` (an empty value means: remove) so that filters do not apply twice, and why.

    On AMD, ROCR_VISIBLE_DEVICES renumbers the devices before HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES select among
    the new numbers; Slurm may set all three to the same list, and then devices 4-7 become none
    (https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html).
    """
    own = environ.get("ROCR_VISIBLE_DEVICES")
    if kind != "amd" or not own:
        return {}, ""
    doubled = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if environ.get(name) == own]
    if not doubled:
        return {}, ""
    return dict.fromkeys(doubled, ""), f"removed {' and '.join(doubled)}: it repeats ROCR_VISIBLE_DEVICES"


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _computes(node: Path) -> bool:
    try:
        found = re.search(r"^simd_count\s+(\d+)", (node / "properties").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return False
    return found is not None and int(found.group(1)) > 0
