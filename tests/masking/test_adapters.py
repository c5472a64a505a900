"""Rounds of masked adapters: the plain mean of the factors comes out, from the round that makes them on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.files.durable import write_json
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import read_manifest, run_of, with_run, write_manifest
from tests.aggregation import make
from tests.masking import federation as federations
from tests.masking.federation import Masking

OUT, IN, RANK = 300, 200, 4
A, B = ("base_model.model.layer.lora_A.weight", "base_model.model.layer.lora_B.weight")


def adapter_update(federation: Masking, name: str, tensors: make.Tensors, number: int) -> Path:
    """What training leaves: adapters alone."""
    base = federation.model(number)
    path = make.update(federation.place("plain"), tensors, base=base, facility=name)
    write_json(path / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": 16})
    write_manifest(path, dataclasses.replace(read_manifest(path), encoding="lora"))
    with_run(path, run_of(read_manifest(base)))
    return path


def masked_round(federation: Masking, trained: dict[str, make.Tensors], number: int, lost: str = "") -> None:
    roster = federation.roster([federation.keys(name, number) for name in federation.names], number)
    received = {}
    for name, tensors in trained.items():
        if name != lost:
            update = federation.masked(name, roster, adapter_update(federation, name, tensors, number), number)
            assert {entry.dtype for entry in open_checkpoint(update).tensors.values()} == {"U16"}
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
    federation = Masking(root=tmp_path, signers=signers, changes={"lora": lora}, largest_step=0.02)
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
        before = {key: after[key].float() for key in (A, B)}
