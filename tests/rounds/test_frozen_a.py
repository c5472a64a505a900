"""Adapters of which B alone is trained (`lora.freeze_a`): A is what the seed draws in every round, everywhere."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from facility.exchange.checkpoints.adapters import A, B
from facility.exchange.checkpoints.begun_adapters import begun_factor
from tests.federations import write_federation
from tests.rounds.by_steps import BySteps


def test_no_round_moves_what_all_facilities_have_alike(tmp_path: Path):
    """In half precision, by a server optimizer that takes any step, even one of rounding, for one of its own length."""
    training = {"lora": {"rank": 4, "freeze_a": True}, "export_dtype": "bfloat16", "weight_decay": 0.1}
    settings = {"aggregation": {"rule": "fedadam"}, "sending": {"encoding": "full"}}
    by_steps = BySteps(file=write_federation(tmp_path, ["a", "b"], training=training, **settings))
    assert not by_steps.run()
    earlier = load_file(tmp_path / "archive/round-0000/model/adapter_model.safetensors")
    master = load_file(tmp_path / "archive/round-0001/state/master/adapter_model.safetensors")
    assert {name for name in master if A in name} and {name for name in master if B in name}
    for name, tensor in master.items():
        if A in name:
            assert torch.equal(tensor, torch.from_numpy(begun_factor(3, name, tensor.shape))), name
        elif B in name:
            assert not torch.equal(tensor.bfloat16(), earlier[name].bfloat16()), name
