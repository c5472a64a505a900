"""Ranks that differ between facilities: what is beyond a facility's own stays as received, in every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from facility.exchange.checkpoints.adapters import A, B
from facility.exchange.checkpoints.second_moments import has_factors
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.report import read_report
from facility.sync.policies import partial_reduce
from facility.sync.runtime.flat import local_gradients
from facility.sync.runtime.gradient_buckets import GradientBuckets
from facility.training.trained_rank import trained_whole
from tests.distributed import run_distributed
from tests.pico import save_pico
from tests.training.federation import largest_difference, weights, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in, run_rounds


@pytest.mark.slow
def test_components_beyond_the_rank_stay_as_received(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    rounds_in([("begun", arguments(tmp_path / "begun", model, dataset, lora={"rank": 4}))])
    plain, adapters = (
        load_file(model / "model.safetensors"),
        load_file(tmp_path / "begun/out/adapter_model.safetensors"),
    )
    save_file(plain | adapters, model / "model.safetensors", {"format": "pt"})

    own = {"lora": {"rank": 4, "trained_rank": 1}, "weight_decay": 0.1, "optimizer_state": "shared"}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset, **own))])
    rounds_in([("fsdp", arguments(tmp_path / "fsdp", model, dataset, **(own | TWO["fsdp"])))], ranks=2)
    assert largest_difference(tmp_path / "one/out", tmp_path / "fsdp/out") < 1e-5

    assert not has_factors(tmp_path / "one/out"), "0 beyond the rank, they would lower the mean over all facilities"

    returned = load_file(tmp_path / "one/out/adapter_model.safetensors")
    assert returned.keys() == adapters.keys()
    for name, after in returned.items():
        before = adapters[name]
        trained = (slice(0, 1), slice(None)) if A in name else (slice(None), slice(0, 1))
        beyond = (slice(1, None), slice(None)) if A in name else (slice(None), slice(1, None))
        assert (A in name) != (B in name)
        assert torch.equal(after[beyond], before[beyond]), name
        assert not torch.equal(after[trained], before[trained]), name


class SentAtOnce:
    """In place of an exchange in the background, which may be anywhere when the backward pass ends: one that has sent
    everything by then, and brings back what it sent."""

    def __init__(self, work: Callable[..., None], samples: float, filling: GradientBuckets) -> None:
        parameters = [parameter for bucket in filling.buckets for parameter in bucket]
        self.sent = [(gradient, gradient.clone()) for gradient in local_gradients(parameters)]
        self.work = functools.partial(work, samples, filling)

    def result(self) -> None:
        for gradient, before in self.sent:
            gradient.copy_(before)
        self.work()


def sent_at_once(rank: int, world: int, cases: list[tuple[str, list[str]]]) -> list[tuple[str, int, str]]:
    with pytest.MonkeyPatch.context() as context:
        context.setattr(partial_reduce, "BackgroundTask", SentAtOnce)
        return run_rounds(rank, world, cases)


def test_gradients_of_what_is_not_trained_do_not_come_back_from_other_replicas(tmp_path: Path):
    """Those that were sent as the backward pass went on came back with them: into the norm, and into the moments."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    own: dict[str, Any] = {"lora": {"rank": 4, "trained_rank": 1}, "layout": {"sharding": "NO_SHARD"}}
    case = arguments(tmp_path / "two", model, dataset, **own, sync={"policy": "partial_reduce"})
    results = run_distributed(sent_at_once, 2, [("two", case)])
    assert [code for ((_, code, _),) in results] == [0, 0], results
    assert read_report(tmp_path / "two/out").details["sync"]["announced_early_here"]
    moments = {k: v for k, v in weights(tmp_path / "two/state/round-0").items() if "exp_avg" in k and B in k}
    assert moments and all(not moment[:, 1:].any() for moment in moments.values())
    assert any(moment[:, :1].any() for moment in moments.values())


def test_moments_leave_of_what_is_trained_whole():
    shapes = {"x.lora_A.weight": (4, 8), "x.lora_B.weight": (8, 4), "head.weight": (8, 8)}
    for rank, sent in ((0, {*shapes}), (4, {*shapes}), (1, {"head.weight"})):
        assert trained_whole(shapes, LoraSettings(rank=4, trained_rank=rank)).keys() == sent
    assert trained_whole(shapes, LoraSettings(rank=4, freeze_a=True)).keys() == {"x.lora_B.weight", "head.weight"}


def test_no_more_than_the_rank_can_be_trained():
    with pytest.raises(ConfigurationError, match="trained_rank is 8"):
        LoraSettings(rank=4, trained_rank=8)
