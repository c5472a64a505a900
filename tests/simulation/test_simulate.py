"""`python -m coordinator.simulate`: from files to a summary, a Chrome trace and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.problem.read import problem_from_json
from coordinator.simulate import main
from coordinator.simulation.pipelines.plans import simulate
from facility.exchange.errors import ConfigurationError, exit_on_error
from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.plan import Plan, Sync, write_plan


def problem(devices: int = 4, **changes: Any) -> dict[str, Any]:
    """Equal devices that compute 1 ms forward and 2 ms backward a sample and block."""
    return {
        "format": 1,
        "devices": [{"id": f"node{d}:0", "memory_gigabytes": 16} for d in range(devices)],
        "links": {
            "latency_ms": [[0] * devices for _ in range(devices)],
            "bandwidth_gbit_per_s": [[8] * devices for _ in range(devices)],
        },
        "units": [
            {
                "kind": "block",
                "count": 4,
                "parameter_megabytes": 10,
                "state_megabytes": 40,
                "activation_megabytes": 1,
                "stored_megabytes": 3,
                "forward_ms": 1,
                "backward_ms": 2,
            }
        ],
        "batch_samples": 16,
        **changes,
    }


def plan(**changes: Any) -> Plan:
    return Plan(
        **{
            "stages": 2,
            "replicas": 2,
            "grid": ((0, 1), (2, 3)),
            "stage_units": ((0, 2), (2, 4)),
            "micro_batches": 8,
            "schedule": "1f1b",
            **changes,
        }
    )


def test_the_parts_of_an_iteration_by_hand():
    result = simulate(problem_from_json(problem()), plan(schedule="gpipe"), overlap=False)
    # 9 slots of 2 + 4 ms; every boundary adds one message of 1 MB at 1 GB/s, once forwards and once backwards.
    assert result.pipeline_seconds == pytest.approx(9 * 0.006 + 2 * 0.001)
    # 20 MB of gradients a stage, two replicas: each sends 20 MB; the first stage is last, nothing hides it.
    assert result.sync_seconds == pytest.approx(0.020)
    assert result.samples_per_second == pytest.approx(16 / result.iteration_seconds)
    assert result.memory_bytes[0] == pytest.approx(2 * 40e6 + 8 * 2 * 3e6)
    assert result.pipeline_bytes == pytest.approx(2 * 16 * 1e6)


def test_stalls_and_factors_slow_it_down_and_a_seed_repeats():
    whole = problem_from_json(problem())
    plain = simulate(whole, plan()).iteration_seconds
    stalls = Emulation(probability=0.2, seconds=0.01, seed=1)
    first = simulate(whole, plan(), iterations=10, emulation=stalls)
    again = simulate(whole, plan(), iterations=10, emulation=stalls)
    other = simulate(whole, plan(), iterations=10, emulation=Emulation(probability=0.2, seconds=0.01, seed=2))
    assert first.iterations == again.iterations != other.iterations
    assert min(first.iterations) > plain
    slow = simulate(whole, plan(), emulation=Emulation(factors=(1, 1, 3, 1)))
    assert slow.iteration_seconds > 2 * plain


def test_compressing_a_link_shortens_what_it_carries():
    links = {"latency_ms": [[0] * 4] * 4, "bandwidth_gbit_per_s": [[0.8] * 4] * 4}
    whole = problem_from_json(problem(links=links, codecs=[{"name": "int8", "ratio": 0.5, "seconds_per_byte": 0.0}]))
    packed = [
        {"source": a, "destination": b, "codec": "int8", "ratio": 0.5} for a, b in ((0, 2), (2, 0), (1, 3), (3, 1))
    ]
    from facility.exchange.messages.plan import CompressedLink

    before = simulate(whole, plan(schedule="gpipe"))
    after = simulate(whole, plan(schedule="gpipe", compressed_links=tuple(CompressedLink(**p) for p in packed)))
    # A message takes 10 ms, then 5 ms, against 2 and 4 ms of computing: the boundary sets the pace.
    assert after.pipeline_seconds < 0.75 * before.pipeline_seconds


def test_a_plan_for_another_problem_is_refused():
    whole = problem_from_json(problem())
    with pytest.raises(ConfigurationError, match="device 7"):
        simulate(whole, plan(grid=((0, 1), (2, 7))))
    with pytest.raises(ConfigurationError, match="covers 5 units"):
        simulate(whole, plan(stage_units=((0, 2), (2, 5))))
    with pytest.raises(ConfigurationError, match="calls device 1"):
        simulate(whole, plan(device_ids=("node0:0", "elsewhere:0", "node2:0", "node3:0")))


def test_the_command_writes_summary_trace_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "problem.json").write_text(json.dumps(problem()))
    write_plan(tmp_path / "plan.json", plan(sync=Sync(name="sharded_ps")))
    files = [str(tmp_path / name) for name in ("problem.json", "plan.json", "out.json", "trace.json", "page.html")]
    flags = ("--problem", "--plan", "--out", "--trace", "--html")
    assert main([x for pair in zip(flags, files, strict=True) for x in pair] + ["--json", "--iterations", "3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert len(printed["iterations"]) == 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    computed = [e for e in events if e["ph"] == "X" and e["cat"] == "forward"]
    assert len(computed) == 2 * 2 * 8
    assert "plotly" in (tmp_path / "page.html").read_text()
    assert main([*[x for pair in zip(flags[:2], files[:2], strict=True) for x in pair]]) == 0
    assert "bubble" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--problem and --plan"),
        (["--problem", "none.json", "--plan", "none.json"], "none.json"),
        (["--problem", "P", "--plan", "L", "--iterations", "0"], "--iterations"),
        (["--problem", "P", "--plan", "L", "--iterations", "9" * 400], "--iterations is 9"),
        (["--problem", "P", "--plan", "L", "--factors", "fast"], "--factors"),
        (["--problem", "P", "--plan", "L", "--stall-probability", "2"], "probability"),
    ],
)
def test_bad_input_gets_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments, message):
    (tmp_path / "P").write_text(json.dumps(problem()))
    write_plan(tmp_path / "L", plan())
    found = [str(tmp_path / a) if a in ("P", "L") else a for a in arguments]
    assert exit_on_error(lambda: main(found)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_measured_profile_has_the_samples_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`facility.measure` writes no batch: the three commands of the documentation ended at the last one."""
    said = []
    write_plan(tmp_path / "plan.json", plan())
    for given in (problem(), {key: value for key, value in problem().items() if key != "batch_samples"}):
        (tmp_path / "problem.json").write_text(json.dumps(given))
        assert main(["--problem", str(tmp_path / "problem.json"), "--plan", str(tmp_path / "plan.json")]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
