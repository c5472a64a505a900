"""Laws of small values between ranks: plain data arrives as it was, and no Python object ever travels."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from facility.training.processes.exchange import LARGEST_BYTES, checked_size, decode, encode
from tests.distributed import run_distributed
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, run_rounds

OBJECTS = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object|\bimport (c?[pP]ickle|dill|marshal)\b")


def test_no_code_of_the_facility_sends_or_reads_objects():
    for file in (Path(__file__).parents[2] / "facility").rglob("*.py"):
        found = OBJECTS.search(file.read_text())
        assert found is None, f"{file} uses {found and found.group()}: send JSON in tensors (processes/exchange.py)"


def exchange(rank: int, world: int) -> tuple[Any, ...]:
    from facility.training.processes.exchange import all_gather_json, broadcast_json

    longer = {"rank": rank, "text": "é" * 1000 * rank, "losses": [0.1, -1.0, 1e-300]}
    return all_gather_json(longer), all_gather_json(None), broadcast_json([rank, "a"])


def test_every_rank_gets_every_value_whatever_its_length():
    expected = [{"rank": r, "text": "é" * 1000 * r, "losses": [0.1, -1.0, 1e-300]} for r in range(3)]
    assert run_distributed(exchange, 3) == [(expected, [None] * 3, [0, "a"])] * 3


def test_only_plain_data_of_a_bounded_size_is_taken():
    assert math.isnan(decode(encode(math.nan)))
    with pytest.raises(TypeError):
        encode(object())
    with pytest.raises(ValueError):
        decode(torch.frombuffer(bytearray(b"\x80\x04cos\nsystem\n"), dtype=torch.uint8))
    for count in (0, -1, LARGEST_BYTES + 1, 2**62):
        with pytest.raises(ValueError, match="announces"):
            checked_size(count)


def rounds_without_objects(rank: int, world: int, cases: list[tuple[str, list[str]]]) -> list[tuple[str, int, str]]:
    from torch.distributed import distributed_c10d

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("an object was about to travel")

    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refused  # type: ignore[assignment]
    return run_rounds(rank, world, cases)


@pytest.mark.slow
def test_torch_itself_sends_no_object_during_a_round(tmp_path: Path, pico_llama: Path):
    dataset = write_dataset(tmp_path / "data")
    layouts: dict[str, dict[str, Any]] = {"shards": {}, "copies": {"sharding": "NO_SHARD"}, "stages": {"stages": 2}}
    cases = [(name, arguments(tmp_path / name, pico_llama, dataset, layout=layout)) for name, layout in layouts.items()]
    for results in run_distributed(rounds_without_objects, 2, cases):
        assert [code for _, code, _ in results] == [0] * 3, results
