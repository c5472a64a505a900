"""Law: a step adds up the gradients of the records, each clipped by itself. Oracle: autograd, record by record."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from facility.dataset import LOSS, open_dataset
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.privacy import LEAST_CLIP, DifferentialSettings
from facility.training.data.tasks import CausalLM, MaskedLM
from facility.training.parallel.compute import Precision
from facility.training.privacy.gradients import RecordGradients, add_clipped, check_model
from facility.training.privacy.rows import RowReader
from facility.training.privacy.units import Units, units_of, whole_blocks
from facility.training.shards import shard_of
from facility.training.trained_rank import TrainedRank
from tests.pico import pico_config
from tests.training.families import tiny_config
from tests.training.federation import write_dataset

FLOAT = Precision(torch.device("cpu"), torch.float32, casts_itself=False)
FAMILIES = ["llama", "qwen2", "gpt2", "gemma3_text", "mixtral"]


def model_of(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = pico_config(family) if family in ("llama", "qwen2", "gpt2") else tiny_config(family)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def gradients_of(model: nn.Module, *, vectorise: bool = True) -> RecordGradients:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return RecordGradients(model, trained, CausalLM(), FLOAT, vectorise=vectorise)


def oracle(model: nn.Module, records: list[list[torch.Tensor]], limit: float) -> list[torch.Tensor]:
    """Each record by a forward and backward pass of its own, in plain torch."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(one) for one in trained]
    for rows in records:
        losses = [F.cross_entropy(model(input_ids=r[None]).logits[0, :-1], r[1:], reduction="sum") for r in rows]
        loss = sum(losses) / sum(len(r) - 1 for r in rows)
        found = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        norm = math.sqrt(sum(one.double().square().sum().item() for one in found))
        for whole, one in zip(total, found, strict=True):
            whole += one * min(1.0, limit / norm)
    return total


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    scale = max(one.abs().max().item() for one in expected)
    assert scale > 0
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max().item() < 1e-5 * max(1.0, scale)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory):
    return open_dataset(write_dataset(tmp_path_factory.mktemp("gradients") / "data", train=12, block_tokens=8))


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(1e-2, id="all-clipped", marks=pytest.mark.slow),
        pytest.param(0.7, id="some-clipped"),
        pytest.param(1e6, id="none-clipped", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", [FAMILIES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES[1:])])
def test_the_sum_is_that_of_the_records_one_at_a_time(family: str, limit: float, dataset: Any):
    model = model_of(family)
    units = whole_blocks(12, 8)
    chosen = [0, 3, 4, 7, 11]
    rows = [[torch.from_numpy(dataset.split("train")[i].astype("int64"))] for i in chosen]
    expected = oracle(model, rows, limit)
    for vectorise, most in ((True, 2), (True, 32), (False, 3)):
        gradients = gradients_of(model, vectorise=vectorise)
        reader = RowReader(dataset, "train", units, CausalLM(), model, most_rows=most)
        assert_equal(gradients.clipped_sum(reader.read(chosen), limit), expected)
        assert gradients.vectorise == vectorise, "a family that transformers can vectorise no more"


def with_adapters(rank: int) -> nn.Module:
    """A model of which adapters of this rank alone are trained; none of them is zero."""
    from peft import LoraConfig, inject_adapter_in_model

    model = model_of("llama")
    inject_adapter_in_model(LoraConfig(r=rank, target_modules=["q_proj", "down_proj"]), model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 8)
    return model


def test_adapters_alone_are_clipped_and_added_up(dataset: Any):
    model = with_adapters(2)
    reader = RowReader(dataset, "train", whole_blocks(12, 8), CausalLM(), model, most_rows=4)
    rows = [[torch.from_numpy(dataset.split("train")[i].astype("int64"))] for i in range(6)]
    assert_equal(gradients_of(model).clipped_sum(reader.read(range(6)), 0.3), oracle(model, rows, 0.3))


@pytest.mark.parametrize("lora", [LoraSettings(rank=4, trained_rank=1), LoraSettings(rank=4, freeze_a=True)])
@pytest.mark.parametrize("vectorise", [True, False], ids=["vectorised", "one by one"])
def test_components_that_are_not_trained_take_nothing_of_a_records_clip(
    dataset: Any, vectorise: bool, lora: LoraSettings
):
    """With `trained_rank` 1 of 4 they took half of it, and noise is as large whatever is left."""
    model = with_adapters(4)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts = [shard_of(name.replace(".default.", "."), parameter) for name, parameter in named]
    first, columns = (0, 4) if lora.freeze_a else (1, 1)  # those of A and of B that are held
    beyond = [(slice(first, None),) if "lora_A" in name else (slice(None), slice(columns, None)) for name, _ in named]
    gradients = RecordGradients(
        model, [p for _, p in named], CausalLM(), FLOAT, vectorise=vectorise, held=TrainedRank(parts, lora)
    )
    reader, limit = RowReader(dataset, "train", whole_blocks(12, 8), CausalLM(), model, most_rows=4), 0.02
    found = gradients.clipped_sum(reader.read(range(6)), limit)

    total = [torch.zeros_like(parameter) for _, parameter in named]
    for row in dataset.split("train")[:6]:
        ids = torch.from_numpy(row.astype("int64"))
        loss = F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:])
        own = torch.autograd.grad(loss, [parameter for _, parameter in named])
        for one, index in zip(own, beyond, strict=True):
            one[index] = 0.0
        norm = math.sqrt(sum(one.double().square().sum().item() for one in own))
        assert norm > limit, "every record is clipped"
        for whole, one in zip(total, own, strict=True):
            whole += one * (limit / norm)
    assert_equal(found, total)


def test_a_document_of_several_pieces_is_clipped_as_one(dataset: Any):
    model = model_of("llama")
    pieces = np.array([[0, 0, 8], [1, 0, 8], [2, 0, 8], [5, 0, 8]])
    units = Units(pieces=pieces, offsets=np.array([0, 3, 4]))
    block = [torch.from_numpy(row.astype("int64")) for row in dataset.split("train")[:6]]
    for most in (1, 4):
        reader = RowReader(dataset, "train", units, CausalLM(), model, most_rows=most)
        found = gradients_of(model).clipped_sum(reader.read([0, 1]), 0.5)
        assert_equal(found, oracle(model, [block[:3], [block[5]]], 0.5))


def test_an_empty_sample_is_a_sum_of_nothing(dataset: Any):
    model = model_of("llama")
    reader = RowReader(dataset, "train", whole_blocks(12, 8), CausalLM(), model, most_rows=4)
    found = gradients_of(model).clipped_sum(reader.read([]), 1.0)
    assert [tuple(one.shape) for one in found] == [tuple(p.shape) for p in model.parameters()]
    assert all(not one.any() for one in found)


def test_no_record_contributes_more_than_the_clip_or_anything_that_is_not_finite():
    torch.manual_seed(0)
    of_records = [torch.randn(5, 3, 4), torch.randn(5, 7)]
    of_records[0][1] = math.inf
    of_records[1][2, 0] = math.nan
    of_records[0][3] *= 1e20
    of_records[0][4], of_records[1][4] = 0.0, 0.0
    for record in range(5):
        total = [torch.zeros(3, 4), torch.zeros(7)]
        add_clipped(total, [one[record : record + 1] for one in of_records], 0.25)
        norm = math.sqrt(sum(one.double().square().sum().item() for one in total))
        assert norm == pytest.approx({0: 0.25, 3: 0.25}.get(record, 0.0), rel=1e-5)


@pytest.mark.parametrize("clip", [1e-44, 2.2e-44, 1e-40, LEAST_CLIP, 1e-3, 1e30])
def test_no_record_contributes_more_than_any_clip_that_settings_may_name(clip: float):
    """Of 2.2e-44 a record of a thousand even values had 1.96 times the clip: each was rounded up to float32's least,
    and the noise was made for half of what it hid."""
    try:
        limit = DifferentialSettings(epsilon=1.0, delta=1e-6, clip=clip).clip
    except ConfigurationError as error:
        assert "clip" in str(error) and clip < LEAST_CLIP
        return
    for seed in range(3):
        drawn = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed))
        values = drawn if seed else torch.ones(1, 1000)
        total = [torch.zeros(1000)]
        add_clipped(total, [values], limit)
        assert total[0].double().norm().item() <= limit * (1 + 1e-6)


@pytest.mark.slow
def test_the_pieces_of_documents_attend_to_nothing_else(tmp_path: Path):
    """A unit's gradient from blocks that hold several documents is that of the document alone."""
    from tests.training.test_documents import VOCABULARY, prepare_chats

    apart = prepare_chats(tmp_path / "apart")
    alone = prepare_chats(tmp_path / "alone", documents="padded")
    model = model_of("llama")
    model.resize_token_embeddings(VOCABULARY)
    found = []
    for prepared in (apart, alone):
        units = units_of(prepared, "train", "document", most=1)
        assert len(units) == 20 and units.left_out == 0
        reader = RowReader(prepared, "train", units, CausalLM(marked=True), model, most_rows=4)
        found.append(gradients_of(model).clipped_sum(reader.read(range(20)), 0.2))
    assert_equal(*found)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
KINDS = {
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    "longrope": ("phi3", LONGROPE | {"rope_theta": 1e4, "original_max_position_embeddings": 8}),
}


@pytest.mark.parametrize("kind", [*KINDS, "as they are"])
def test_a_record_does_not_change_what_becomes_of_those_beside_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """However long it is: else a unit more or less would change the sum by more than the clip."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, rotary = KINDS.get(kind, ("llama", {"rope_type": "default", "rope_theta": 1e4}))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 8, "pad_token_id": 0}
    more |= {"max_position_embeddings": 32, "original_max_position_embeddings": 8} if kind == "longrope" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **more, rope_parameters=rotary, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    joined = open_dataset(write_dataset(tmp_path / "data", train=4, block_tokens=32))
    prepared = dataclasses.replace(joined, manifest=dataclasses.replace(joined.manifest, documents="padded"))
    monkeypatch.setattr(type(prepared), "marks", lambda self, split: np.full(self.split(split).shape, LOSS, np.uint8))
    pieces = np.array([[0, 0, 6], [1, 0, 32], [2, 0, 7]])
    units = Units(pieces=pieces, offsets=np.arange(4))

    def total(chosen: list[int], most: int) -> torch.Tensor:
        reader = RowReader(prepared, "train", units, CausalLM(), model, most_rows=most)
        found = gradients_of(model).clipped_sum(reader.read(chosen), 0.5)
        return torch.cat([one.flatten() for one in found])

    alone = sum(total([unit], 1) for unit in (0, 1, 2))
    for together in (total([0, 1, 2], 1), total([1, 0, 2], 3), total([0, 2, 1], 2)):
        assert (together - alone).abs().max() < 1e-5, "the sum is one of what each is alone"


def test_a_unit_less_leaves_what_is_drawn_for_the_others_as_it_was():
    """Which tokens of a block are hidden was drawn by its number, so that a unit less changed all behind it."""
    blocks = np.random.default_rng(0).integers(3, 128, (9, 16), dtype=np.int32)

    def rows_of(held: np.ndarray) -> list[tuple[list[int], list[int]]]:
        manifest = SimpleNamespace(documents="joined", task="masked-lm", block_tokens=16)
        dataset: Any = SimpleNamespace(manifest=manifest, split=lambda name: held)
        units, task = whole_blocks(len(held), 16), MaskedLM(1, 128, (0, 1, 2))
        reader = RowReader(dataset, "train", units, task, nn.Linear(1, 1), most_rows=4)
        read = reader.read(range(len(held)), 7)
        return [
            pair for one in read for pair in zip(one.inputs["input_ids"].tolist(), one.targets.tolist(), strict=True)
        ]

    whole = rows_of(blocks)
    assert len({tuple(token == 1 for token in ids) for ids, _ in whole}) > 5, "each block has draws of its own"
    for gone in (0, 4, 8):
        assert rows_of(np.delete(blocks, gone, axis=0)) == [*whole[:gone], *whole[gone + 1 :]]


def test_a_batch_normalisation_is_refused():
    with pytest.raises(InputError, match="batch normalisation"):
        check_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
