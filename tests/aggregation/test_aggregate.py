"""Laws of the aggregation step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.pico import save_pico

SHAPES = {"a.weight": (300, 401), "b.weight": (70_000,), "c.bias": (7,), "d.empty": (0, 4)}


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def federation(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Path]]:
    start = make.random_tensors(0, SHAPES, request.param)
    base = make.model(tmp_path / "base", start)
    updates = [
        make.update(tmp_path / f"u{i}", make.moved(start, i + 1), base=base, facility=f"f{i}", tokens=t)
        for i, t in enumerate((1200, 345, 2210))
    ]
    return base, updates


def test_mean_by_tokens_is_the_correctly_rounded_weighted_mean(federation, tmp_path: Path):
    base, updates = federation
    record = aggregate(
        base=base, updates=updates, out=tmp_path / "out", settings=AggregationSettings(rule="mean", **make.UNBOUNDED)
    )
    total = sum((1200, 345, 2210))
    parts = [make.read_all(u) for u in updates]
    wrong = count = 0
    for name, got in make.read_all(tmp_path / "out").items():
        exact = sum(p[name].double() * t for p, t in zip(parts, (1200, 345, 2210), strict=True)) / total
        rounded = exact.to(got.dtype)
        if got.dtype == torch.float32:
            torch.testing.assert_close(got, rounded, rtol=3e-7, atol=1e-9)
        else:
            wrong += int((got != rounded).sum())
        count += got.numel()
    assert wrong <= {torch.bfloat16: 2e-5, torch.float16: 1.6e-4}.get(got.dtype, 0) * count
    assert [p.facility for p in record.participants] == ["f0", "f1", "f2"]
    assert record.participants[0].weight == 1200 / total
    manifest = verify_manifest(tmp_path / "out")
    assert (manifest.kind, manifest.round, manifest.federation) == ("model", 1, "test")


def test_same_bits_in_any_order_of_arrival(federation, tmp_path: Path):
    base, updates = federation
    for name, order, threads in (("one", updates, 1), ("two", updates[::-1], 2)):
        aggregate(base=base, updates=order, out=tmp_path / name, state_out=tmp_path / f"{name}-state", threads=threads)
    assert read_manifest(tmp_path / "one").files == read_manifest(tmp_path / "two").files
    one, two = (read_manifest(tmp_path / f"{n}-state").content_sha256 for n in ("one", "two"))
    assert one == two


def test_state_carries_what_half_precision_loses(tmp_path: Path):
    base = make.model(tmp_path / "r0", {"w": torch.ones(10, dtype=torch.bfloat16)})
    state = None
    # Two facilities; one moves by half a bfloat16 step (1/128 at 1.0) a round: the mean moves by a quarter.
    for number in range(4):
        current = make.read_all(base)["w"]
        updates = [
            make.update(tmp_path / f"u{number}-{i}", {"w": current + d}, base=base, facility=f"f{i}")
            for i, d in enumerate((torch.tensor(1 / 128).bfloat16(), torch.tensor(0.0).bfloat16()))
        ] + [
            make.update(tmp_path / f"u{number}-{i}", {"w": current.clone()}, base=base, facility=f"f{i}")
            for i in (2, 3)
        ]
        out, after = tmp_path / f"r{number + 1}", tmp_path / f"s{number + 1}"
        aggregate(base=base, updates=updates, out=out, state_in=state, state_out=after)
        base, state = out, after
    master = open_checkpoint(state / "master").read("w")
    assert torch.equal(master, torch.full((10,), 1 + 4 / 512))
    assert torch.equal(make.read_all(base)["w"], torch.full((10,), 1 + 1 / 128, dtype=torch.bfloat16))


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "keep")])
def test_transformers_loads_the_next_model_in_the_dtype_that_it_is_stored_in(tmp_path: Path, stored: str, wanted: str):
    base = save_pico(tmp_path / "base", dtype=stored)
    write_manifest(base, Manifest(kind="model", federation="test", round=0))
    sent = {name: tensor.float() + 1e-4 for name, tensor in make.read_all(base).items()}
    updates = [make.update(tmp_path / f"u{i}", sent, base=base, facility=f"f{i}") for i in range(2)]
    settings = AggregationSettings(rule="mean", weights="equal", output_dtype=wanted)
    aggregate(base=base, updates=updates, out=tmp_path / "out", settings=settings)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, stored if wanted == "keep" else wanted)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in make.read_all(tmp_path / "out").items())


def test_check_update_refuses_by_name(federation, tmp_path: Path):
    base, updates = federation
    opened, manifest = open_checkpoint(base), read_manifest(base)
    check_update(updates[0], opened, manifest, "f0", 0)
    with pytest.raises(UpdateRefused, match="'f9'.*facility 'f0'"):
        check_update(updates[0], opened, manifest, "f9", 0)
    with pytest.raises(UpdateRefused, match="round 0, expected round 1"):
        check_update(updates[0], opened, manifest, "f0", 1)
    tensors = make.read_all(updates[1])
    tensors["b.weight"][5] = float("nan")
    bad = make.update(tmp_path / "nan", tensors, base=base, facility="f1")
    with pytest.raises(UpdateRefused, match="'f1'.*b.weight.*NaN"):
        check_update(bad, opened, manifest, "f1", 0)
    with pytest.raises(UpdateRefused, match="f1"):
        aggregate(base=base, updates=[updates[0], bad], out=tmp_path / "never")
    assert not (tmp_path / "never").exists() and not list(tmp_path.glob(".*"))
    (updates[2] / "model.safetensors").write_bytes((updates[2] / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(UpdateRefused, match="truncated"):
        check_update(updates[2], opened, manifest, "f2", 0)
