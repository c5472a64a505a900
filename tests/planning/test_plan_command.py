"""`python -m coordinator.plan`: what it writes, what it refuses, how it stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from coordinator import plan as command
from coordinator.planning.show import show_plan, what_if
from coordinator.planning.stop import Stop
from coordinator.problem.read import read_problem
from coordinator.simulation.described import read_scenario
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.plan import read_plan
from facility.measuring.emulated import read_emulated
from tests.planning.cases import BEST_KNOWN, published, whole


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(whole(devices=4, blocks=6)))
    return path


def run(*arguments: object) -> int:
    return command.main([str(a) for a in arguments])


@pytest.mark.parametrize("method", ["even", "dynamic", "exact", "place", "joint"])
def test_every_method_writes_a_plan_of_a_whole_problem(method, problem_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run("--problem", problem_file, "--out", out, "--method", method, "--iterations", 1, "--json") == 0
    plan = read_plan(out)
    plan.validate(world_size=4, layers=6)
    assert plan.method == method and plan.lower_bound_seconds <= plan.predicted_seconds
    assert json.loads(capsys.readouterr().out)["method"] == method
    assert plan.device_ids == ("d0", "d1", "d2", "d3")


def test_one_stage_is_said_as_one(tmp_path, capsys):
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(whole(devices=2, blocks=2)))
    run("--problem", file, "--out", tmp_path / "plan.json", "--iterations", 1, "--stages", 1, "--replicas", 2)
    assert (
        "joint: 1 stage x 2 replicas, " in (said := capsys.readouterr().out) and "- 1 stage x 2 replicas under" in said
    )


def test_joint_is_the_default_and_is_not_slower_than_even(problem_file, tmp_path):
    run("--problem", problem_file, "--out", tmp_path / "joint.json", "--iterations", 1)
    run("--problem", problem_file, "--out", tmp_path / "even.json", "--method", "even")
    joint, even = (read_plan(tmp_path / f"{n}.json") for n in ("joint", "even"))
    assert joint.method == "joint" and joint.predicted_seconds <= even.predicted_seconds


def test_a_batch_beside_the_problems_own_is_refused(problem_file, tmp_path):
    stated, out = json.loads(problem_file.read_text())["batch_samples"], tmp_path / "plan.json"
    common = ["--out", out, "--method", "even", "--batch-samples"]
    with pytest.raises(ConfigurationError, match=f"which states batch_samples {stated}: change it there"):
        run("--problem", problem_file, *common, 2 * stated)
    with pytest.raises(ConfigurationError, match="which knows no batch"):
        run("--problem", published(next(iter(BEST_KNOWN))), *common, 8)
    assert run("--problem", problem_file, *common, stated) == 0


@pytest.mark.parametrize("method", [(), ("--method", "even"), ("--method", "place")])
def test_an_order_is_refused_where_no_method_asks_for_it(method, problem_file, tmp_path):
    with pytest.raises(ConfigurationError, match="--order has no effect with --method"):
        run("--problem", problem_file, "--out", tmp_path / "plan.json", *method, "--order", "given")


def test_a_grid_is_refused_for_a_problem_that_has_none_to_choose(tmp_path):
    placement = published(next(iter(BEST_KNOWN)))
    with pytest.raises(ConfigurationError, match="--stages and --replicas have no effect"):
        run("--problem", placement, "--out", tmp_path / "plan.json", "--stages", 2, "--iterations", 0)


@pytest.mark.parametrize("name", BEST_KNOWN)
def test_published_placement(name, tmp_path):
    out = tmp_path / "plan.json"
    run("--problem", published(name), "--out", out, "--method", "place", "--iterations", 0, "--seed", 3)
    raw = json.loads(out.read_text())
    assert raw["cost"] <= BEST_KNOWN[name] + 5e-5
    assert (raw["stages"], raw["replicas"]) == (8, 8)
    assert sorted(d for row in raw["grid"] for d in row) == list(range(64))
    case = json.loads(published(name).read_text())
    delay, gbit = np.array(case["delay_ms"]) / 1e3, np.array(case["bandwidth_gbit_per_s"])
    data = max(
        sum(2 * (delay[d, e] + case["parameters_gigabytes_per_stage"] * 8 / (8 * gbit[d, e])) for e in row if e != d)
        for row in raw["grid"]
        for d in row
    )
    across = case["activations_gibibytes_per_boundary"]
    boundaries = sum(
        max(delay[a, b] + across * 8 / gbit[a, b] for a, b in zip(left, right, strict=True))
        for left, right in zip(raw["grid"], raw["grid"][1:], strict=False)
    )
    assert data + 2 * boundaries == pytest.approx(raw["cost"], rel=1e-9)


@pytest.mark.parametrize("method", ["even", "dynamic", "exact"])
def test_published_chain(method, tmp_path):
    out = tmp_path / "plan.json"
    path = published("sky-bert160")
    run("--problem", path, "--devices", "config-64", "--out", out, "--method", method, "--seconds", 20)
    raw, case = json.loads(out.read_text()), json.loads(path.read_text())
    flops = [case["flops"][0], *case["flops"][1:4] * 160, *case["flops"][4:]]
    speed = case["devices"]["config-64"]["relative_seconds_per_flop"]
    spans = sorted(raw["spans"], key=lambda s: s["first_layer"])
    covered = [unit for s in spans for unit in range(s["first_layer"], s["end_layer"])]
    assert covered == list(range(483)) and len({s["device"] for s in spans}) == len(spans)
    busiest = max(speed[s["device"]] * sum(flops[s["first_layer"] : s["end_layer"]]) for s in spans)
    assert busiest == pytest.approx(raw["cost"], rel=1e-9)
    bound = sum(flops) / sum(1 / s for s in speed)
    assert busiest / bound <= {"even": 2.05, "dynamic": 2.03, "exact": 1.085}[method]
    assert (raw["gap"] == 0) == (method == "exact")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"batch_samples": None}, [], "batch_samples is None"),
        ({}, ["--seconds", "0"], "--seconds is 0"),
        ({}, ["--seed", "-1"], "--seed is -1, expected 0 or more"),
        ({}, ["--seed", str(2**64)], "--seed is 18446744073709551616, expected 0 or more, at most 9223372036854775807"),
        ({}, ["--devices", "config-64"], "no named sets of devices"),
        ({}, ["--method", "exact", "--previous", "absent.json"], "cannot be read"),
        ({"units": []}, [], "no units"),
    ],
)
def test_bad_input_gets_one_clear_error_and_no_file(change, arguments, message, tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(whole() | change))
    with pytest.raises(ConfigurationError, match=message):
        run("--problem", path, "--out", tmp_path / "plan.json", *arguments)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("name", ["config", "config-17"])
def test_a_set_of_devices_that_is_not_there_is_refused_with_those_that_are(name, tmp_path):
    with pytest.raises(ConfigurationError, match=f"no set of devices is called '{name}'; there are .*config-16"):
        run("--problem", published("sky-bert160"), "--devices", name, "--out", tmp_path / "plan.json")


def test_the_wrong_method_for_a_case_names_the_right_one(tmp_path):
    with pytest.raises(ConfigurationError, match="serves --method place"):
        run("--problem", published("spot"), "--out", tmp_path / "plan.json", "--method", "exact")
    with pytest.raises(ConfigurationError, match="serves --method exact"):
        run(
            "--problem",
            published("sky-bert160"),
            "--devices",
            "config-16",
            "--out",
            tmp_path / "p",
            "--method",
            "joint",
        )


def test_exit_code_and_interrupt(tmp_path):
    """Bad input ends with 2 and one line; SIGINT ends the search early and the best so far is written."""
    problem_file = tmp_path / "problem.json"  # with more layouts than are all looked at
    problem_file.write_text(json.dumps(whole(devices=8, blocks=16)))
    bad = subprocess.run(
        [sys.executable, "-m", "coordinator.plan", "--problem", "absent.json", "--out", str(tmp_path / "p.json")],
        capture_output=True,
        text=True,
    )
    assert bad.returncode == 2 and bad.stderr.startswith("error: absent.json") and bad.stderr.count("\n") == 1
    out = tmp_path / "plan.json"
    line = [sys.executable, "-u", "-m", "coordinator.plan", "--problem", str(problem_file), "--out", str(out)]
    program = (
        "import runpy, sys; from coordinator.planning import stop; init = stop.Stop.__init__\n"
        "def marked(self, *a, **k):\n    init(self, *a, **k); print('searching', flush=True)\n"
        "stop.Stop.__init__ = marked; sys.argv = ['plan', *sys.argv[1:]]\n"
        "runpy.run_module('coordinator.plan', run_name='__main__')"
    )
    search = subprocess.Popen(
        [sys.executable, "-u", "-c", program, *line[4:], "--seconds", "3000"], stdout=subprocess.PIPE, text=True
    )
    assert search.stdout is not None and search.stdout.readline().strip() == "searching"
    time.sleep(1)
    search.send_signal(signal.SIGINT)
    assert search.wait(timeout=200) == 0
    plan = read_plan(out)
    assert plan.interrupted
    plan.validate(world_size=8, layers=16)


def test_replanning_keeps_a_good_plan(problem_file, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    run("--problem", problem_file, "--out", first, "--iterations", 2)
    run("--problem", problem_file, "--out", second, "--iterations", 1, "--previous", first)
    assert read_plan(second).grid == read_plan(first).grid
    assert read_plan(second).reasons[0].startswith("kept")


def test_the_work_of_a_round(tmp_path, capsys):
    path = tmp_path / "round.json"
    rows = [{"name": n, "seconds_per_step": s, "samples_per_step": 8} for n, s in (("a", 1.0), ("b", 3.0))]
    path.write_text(json.dumps({"facilities": rows, "round_samples": 320}))
    assert run("--problem", path, "--out", tmp_path / "budget.json", "--json") == 0
    assert json.loads((tmp_path / "budget.json").read_text())["steps"] == {"a": 30, "b": 10}
    assert json.loads(capsys.readouterr().out)["round_seconds"] == 30


def test_the_steps_of_a_round_do_not_replace_the_plan_of_a_layout(problem_file, tmp_path):
    """`crossfed plan` writes plan.json of both, and a trainer may be given the first."""
    from typer.testing import CliRunner

    from coordinator.cli import app

    work, out = tmp_path / "round.json", tmp_path / "plan.json"
    work.write_text(
        json.dumps(
            {"facilities": [{"name": "a", "seconds_per_step": 1.0, "samples_per_step": 8}], "round_samples": 320}
        )
    )
    run("--problem", problem_file, "--out", out, "--iterations", 1)
    before = out.read_bytes()
    given = [str(work), "--out", str(out)]
    with pytest.raises(ConfigurationError, match="is the plan of a layout: expected another --out"):
        run("--problem", *given)
    assert isinstance(CliRunner().invoke(app, ["plan", *given]).exception, ConfigurationError)
    assert out.read_bytes() == before
    assert not run("--problem", *given[:-1], tmp_path / "steps.json")
    assert not run("--problem", *given[:-1], tmp_path / "steps.json"), "its own are replaced"


def test_the_plan_is_shown(problem_file, tmp_path):
    out = tmp_path / "plan.json"
    run("--problem", problem_file, "--out", out, "--iterations", 1)
    problem, plan = read_problem(problem_file), read_plan(out)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))
    show_plan(plan, problem, console=console, seconds=1)
    text = console.export_text()
    for device in problem.devices:
        assert device.id in text
    for word in ("replica 0", "lower bound", "slack", "memory GB", "what would help", "one more device like"):
        assert word in text
    answers = what_if(problem, plan, Stop(1))
    assert [a.seconds for a in answers] == sorted(a.seconds for a in answers)
    assert all(a.seconds <= plan.predicted_seconds * (1 + 1e-9) for a in answers)


def test_crossfed_plan_writes_and_shows(problem_file, tmp_path):
    from typer.testing import CliRunner

    from coordinator.cli import app

    out = tmp_path / "plan.json"
    ran = CliRunner().invoke(app, ["plan", str(problem_file), "--out", str(out), "--seconds", "0.5"])
    assert ran.exit_code == 0, ran.output
    assert "replica 0" in ran.output and "what would help" in ran.output
    read_plan(out).validate(world_size=4, layers=6)


def crossfed_plan(*words: object) -> str:
    """What `crossfed plan` refuses the words for."""
    from typer.testing import CliRunner

    from coordinator.cli import app

    ran = CliRunner().invoke(app, ["plan", *map(str, words)])
    assert isinstance(ran.exception, InputError), ran.output
    return str(ran.exception)


@pytest.mark.parametrize(
    ("method", "said"), [("", "--method is empty"), ("joined", "--method is 'joined', expected one of joint, place")]
)
def test_crossfed_plan_takes_no_default_for_a_method_that_is_none(method, said, problem_file, tmp_path):
    """An empty one, as of a variable of the shell that is not set, was planned by the default without a word."""
    out = tmp_path / "plan.json"
    assert crossfed_plan(problem_file, "--out", out, "--method", method, "--seconds", "0.1").startswith(said)
    assert not out.exists()


WORK = {"facilities": [{"name": "a", "seconds_per_step": 1.0, "samples_per_step": 1}], "round_samples": 4}


@pytest.mark.parametrize(
    ("work", "words", "option"),
    [
        (True, ["--method", "exact"], "--method"),
        (True, ["--seed", "0"], "--seed"),
        (True, ["--previous", "plan.json"], "--previous"),
        (True, ["--queue", "a=1"], "--queue"),
        (True, ["--gain", "0.1"], "--gain"),
        (False, ["--queue", "a=1"], "--queue"),
        (False, ["--gain", "0.1"], "--gain"),
    ],
)
def test_an_option_that_a_plan_has_no_use_for_is_refused(work, words, option, problem_file, tmp_path):
    """`crossfed plan FEDERATION --method exact` left --method out without a word."""
    file, out = tmp_path / "work.json", tmp_path / "plan.json"
    file.write_text(json.dumps(WORK))
    problem = file if work else problem_file
    assert crossfed_plan(problem, "--out", out, *words).startswith(f"{option} has no effect ") and not out.exists()
    if words[1] != "0":  # the default's own value is no choice there
        with pytest.raises(InputError, match=f"^{option} has no effect "):
            run("--problem", problem, "--out", out, *words)


def test_crossfed_plan_searches_nothing_that_it_could_not_write(problem_file, tmp_path, monkeypatch):
    from coordinator import plan

    monkeypatch.setattr(plan, "solve_for", None)
    for out, message in ((tmp_path / "absent" / "plan.json", "make it first"), (tmp_path, "is a directory")):
        assert message in crossfed_plan(problem_file, "--out", out)


def test_planning_needs_no_torch():
    code = "import sys, coordinator.plan, coordinator.planning.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "read",
    [
        command.read_profile,
        read_problem,
        read_plan,
        read_scenario,
        lambda path: read_emulated(path, None, world=2, seed=0),
    ],
)
def test_json_that_is_nested_without_end_is_one_error(tmp_path, read):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="cannot be read as JSON: lists or mappings are nested too deep"):
        read(deep)
