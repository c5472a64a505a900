"""What a round reports of itself: memory, devices, versions, speed."""

from __future__ import annotations

import math
import platform
import resource
from typing import Any

import torch

from facility.training.parallel.arrange import Layout
from facility.training.parallel.assemble import Assembly
from facility.training.processes.ranks import Ranks


def peak_memory_bytes(ranks: Ranks) -> int:
    """This rank's largest: memory allocated on its GPU, or resident memory of the process."""
    if ranks.device.type == "cuda":
        return torch.cuda.max_memory_allocated(ranks.device)
    return most_resident_bytes()


def most_resident_bytes() -> int:
    """The largest resident memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes(ranks: Ranks) -> int:
    """What `peak_memory_bytes` would be of this rank now: on a CPU, interpreter and libraries before a model comes."""
    if ranks.device.type == "cuda":
        return torch.cuda.memory_allocated(ranks.device)
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def versions() -> dict[str, str]:
    """Versions of CrossFed and of what decides results, for the report."""
    import transformers

    import facility

    return {
        "crossfed": facility.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GH200": 989e12,
}
"""Dense bf16 operations a second by the beginning of the device's name (the makers' data sheets)."""


def peak_flops(name: str) -> float | None:
    """Peak floating-point operations a second of a device; None: not known, and no MFU is reported."""
    return next((value for prefix, value in PEAK_FLOPS.items() if name.startswith(prefix)), None)


def bubble_theory(schedule: str, stages: int, virtual: int, micro_batches: int) -> float:
    """Share of a pipeline step in which a rank idles, for equal stages.

    (p-1)/m of the ideal time, divided by v with interleaving (Narayanan et al. 2021, arXiv 2104.04473, section 2.2);
    a third of it for zero bubble (Qi et al. 2023, arXiv 2401.10241, table 1, H1 with equal F, B, W).
    """
    if stages == 1:
        return 0.0
    ratio = (stages - 1) / (micro_batches * virtual)
    if schedule == "interleaved_zero_bubble":
        ratio /= 3
    return ratio / (1 + ratio)


def steady_tokens_per_second(ends: list[float], tokens: int) -> float | None:
    """Tokens a second from the end of the second step on: without compilation and first touches of memory."""
    return (len(ends) - 2) * tokens / (ends[-1] - ends[1]) if len(ends) > 2 else None


def rounded_seconds(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by part with the digits that the report shows."""
    return {part: round(value, 4) for part, value in seconds.items()}


def report_details(
    held: Assembly,
    layout: Layout,
    config: Any,
    *,
    seconds: float,
    positions: int,
    per_rank: list[dict[str, Any]],
    given_peak: float,
) -> dict[str, Any]:
    """Figures for `report.json`: model operations a second, MFU where the peak is known or given, time split, bubble.

    `positions`: of the activation, trained in `seconds` by all ranks: tokens of text, patches of images. `given_peak`:
    operations a second of a device; 0: by its name.

    The time split, `seconds` of every rank: `data`, `forward`, `backward`, `optimizer`, `communication`, of a pipeline
    `pipeline` and the `busy` part of it. Torch's own collectives are parts of these and not beside them: `all_gather`
    (FSDP2) of forward and backward, `reduce_scatter` (FSDP2) and `all_reduce` (gradients between replicas that step
    together, by DDP or FSDP2) of backward, in a pipeline all three of `pipeline`.
    """
    # Operations of a convolution are not its parameters'.
    known = bool(getattr(config.get_text_config(), "hidden_size", 0)) and math.isfinite(held.operations)
    rate = held.operations * positions / seconds if known else math.nan
    whole_peak = sum(given_peak or peak_flops(r["device"]) or math.nan for r in per_rank)
    result: dict[str, Any] = {
        "layout": layout.to_json(),
        "parameters": held.parameters,
        "trained_parameters": held.trained,
        "flops_per_second": rate if known else None,
        "mfu": None if math.isnan(whole_peak) or not known else rate / whole_peak,
        "per_rank": per_rank,
    }
    if layout.units:
        grid, virtual = layout.grid, len(layout.units) // layout.grid.stages
        micro_batches = max(layout.shape.micro_batches)
        busy, whole = (sum(r["seconds"].get(k, 0.0) for r in per_rank) for k in ("busy", "pipeline"))
        result["bubble_measured"] = 1 - busy / whole if whole else None
        result["bubble_theory"] = bubble_theory(layout.schedule, grid.stages, virtual, micro_batches)
    return result
