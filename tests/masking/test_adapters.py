"""Rounds of masked adapters: the plain mean of the factors comes out, from the round that makes them on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import Factors, read_factors, write_factors
from facility.exchange.files.durable import write_json
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.masking import MaskedMoments
from tests.aggregation import make
from tests.masking import federation as federations
from tests.masking.federation import Masking

OUT, IN, RANK = 300, 200, 4
A, B = ("base_model.model.layer.lora_A.weight", "base_model.model.layer.lora_B.weight")


def adapter_update(federation: Masking, name: str, tensors: make.Tensors, number: int) -> Path:
    """What training leaves: adapters alone, and their second moments."""
    base = federation.model(number)
    path = make.update(federation.place("plain"), tensors, base=base, facility=name)
    write_json(path / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": 16})
    write_factors(path, second_moments(name, number), steps=10.0 * (number + 1))
    write_manifest(path, dataclasses.replace(read_manifest(path), encoding="lora"))
    with_run(path, run_of(read_manifest(base)))
    return path


def second_moments(name: str, number: int) -> dict[str, Factors]:
    rng = np.random.default_rng([number, *name.encode()])
    shapes = {A: (RANK, IN), B: (OUT, RANK)}
    sums = {key: [rng.uniform(0.5, 1.5, size) for size in shape] for key, shape in shapes.items()}
    return {key: Factors(*((1e-5 * v / v.mean()).astype(np.float32) for v in pair)) for key, pair in sums.items()}


def masked_round(federation: Masking, trained: dict[str, make.Tensors], number: int, lost: str = "") -> None:
    roster = federation.roster([federation.keys(name, number) for name in federation.names], number)
    received = {}
    for name, tensors in trained.items():
        if name != lost:
            update = federation.masked(name, roster, adapter_update(federation, name, tensors, number), number)
            assert {entry.dtype for entry in open_checkpoint(update).tensors.values()} == {f"U{federation.bits}"}
            received[name] = federation.receive(name, update, number)
    request = federation.settle(roster, received, number)
    answers = [federation.answer(name, request) for name in federation.names if name != lost]
    assert federation.close(request, received, answers, number)[1:] == (number + 1, True)


@pytest.mark.parametrize("lost", ["", "gamma"])
def test_two_rounds_of_masked_adapters_are_the_plain_means(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch, lost: str
):
    """In the first round A begins with values of up to 1 / sqrt(inputs), beyond any step: the clip has room."""
    monkeypatch.setattr(federations, "SHAPES", {"layer.weight": (OUT, IN)})
    lora = LoraSettings(rank=RANK, targets=["layer"])
    moments = MaskedMoments(range=1.0)
    federation = Masking(
        root=tmp_path, signers=signers, changes={"lora": lora}, largest_step=0.02, kept=0.0, moments=moments
    )
    before: make.Tensors = {}
    for number in range(2):
        trained = {}
        for i, name in enumerate(federation.names):
            random = torch.Generator().manual_seed(10 * number + i)
            a = before.get(A, (torch.rand((RANK, IN), generator=torch.Generator().manual_seed(7)) * 2 - 1) / IN**0.5)
            b = before.get(B, torch.zeros(OUT, RANK))
            trained[name] = {
                A: a + 1e-3 * torch.randn(a.shape, generator=random),
                B: b + 1e-3 * torch.randn(b.shape, generator=random),
            }
        masked_round(federation, trained, number, lost)
        after = make.read_all(federation.archive.round_directory(number) / "state" / "master")
        there = [name for name in federation.names if name != lost]
        for key in (A, B):
            wanted = sum(trained[name][key].double() for name in there) / len(there)
            wrong = (after[key].double() - wanted).square().mean().sqrt()
            assert wrong < (2.5e-6 if number else 1e-5), key
        assert torch.equal(
            make.read_all(federation.model(number + 1))["layer.weight"],
            make.read_all(federation.model(0))["layer.weight"],
        )
        shared = read_factors(federation.model(number + 1), {A: (RANK, IN), B: (OUT, RANK)})[0]
        for key, one in shared.items():
            every = [second_moments(name, number)[key] for name in there]
            for found, each in ((one.rows, [v.rows for v in every]), (one.columns, [v.columns for v in every])):
                assert np.allclose(found, np.mean(each, axis=0), rtol=2e-7, atol=0), key
        assert shared.keys() == {A, B}
        before = {key: after[key].float() for key in (A, B)}


def test_a_clip_shortens_what_new_adapters_moved_and_not_what_they_began_with(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch
):
    """A's first values are many times as long as a step: a clip of the whole took them from every facility."""
    monkeypatch.setattr(federations, "SHAPES", {"layer.weight": (OUT, IN)})
    changes = {"lora": LoraSettings(rank=RANK, targets=["layer"]), "seed": 7}
    limit = {"clip_norm": 0.01}
    federation = Masking(root=tmp_path, signers=signers, changes=changes, largest_step=0.02, bits=32, privacy=limit)
    shapes = {A: (RANK, IN), B: (OUT, RANK)}
    begun = {key: torch.from_numpy(begun_factor(7, key, shape)) for key, shape in shapes.items()}
    names = federation.names
    steps = {name: make.random_tensors(i, shapes, torch.float32, 1e-3) for i, name in enumerate(names)}
    masked_round(federation, {name: {key: begun[key] + steps[name][key] for key in shapes} for name in names}, 0)
    after = make.read_all(federation.archive.round_directory(0) / "state" / "master")
    lengths = {name: sum(float(one.square().sum()) for one in steps[name].values()) ** 0.5 for name in names}
    assert min(lengths.values()) > 0.02, "all of them are clipped"
    for key in shapes:
        mean = sum(0.01 / lengths[name] * steps[name][key] for name in names) / len(names)
        torch.testing.assert_close(after[key], begun[key] + mean, rtol=0, atol=1e-7)
