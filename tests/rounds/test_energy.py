"""Energy: what a counter gained between start and end, from the best counter that every node has, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from facility.exchange.messages.manifest import Manifest
from facility.exchange.messages.usage import SOURCES, USAGE, usage_of
from facility.launching.notes import Notes
from facility.launching.place import read_tasks
from facility.rounds import energy
from facility.rounds.energy import Meter, Reading, combined, gained


def reading(at: float, ranges: dict[str, float] | None = None, **counters: dict[str, float]) -> Reading:
    return Reading(time=at, counters=counters, ranges=ranges or {})


def test_each_source_gains_by_itself():
    begin = reading(0, pm_counters={"node": 100.0}, nvml={"0": 10.0, "1": 20.0})
    end = reading(60, sacct={"job": 900.0}, pm_counters={"node": 400.0}, nvml={"0": 15.0, "1": 28.0})
    assert gained(begin, end) == {"sacct": 900.0, "pm_counters": 300.0, "nvml": 13.0}


@pytest.mark.parametrize(
    ("seconds", "before", "after", "expected"),
    [(10, 100.0, 400.0, {"rapl": 300.0}), (10, 9_900.0, 100.0, {"rapl": 200.0}), (100, 100.0, 400.0, {})],
)
def test_a_processor_counter_may_wrap_once_and_is_not_believed_where_it_could_have_wrapped_more_often(
    seconds: float, before: float, after: float, expected: dict[str, float]
):
    ranges = {"intel-rapl:0": 10_000.0}
    begin = reading(0, ranges, rapl={"intel-rapl:0": before})
    assert gained(begin, reading(seconds, ranges, rapl={"intel-rapl:0": after})) == expected


def test_a_counter_that_stood_still_or_lost_a_device_says_nothing():
    assert gained(reading(0, nvml={"0": 5.0}), reading(9, nvml={"0": 5.0})) == {}
    assert gained(reading(0, nvml={"0": 5.0, "1": 1.0}), reading(9, nvml={"0": 9.0})) == {}
    assert gained(reading(0, sacct={"job": 2.0}), reading(9)) == {}


def test_a_job_of_several_nodes_needs_a_source_that_all_of_them_have():
    assert combined({"sacct": 9.0, "nvml": 1.0}, [], 2) == (9.0, "sacct")
    assert combined({"pm_counters": 5.0, "nvml": 1.0}, [{"nvml": 2.0}], 2) == (3.0, "nvml")
    assert combined({"nvml": 1.0}, [], 2) == (None, "")
    assert combined({}, [{"nvml": 2.0}], 2) == (None, "")


def test_counters_are_read_as_their_makers_write_them(tmp_path: Path):
    """pm_counters: "User Access to Compute Node Power Data", cray-hpe.github.io/docs-csm; RAPL: the kernel's
    Documentation/power/powercap/powercap.rst, microjoules, with subzones that are parts of their package; `psys`, the
    platform that packages are parts of (its intel_rapl_common.c), counted them twice."""
    (tmp_path / "energy").write_text("71350464 J 1700000000000000 us\n")
    assert energy._pm_counters(tmp_path / "energy") == {"node": 71350464.0}
    zones = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "dram", "intel-rapl:2": "psys"}
    for name, zone in zones.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(f"{zone}\n")
        (tmp_path / name / "energy_uj").write_text("5000000\n")
        (tmp_path / name / "max_energy_range_uj").write_text("262143328850\n")
    ranges: dict[str, float] = {}
    assert energy._rapl(ranges, tmp_path) == {"intel-rapl:0": 5.0, "intel-rapl:1": 5.0}
    assert ranges == {"intel-rapl:0": 262143.32885, "intel-rapl:1": 262143.32885}
    assert energy._rapl({}, tmp_path / "none") == {} and energy._pm_counters(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        ("\\n1200\\n1100\\n", 0, {"job": 1200.0}),
        ("1200\\n18446744073709551614\\n", 0, {"job": 1200.0}),
        ("18446744073709551614\\n", 0, {}),
        ("0\\n0\\n", 0, {}),
        ("\\n", 0, {}),
        ("", 1, {}),
        ("1200\\n", 1, {}),
    ],
    ids=["job and steps", "a step unknown", "NO_VAL64", "acct_gather_energy/none", "blank", "no accounting", "failed"],
)
def test_slurm_says_joules_or_nothing(
    said: str, code: int, expected: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """ConsumedEnergyRaw, https://slurm.schedmd.com/sacct.html; AcctGatherEnergyType=none counts 0: none known."""
    program = tmp_path / "sacct"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert energy._sacct("7") == expected


class FourGpus:
    """NVML on a node of four GPUs that only says which of them was asked for."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 4
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return 0 if index < 4 else 2

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name.startswith(b"GPU-") else 6


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0, 1", ["0", "1"]),
        ("2,-1,3", ["2"]),
        ("GPU-1f,GPU-2f", ["GPU-1f", "GPU-2f"]),
    ],
)
def test_the_gpus_counted_are_those_that_the_job_sees(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [name for name, _ in energy._handles(FourGpus())] == expected


@pytest.mark.parametrize(
    ("seen", "tasks_here", "gpus", "expected"),
    [
        (4, 4, 4, (4, "nvml")),
        (1, 4, 4, (4, "rapl")),
        (1, 4, 0, (4, "rapl")),
        (2, 1, 4, (4, "nvml")),
        (0, 1, 8, (8, "rapl")),
    ],
    ids=["all see all", "each sees its own", "not from the scheduler", "one task, two of four", "no NVML"],
)
def test_a_task_that_sees_its_own_gpu_alone_does_not_speak_for_the_node(
    seen: int,
    tasks_here: int,
    gpus: int,
    expected: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    seconds = iter([0.0, 100.0])

    def read(**_: object) -> Reading:
        at = next(seconds)
        counters = {"nvml": {str(gpu): at for gpu in range(seen)}, "rapl": {"intel-rapl:0": at}}
        return reading(at, **{name: one for name, one in counters.items() if one})

    monkeypatch.setattr(energy, "read_counters", read)
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    environment |= {"SLURM_STEP_NUM_TASKS": str(tasks_here), "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    tasks = read_tasks(environment | ({"SLURM_GPUS_ON_NODE": str(gpus)} if gpus else {}))
    usage = Meter(tasks, {"SLURM_JOB_START_TIME": "1"}).usage(Notes(tmp_path, "7"))
    assert (round(usage.gpu_seconds / usage.node_seconds), usage.energy_source) == expected
    assert usage.nodes == 1


def test_what_this_machine_has_is_read_and_what_it_lacks_is_absent():
    """The real readers: none invents a source, and two readings of one that is there never go back."""
    first, second = (energy.read_counters(job="", whole_job=True) for _ in range(2))
    assert set(first.counters) <= set(SOURCES) and set(first.counters) == set(second.counters)
    assert ("rapl" in first.counters) <= any(energy.RAPL.glob("intel-rapl:*"))
    assert ("pm_counters" in first.counters) == energy.PM_COUNTER.is_file()
    assert "sacct" not in first.counters  # this is not a job
    assert set(gained(first, second)) <= set(first.counters)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {"node_seconds": -1.0},
        {"node_seconds": "1"},
        {"node_seconds": 1.0, "energy_joules": 1e300, "energy_source": "nvml"},
        {"node_seconds": 1.0, "energy_joules": 5.0, "energy_source": "<script>"},
        {"more": 1},
        {"node_seconds": 1.0, "nodes": 0.5},
    ],
)
def test_a_usage_that_cannot_be_is_not_recorded(told: object):
    assert usage_of(Manifest(kind="update", federation="f", round=0, extra={USAGE: told})) == {}


def test_what_is_known_of_a_newer_facilitys_usage_counts():
    """A coordinator that did not know `nodes` yet had lost hours and energy with it."""
    told = {"node_seconds": 60.0, "nodes": 2, "energy_joules": 5.0, "energy_source": "nvml"}
    newer = told | {"water_litres": 1.0, "cores": [1, {"a": None}]}
    known = told | {"gpu_seconds": 0.0}
    assert usage_of(Manifest(kind="update", federation="f", round=0, extra={USAGE: newer})) == known


@pytest.mark.parametrize("off", [-7200.0, -60.0, 0.0, 90_000.0])
def test_a_node_whose_clock_is_off_counts_no_time_that_its_job_did_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float
):
    """A job of a day, which began 50 s ago; the clock is two hours behind, or beyond the job's end."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1700000000", "SLURM_JOB_END_TIME": "1700086400"}
    monkeypatch.setattr(energy.time, "time", lambda: 1_700_000_050.0 + off)
    monkeypatch.setattr(energy.time, "monotonic", lambda: 10.0)
    meter = Meter(read_tasks(environ), environ)
    monkeypatch.setattr(energy.time, "time", lambda: 1_600_000_000.0)  # set back while the job runs
    monkeypatch.setattr(energy.time, "monotonic", lambda: 35.0)
    assert meter.usage(Notes(tmp_path, "7")).node_seconds == 25.0 + (50.0 if off == 0 else 0.0)
