"""The trainer under every policy: replicas of one process, of FSDP shards, of pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.report import read_report
from facility.exchange.scheduling.policies import POLICIES
from tests.distributed import run_distributed
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset, write_masked_words
from tests.training.layouts import arguments, run_rounds

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"sharding": "NO_SHARD"},
    "sharded": {"replicas": 2},
    "pipelined": {"replicas": 2, "stages": 2, "units": [[0, 2], [2, 6]]},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "wave": {"every": 2},
    "local": {"every": 2},
    "diloco": {"every": 2, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
}
TRAINING = {"steps": 6, "batch_sequences": 8, "learning_rate": 1e-2}


def sync_of(policy: str, **changes: Any) -> dict[str, Any]:
    quick = {"heartbeat_seconds": 0.5, "missing_seconds": 60.0, "timeout_seconds": 120.0}
    return {"policy": policy} | quick | OPTIONS.get(policy, {}) | changes


def rounds(world: int, cases: list[tuple[str, list[str]]], timeout: float = 240) -> None:
    for results in run_distributed(run_rounds, world, cases, timeout=timeout):
        for name, code, said in results:
            assert code == 0, f"{name}:\n{said}"


@pytest.mark.slow
def test_every_policy_trains_every_layout(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data", train=200), save_pico(tmp_path / "model")
    cases = []
    for policy in sorted(POLICIES.built_in):
        for name, layout in LAYOUTS.items():
            place = tmp_path / policy / name
            case = arguments(place, model, dataset, layout=layout, sync=sync_of(policy), **TRAINING)
            cases.append((f"{policy} {name}", case))
    rounds(4, cases)
    for name, _ in cases:
        policy, layout = name.split()
        report = read_report(tmp_path / policy / layout / "out")
        assert report.loss_returned < report.loss_received - 0.05, name
        sync = report.details["sync"]
        if policy != "allreduce":  # which FSDP2 does in its mesh
            replicas = 4 if layout == "plain" else 2
            assert sync["policy"] == policy and sync["replicas"] == replicas, name
            assert sum(sync["updates"].values()) >= 6 * replicas and sync["aborted"] == 0, name


@pytest.mark.slow
def test_parameter_servers_give_the_weights_of_one_process(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    assert run_rounds(0, 1, [("one", arguments(tmp_path / "one", model, dataset, batch_sequences=5))])[0][1] == 0
    cases = [
        (
            f"{policy} {name}",
            arguments(tmp_path / policy / name, model, dataset, batch_sequences=5, layout=layout, sync=sync_of(policy)),
        )
        for policy in ("central_ps", "sharded_ps")
        for name, layout in LAYOUTS.items()
    ]
    rounds(4, cases)
    for name, _ in cases:
        policy, layout = name.split()
        # AdamW's first steps turn a rounding of a gradient near zero into some 1e-5 (the rate is 2e-3).
        assert largest_difference(tmp_path / "one" / "out", tmp_path / policy / layout / "out") < 3e-5, name


@pytest.mark.slow
def test_each_way_of_sampling_trains_and_is_its_own(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data", train=200), save_pico(tmp_path / "model")
    ways = ("dealt", "contiguous", "strided", "reshuffled")
    cases = [
        (
            way,
            arguments(
                tmp_path / way,
                model,
                dataset,
                layout=LAYOUTS["sharded"],
                sync=sync_of("local", samples=way),
                **TRAINING,
            ),
        )
        for way in ways
    ]
    rounds(4, cases)
    for number, way in enumerate(ways):
        report = read_report(tmp_path / way / "out")
        assert report.loss_returned < report.loss_received - 0.05, way
        for other in ways[:number]:
            assert largest_difference(tmp_path / way / "out", tmp_path / other / "out") > 1e-5, (way, other)


IN_STEP = ("central_ps", "sharded_ps", "local", "diloco")
AT_THEIR_OWN_PACE = ("partial_reduce", "adpsgd", "adpsgd_blocking", "wave")


@pytest.mark.slow
def test_a_paused_round_goes_on_under_every_policy(tmp_path: Path):
    """Where replicas exchange in step it ends in the same bits; else each goes on from its own weights and count."""
    dataset, model = write_dataset(tmp_path / "data", train=200), save_pico(tmp_path / "model")
    training = TRAINING | {"steps": 8, "layout": LAYOUTS["plain"]}

    def case(policy: str, name: str, stop: int) -> list[str]:
        outer = {"outer_momentum": 0.5} if policy == "diloco" else {}
        return arguments(
            tmp_path / policy / name,
            model,
            dataset,
            sync=sync_of(policy, **outer),
            round=0,
            limits={"stop_after": stop},
            **training,
        )

    def attempts() -> Iterator[tuple[str, str, int]]:
        for policy in IN_STEP:
            yield policy, "quiet", 0
        for policy in IN_STEP + AT_THEIR_OWN_PACE:
            yield policy, "paused", 4

    cases = [(f"{policy} {name}", case(policy, name, stop)) for policy, name, stop in attempts()]
    for results in run_distributed(run_rounds, 2, cases, timeout=240):
        for name, code, said in results:
            assert code == (Outcome.CHECKPOINTED if "paused" in name else 0), f"{name}:\n{said}"
    for policy in IN_STEP + AT_THEIR_OWN_PACE:
        pause = json.loads((tmp_path / policy / "paused/state/paused/state.json").read_text())
        assert [len(r["losses"]) for r in pause["replicas"]] == [r["steps"] for r in pause["replicas"]], policy
        assert all(0 < r["steps"] < 8 for r in pause["replicas"]) and len(pause["replicas"]) == 2, policy
    rounds(2, [(policy, case(policy, "paused", 0)) for policy in IN_STEP + AT_THEIR_OWN_PACE])
    for policy in IN_STEP:
        quiet, paused = (sha256_of(tmp_path / policy / name / "out/model.safetensors") for name in ("quiet", "paused"))
        assert quiet == paused, policy
    for policy in AT_THEIR_OWN_PACE:
        report = read_report(tmp_path / policy / "paused/out")
        updates = report.details["sync"]["updates"]
        assert 16 <= sum(updates.values()) <= 16 + 2 * 2, (policy, updates)
        assert report.loss_returned < report.loss_received - 0.05 and report.details["interruptions"] == 1, policy
    for policy in IN_STEP + AT_THEIR_OWN_PACE:
        for log in ("sync-0", "sync-0.1"):  # before and after the pause
            lines = (tmp_path / policy / "paused/state" / log / "groups.jsonl").read_text().splitlines()
            assert json.loads(lines[-1])["kind"] == "final", (policy, log)


@pytest.mark.slow
def test_a_pause_of_replicas_goes_on_in_another_layout(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data", train=200), save_pico(tmp_path / "model")
    place = tmp_path / "round"
    first = arguments(
        place,
        model,
        dataset,
        layout=LAYOUTS["plain"],
        sync=sync_of("partial_reduce", bound=0),
        limits={"stop_after": 3},
        **TRAINING,
    )
    for results in run_distributed(run_rounds, 2, [("first", first)]):
        assert results[0][1] == Outcome.CHECKPOINTED, results[0][2]
    assert run_rounds(0, 1, [("alone", arguments(place, model, dataset, **TRAINING))])[0][1] == 0
    report = read_report(place / "out")
    assert report.steps == 6 and report.loss_returned < report.loss_received - 0.05


@pytest.mark.slow
def test_outer_momentum_is_kept_between_rounds_where_the_optimizer_is(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data", train=200), save_pico(tmp_path / "model")
    sync = sync_of("diloco", outer_momentum=0.5)
    cases = []
    for name, keep in (("kept", True), ("fresh", False)):
        for number in range(2):
            place = tmp_path / name
            case = arguments(
                place, model, dataset, round=number, layout=LAYOUTS["plain"], sync=sync, keep_optimizer=keep, **TRAINING
            )
            case[case.index("--out") + 1] = str(place / f"out-{number}")
            cases.append((f"{name} {number}", case))
    rounds(2, cases)
    state = open_checkpoint(tmp_path / "kept/state/round-1")
    momenta = [name for name in state.tensors if name.startswith("momentum.")]
    assert len(momenta) == len([name for name in state.tensors if name.startswith("exp_avg.")]) > 0
    assert json.loads((tmp_path / "fresh/state/round-1/state.json").read_text())["sync"] == []
    assert largest_difference(tmp_path / "kept/out-0", tmp_path / "fresh/out-0") == 0
    assert largest_difference(tmp_path / "kept/out-1", tmp_path / "fresh/out-1") > 1e-5


@pytest.mark.slow
def test_bert_in_stages_under_partial_reduce(tmp_path: Path):
    bert_under(tmp_path, ["partial_reduce", "adpsgd"], world=4, layout=LAYOUTS["pipelined"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_bert_in_four_stages_under_every_policy(tmp_path: Path):
    """SD-PIPE's experiment in small; longer than a minute: eight processes, nine policies."""
    layout = {"replicas": 2, "stages": 4, "units": [[0, 2], [2, 3], [3, 4], [4, 6]]}
    bert_under(tmp_path, sorted(POLICIES.built_in), world=8, layout=layout, timeout=1800)


def bert_under(
    tmp_path: Path, policies: list[str], *, world: int, layout: dict[str, Any], timeout: float = 280
) -> None:
    dataset = write_masked_words(tmp_path / "data", train=200)
    model = save_pico(tmp_path / "model", "bert")
    cases = [
        (
            policy,
            arguments(
                tmp_path / policy,
                model,
                dataset,
                layout=layout,
                sync=sync_of(policy),
                **TRAINING | {"steps": 20, "learning_rate": 2e-3},
            ),
        )
        for policy in policies
    ]
    rounds(world, cases, timeout=timeout)
    for policy in policies:
        report = read_report(tmp_path / policy / "out")
        assert report.loss_returned < report.loss_received, policy


@pytest.mark.slow
def test_moments_that_a_policy_has_reset_begin_the_next_round_as_new_ones(tmp_path: Path):
    """Zero moments that count as old ones make a step of another length, by Adam's correction for bias."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    sync = sync_of("local", every=2, optimizer_state="reset")
    training: dict[str, Any] = {"layout": LAYOUTS["plain"], "sync": sync, "steps": 4, "beta2": 0.999}
    first = arguments(tmp_path / "kept", model, dataset, **training)
    first[first.index("--out") + 1] = str(tmp_path / "first")
    cases = [("first", first)]
    cases += [(name, arguments(tmp_path / name, model, dataset, 1, **training)) for name in ("kept", "new")]
    rounds(2, cases)
    assert json.loads((tmp_path / "kept/state/round-1/state.json").read_text())["optimizer_steps"] == 0
    assert largest_difference(tmp_path / "kept/out", tmp_path / "new/out") == 0.0
