"""`python -m facility.measure`: round robins, profiles, one rank and four ranks with emulated links."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from coordinator.problem.problem import Problem
from coordinator.problem.read import read_problem
from facility.exchange.errors import ConfigurationError, CrossFedError
from facility.exchange.messages.emulation import Emulation
from facility.measure import main
from facility.measuring.allocation import _write_scripts
from facility.measuring.emulated import Emulated, drawn, links_from, read_emulated
from facility.measuring.profile import (
    MeasuredDevice,
    Profile,
    SharedUplink,
    UnitSizes,
    UnitTimes,
    write_profile,
)
from facility.measuring.round_robin import flow_steps, groups_of, pairing_steps, rounds
from facility.measuring.traffic_control import Way, shaping_script
from facility.measuring.wire import EmulatedLinks, Wire
from tests.conftest import ROOT
from tests.pico import save_pico
from tests.ports import free_port

# --- round robin ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 64])
def test_in_rounds_everybody_meets_everybody_once_and_nobody_twice_in_a_round(count):
    found = rounds(count)
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(count), 2))
    assert all(len(set(itertools.chain(*r))) == 2 * len(r) for r in found)
    assert len(found) <= count


@pytest.mark.parametrize("labels", ["a", "ab", "aabb", "aaabbc", "abcabcab", "a" * 12 + "bb"])
def test_steps_hold_every_pair_once_and_use_a_way_out_once(labels):
    groups = groups_of(labels)
    plan = pairing_steps(groups)
    pairs = sorted(tuple(sorted(p)) for p in itertools.chain(*plan))
    assert pairs == list(itertools.combinations(range(len(labels)), 2))
    for step in plan:
        assert len(set(itertools.chain(*step))) == 2 * len(step)
        outside = [(labels[a], labels[b]) for a, b in step if labels[a] != labels[b]]
        touched = list(itertools.chain(*outside))
        assert len(set(touched)) == len(touched)


def test_sixty_four_ranks_on_eight_hosts_take_476_steps():
    assert len(pairing_steps(groups_of([rank // 8 for rank in range(64)]))) == 28 + 7 * 64


def test_crowds_load_every_way_out_in_both_directions():
    groups = groups_of("aabbc")
    flows = [crowd for step in flow_steps(groups) for crowd in step]
    assert [(0, 2), (1, 3)] in flows and [(2, 0), (3, 1)] in flows
    assert all(len(crowd) > 1 for crowd in flows)


# --- profiles ------------------------------------------------------------------------------------------------------


def times(kind: str, factor: float = 1.0) -> UnitTimes:
    return UnitTimes(
        kind=kind,
        samples=(1, 2, 4),
        forward_seconds=tuple(factor * (0.001 + 0.002 * n) for n in (1, 2, 4)),
        backward_seconds=tuple(factor * 0.004 * n for n in (1, 2, 4)),
    )


def profile() -> Profile:
    kinds = ("embedding", "block", "head")
    sizes = [
        UnitSizes(kind=k, parameter_bytes=4e6, state_bytes=16e6, activation_bytes=1e5, stored_bytes=3e5) for k in kinds
    ]
    devices = [
        MeasuredDevice(
            id=f"host{d}:cpu0", site="ab"[d], name="x", memory_bytes=8e9, times=tuple(times(k, 1.0 + d) for k in kinds)
        )
        for d in range(2)
    ]
    return Profile(
        devices=tuple(devices),
        latency_seconds=((0.0, 0.01), (0.01, 0.0)),
        bytes_per_second=((float("inf"), 2e7), (1e7, float("inf"))),
        shared=(SharedUplink(name="way", bytes_per_second=3e7, sources=(0,), destinations=(1,)),),
        chain=("embedding", *["block"] * 5, "head"),
        sizes=tuple(sizes),
        details={"tokens": 64},
    )


def test_a_line_through_times_is_overhead_and_seconds_a_sample():
    assert times("block").line("forward_seconds") == pytest.approx((0.001, 0.002))
    assert times("block").line("backward_seconds") == pytest.approx((0.0, 0.004))
    single = UnitTimes(kind="x", samples=(4,), forward_seconds=(0.008,), backward_seconds=(0.02,))
    assert single.line("forward_seconds") == (0.0, 0.002)
    falling = UnitTimes(kind="x", samples=(1, 2), forward_seconds=(0.004, 0.002), backward_seconds=(1.0, 1.0))
    assert falling.line("forward_seconds") == pytest.approx((0.003, 0.0))


def test_a_profile_is_a_problem_without_a_batch(tmp_path: Path):
    write_profile(tmp_path / "profile.json", profile())
    assert json.loads((tmp_path / "profile.json").read_text())["profile"]["tokens"] == 64
    problem = read_problem(tmp_path / "profile.json", defaults={"batch_samples": 8})
    assert isinstance(problem, Problem)
    assert [u.kind for u in problem.units] == ["embedding", *["block"] * 5, "head"]
    assert problem.devices[1].factor("block") == pytest.approx(2.0)
    assert problem.forward_seconds(4)[1, 1] == pytest.approx(2 * 0.009)
    assert problem.bandwidth[0, 1] == pytest.approx(2e7) and problem.bandwidth[1, 0] == pytest.approx(1e7)
    assert problem.latency[0, 1] == pytest.approx(0.01)
    assert problem.links.shared[0].sources == (0,)
    assert problem.devices[0].memory_bytes == 8e9
    with pytest.raises(ConfigurationError, match="batch_samples"):
        read_problem(tmp_path / "profile.json")


# --- emulation -----------------------------------------------------------------------------------------------------


def test_distributions_repeat_with_their_seed_and_keep_their_range():
    for name, low, high in (("sky", 2, 7), ("stimulator", 1, 2), ("speeds", 1, 4)):
        factors, memory = drawn(name, 50, 3)
        assert (factors, memory) == drawn(name, 50, 3) != drawn(name, 50, 4)
        assert low <= min(factors) and max(factors) <= high and max(memory) <= 1


def test_a_published_network_case_is_read_as_links(tmp_path: Path):
    (tmp_path / "case.json").write_text(
        json.dumps({"delay_ms": [[0, 10], [10, 0]], "bandwidth_gbit_per_s": [[0, 1], [2, 0]], "stages": 2})
    )
    found = read_emulated(tmp_path / "case.json", None, 2, 0).links
    assert found.latency_seconds[0, 1] == pytest.approx(0.01)
    assert found.bytes_per_second == pytest.approx({(0, 1): 1.25e8, (1, 0): 2.5e8})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a mapping"),
        ('{"factor": [1]}', "unknown key 'factor'"),
        ('{"factors": [0]}', "more than 0"),
        ('{"links": {"latency_ms": [[0]]}}', "expected 2 x 2"),
        ('{"links": {"speed": 3}}', "unknown key links.speed"),
        ('{"factors": 3}', "wrong type"),
    ],
)
def test_bad_pretence_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_emulated(tmp_path / "p.json", None, 2, 0)


def test_traffic_control_script_has_one_class_a_destination():
    text = shaping_script("eth0", [Way(address="10.0.0.2", latency_seconds=0.01, bytes_per_second=1.25e8)])
    assert "htb rate 1000000000bit" in text and "netem delay 10000us limit 1250" in text
    assert "match ip dst 10.0.0.2/32 flowid 1:2" in text
    assert subprocess.run(["sh", "-n"], input=text, text=True).returncode == 0
    with pytest.raises(ConfigurationError, match="interface"):
        shaping_script("eth0; rm", [])


def test_hosts_with_addresses_of_ipv6_have_scripts_too(tmp_path: Path):
    """Each had 127.0.0.1 there, so that all were one host and no script slowed anything down."""
    hosts = {"n1": "2001:db8::1", "n2": "2001:db8::2"}
    devices = [{"host": host, "address": address} for host, address in hosts.items() for _ in range(2)]
    options = argparse.Namespace(tc_out=tmp_path / "tc", tc_interface="eth0")
    links = EmulatedLinks(latency_seconds={(0, 2): 0.01}, bytes_per_second={(0, 2): 1e6}, uplinks=())
    _write_scripts(options, devices, Emulated(emulation=Emulation(), memory_factors=(), links=links))
    text = (tmp_path / "tc" / "tc-n1.sh").read_text()
    assert "protocol ipv6 parent 1: prio 2 u32 match ip6 dst 2001:db8::2/128 flowid 1:2" in text
    assert "netem delay 10000us" in text and "2001:db8::1" in (tmp_path / "tc" / "tc-n2.sh").read_text()


def test_links_from_matrices_leave_out_the_diagonal():
    assert links_from({"bandwidth_mbit_per_s": [[None, 8], [8, None]]}, 2).bytes_per_second == {
        (0, 1): 1e6,
        (1, 0): 1e6,
    }


def test_pieces_that_are_booked_at_one_moment_pass_a_shared_link_one_after_the_other():
    store = HashStore()
    ends = [Wire(rank, torch.device("cpu"), EmulatedLinks(), store)._book_piece("way", 1.0, 100.0) for rank in range(4)]
    assert ends == [101.0, 102.0, 103.0, 104.0]


# --- the command ---------------------------------------------------------------------------------------------------


def command(arguments: list[str], world: int) -> list[subprocess.CompletedProcess[str]]:
    """Run facility.measure as `world` ranks."""
    port = free_port()
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "facility.measure", *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=280)
            results.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return results


def test_one_rank_measures_every_kind_of_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = save_pico(tmp_path / "model", num_hidden_layers=3)
    out = tmp_path / "profile.json"
    capsys.readouterr()
    assert main(["--model", str(model), "--out", str(out), "--tokens", "16", "--samples", "1,4", "--json"]) == 0
    raw = json.loads(out.read_text())
    assert raw == json.loads(capsys.readouterr().out)
    embedding, block, head = raw["units"]
    assert (embedding["kind"], block["kind"], head["kind"]) == ("embedding", "block", "head")
    assert block["count"] == 3
    hidden, middle, vocabulary = 32, 64, 128
    weights = 2 * hidden * hidden + 2 * hidden * (hidden // 2) + 3 * hidden * middle + 2 * hidden
    assert block["parameter_bytes"] == 4 * weights
    assert 16 * weights <= block["state_bytes"] < 16 * weights + 1000  # parameters, gradients, two moments, step counts
    assert embedding["parameter_bytes"] == 4 * vocabulary * hidden
    assert block["activation_bytes"] == 16 * hidden * 4 and head["activation_bytes"] == 0
    assert block["stored_bytes"] > 5 * block["activation_bytes"]
    assert all(t > 0 for d in raw["profile"]["seconds"] for k in d["kinds"] for t in k["forward_seconds"])
    assert raw["devices"][0]["memory_bytes"] > 1e8


@pytest.mark.parametrize(
    ("family", "task"), [pytest.param("bert", "masked-lm", marks=pytest.mark.slow), ("gpt2", "causal-lm")]
)
def test_other_architectures_are_measured_too(tmp_path: Path, family: str, task: str):
    model = save_pico(tmp_path / "model", family)
    out = tmp_path / "profile.json"
    arguments = ["--model", str(model), "--out", str(out), "--tokens", "16", "--samples", "1", "--task", task]
    assert main([*arguments, "--repeats", "1", "--dtype", "bfloat16"]) == 0
    assert [(u["kind"], u["count"]) for u in json.loads(out.read_text())["units"]] == [
        ("embedding", 1),
        ("block", 4),
        ("head", 1),
    ]


@pytest.mark.slow
def test_four_ranks_see_their_links_and_a_shared_way_out(tmp_path: Path):
    """An emulated link can only be late, by what a busy machine takes to wake a process: here the links are so slow
    that the smallest message takes 160 ms."""
    model = save_pico(tmp_path / "model", num_hidden_layers=1)
    slow = {
        "factors": [1, 1, 20, 1],
        "memory_factors": [1, 0.25],
        "links": {
            "latency_ms": [[0, 1, 60, 60], [1, 0, 60, 60], [60, 60, 0, 1], [60, 60, 1, 0]],
            "bandwidth_megabytes_per_second": [
                [0, 9, 0.4, 0.4],
                [9, 0, 0.4, 0.4],
                [0.28, 0.28, 0, 9],
                [0.28, 0.28, 9, 0],
            ],
            "shared": [
                {"name": "way", "bandwidth_megabytes_per_second": 0.4, "sources": [0, 1], "destinations": [2, 3]}
            ],
        },
    }
    (tmp_path / "pretend.json").write_text(json.dumps(slow))
    out = tmp_path / "profile.json"
    arguments = ["--model", str(model), "--out", str(out), "--tokens", "16", "--samples", "1", "--clock", "cpu"]
    arguments += ["--groups", "a,a,b,b", "--pretend", str(tmp_path / "pretend.json"), "--repeats", "3"]
    results = command([*arguments, "--tc-out", str(tmp_path / "tc")], world=4)
    assert [r.returncode for r in results] == [0] * 4, results[0].stderr
    raw = json.loads(out.read_text())
    rate, latency = raw["links"]["bandwidth_megabytes_per_second"], raw["links"]["latency_ms"]
    for a, b in itertools.product((0, 1), (2, 3)):
        assert rate[a][b] == pytest.approx(0.4, rel=0.2)
        assert rate[b][a] == pytest.approx(0.28, rel=0.2)  # asymmetry is kept
        assert 60 <= latency[a][b] < 120 and latency[0][1] < latency[a][b] / 2
    (shared,) = raw["links"]["shared"]  # one way is shared, the way back is not
    assert (shared["name"], shared["sources"], shared["destinations"]) == ("a to b", [0, 1], [2, 3])
    assert shared["bandwidth_megabytes_per_second"] == pytest.approx(0.4, rel=0.25)
    assert raw["devices"][2]["slowdown"] > 5
    assert raw["devices"][1]["memory_bytes"] < 0.5 * raw["devices"][0]["memory_bytes"]
    assert len({d["id"] for d in raw["devices"]}) == 4
    problem = read_problem(out, defaults={"batch_samples": 8})
    assert isinstance(problem, Problem)
    assert problem.runtime.transport == "blocking" and not problem.runtime.overlap
    assert problem.runtime.agreement_seconds > 0 and problem.runtime.pass_seconds > 0
    assert problem.runtime.step_seconds > 0 and problem.units[1].update_seconds > 0


def test_bad_input_gets_one_error(tmp_path: Path):
    model = save_pico(tmp_path / "model", num_hidden_layers=1)
    good = ["--model", str(model), "--out", str(tmp_path / "p.json")]
    cases = {
        "--samples": [*good, "--samples", "0"],
        "--tokens": [*good, "--tokens", "100000"],
        "directory": ["--model", str(model), "--out", str(tmp_path / "none" / "p.json")],
        "config.json": ["--model", str(tmp_path), "--out", str(tmp_path / "p.json")],
        "--groups": [*good, "--groups", "a,b"],
    }
    for word, arguments in cases.items():
        with pytest.raises(CrossFedError, match=word):
            main(arguments)
    assert not (tmp_path / "p.json").exists()
