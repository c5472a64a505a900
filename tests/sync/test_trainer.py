"""The trainer under every policy: replicas of one process, of FSDP shards, of pipeline stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from facility.exchange.report import read_report
from facility.sync.registry import POLICIES
from tests.distributed import run_distributed
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
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


def masked(directory: Path) -> Path:
    """Make a prepared dataset one for masked language models, with a tokenizer that has a mask token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{i}": i for i in range(3, 128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(directory / "tokenizer")
    raw = json.loads((directory / "dataset.json").read_text())
    (directory / "dataset.json").write_text(json.dumps(raw | {"task": "masked-lm"}))
    return directory


def test_every_policy_trains_every_layout(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data", train=200), save_pico(tmp_path / "model")
    cases = []
    for policy in sorted(POLICIES):
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


def test_parameter_servers_give_the_weights_of_one_process(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    assert run_rounds(0, 1, [("one", arguments(tmp_path / "one", model, dataset, batch_sequences=5))])[0][1] == 0
    cases = [
        (f"{policy} {name}", arguments(tmp_path / policy / name, model, dataset, batch_sequences=5, layout=layout,
                                       sync=sync_of(policy)))
        for policy in ("central_ps", "sharded_ps")
        for name, layout in LAYOUTS.items()
    ]  # fmt: skip
    rounds(4, cases)
    for name, _ in cases:
        policy, layout = name.split()
        # AdamW's first steps turn a rounding of a gradient near zero into some 1e-5 (the rate is 2e-3).
        assert largest_difference(tmp_path / "one" / "out", tmp_path / policy / layout / "out") < 3e-5, name


def test_each_way_of_sampling_trains_and_is_its_own(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data", train=200), save_pico(tmp_path / "model")
    ways = ("dealt", "contiguous", "strided", "reshuffled")
    cases = [
        (way, arguments(tmp_path / way, model, dataset, layout=LAYOUTS["sharded"], sync=sync_of("local", samples=way),
                        **TRAINING))
        for way in ways
    ]  # fmt: skip
    rounds(4, cases)
    for number, way in enumerate(ways):
        report = read_report(tmp_path / way / "out")
        assert report.loss_returned < report.loss_received - 0.05, way
        for other in ways[:number]:
            assert largest_difference(tmp_path / way / "out", tmp_path / other / "out") > 1e-5, (way, other)


def test_bert_in_stages_under_partial_reduce(tmp_path: Path):
    bert_under(tmp_path, ["partial_reduce", "adpsgd"], world=4, layout=LAYOUTS["pipelined"])


@pytest.mark.slow
def test_bert_in_four_stages_under_every_policy(tmp_path: Path):
    """SD-PIPE's experiment in small; longer than a minute: eight processes, nine policies."""
    layout = {"replicas": 2, "stages": 4, "units": [[0, 2], [2, 3], [3, 4], [4, 6]]}
    bert_under(tmp_path, sorted(POLICIES), world=8, layout=layout)


def bert_under(tmp_path: Path, policies: list[str], *, world: int, layout: dict[str, Any]) -> None:
    dataset = masked(write_dataset(tmp_path / "data", train=200))
    model = save_pico(tmp_path / "model", "bert")
    cases = [
        (policy, arguments(tmp_path / policy, model, dataset, layout=layout, sync=sync_of(policy), **TRAINING | {"steps": 20, "learning_rate": 2e-3}))
        for policy in policies
    ]  # fmt: skip
    rounds(world, cases, timeout=280)
    for policy in policies:
        report = read_report(tmp_path / policy / "out")
        assert report.loss_returned < report.loss_received, policy
