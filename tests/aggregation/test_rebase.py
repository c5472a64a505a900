"""A late update is moved to the present model by exactly its own step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.aggregation.matching import match_tensors
from coordinator.aggregation.rebase import rebase
from coordinator.aggregation.verify import check_variances
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.moments import BLOCKS, FIRST, FULL, INT8, Moment, Rows, StoredMoments, write_moments
from facility.exchange.checkpoints.second_moments import Factors, write_factors
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest


def save(directory: Path, seed: int, *, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (5, 7)) -> Path:
    torch.manual_seed(seed)
    directory.mkdir()
    tensors = {"a.weight": torch.randn(shape).to(dtype), "b": torch.randn(3).to(dtype), "ids": torch.arange(4)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_counts_is_the_step_from_its_own_start(tmp_path: Path, dtype: torch.dtype):
    then, now, update = (save(tmp_path / name, seed) for seed, name in enumerate(("then", "now", "x")))
    update = save(tmp_path / "update", 2, dtype=dtype)
    (update / "report.json").write_text("{}")
    write_manifest(update, Manifest(kind="update", federation="f", facility="a", round=3, base_sha256="0" * 64))
    rebase(update, then=then, now=now, out=tmp_path / "moved", facility="a")
    one, two, three, moved = (load_file(d / "model.safetensors") for d in (then, now, update, tmp_path / "moved"))
    for name in ("a.weight", "b"):
        assert torch.equal(moved[name], three[name].float() - one[name].float() + two[name].float())
    assert torch.equal(moved["ids"], three["ids"])
    manifest = verify_manifest(tmp_path / "moved")
    assert (manifest.round, manifest.facility, manifest.dtypes) == (3, "a", {"F32": 2, "I64": 1})
    assert (tmp_path / "moved" / "report.json").read_text() == "{}"
    assert read_manifest(update).dtypes == {}, "what the facility sent is unchanged"


@pytest.mark.parametrize("model", [torch.float64, torch.float32])
def test_a_step_in_float64_is_not_rounded_to_float32(tmp_path: Path, model: torch.dtype):
    """It is smaller than what float32 tells apart beside the weights."""
    then, now = save(tmp_path / "then", 0, dtype=model), save(tmp_path / "now", 1, dtype=model)
    one, two = load_file(then / "model.safetensors"), load_file(now / "model.safetensors")
    (update := tmp_path / "update").mkdir()
    step = {name: torch.full(one[name].shape, 1e-10, dtype=torch.float64) for name in ("a.weight", "b")}
    tensors = {"ids": one["ids"]} | {name: one[name].double() + step[name] for name in step}
    save_file(tensors, update / "model.safetensors", metadata={"format": "pt"})
    write_manifest(update, Manifest(kind="update", federation="f", facility="a", round=3))
    rebase(update, then=then, now=now, out=tmp_path / "moved", facility="a")
    moved = load_file(tmp_path / "moved" / "model.safetensors")
    for name in step:
        assert torch.allclose(moved[name].double() - two[name].double(), step[name], rtol=1e-4, atol=0)


def late(directory: Path, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    directory.mkdir()
    save_file(tensors, directory / file, metadata={"format": "pt"})
    if file != "model.safetensors":
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    write_manifest(directory, Manifest(kind="update", federation="f", facility="a", round=3))
    return directory


def test_a_single_shard_that_an_index_names_is_moved(tmp_path: Path):
    then, now = save(tmp_path / "then", 0), save(tmp_path / "now", 1)
    tensors = load_file(save(tmp_path / "x", 2) / "model.safetensors")
    update = late(tmp_path / "update", tensors, "model-00001-of-00001.safetensors")
    rebase(update, then=then, now=now, out=tmp_path / "moved", facility="a")
    one, two = load_file(then / "model.safetensors"), load_file(now / "model.safetensors")
    moved = open_checkpoint(tmp_path / "moved")
    assert all(
        torch.equal(moved.read(n), tensors[n].float() - one[n].float() + two[n].float()) for n in ("a.weight", "b")
    )


def test_a_tied_weight_that_the_update_alone_stores_twice_is_moved_once(tmp_path: Path):
    """In time it is averaged; another surplus tensor is refused, late or not."""
    then, now = save(tmp_path / "then", 0), save(tmp_path / "now", 1)
    tensors = load_file(save(tmp_path / "x", 2) / "model.safetensors")
    update = late(tmp_path / "update", tensors | {"head.weight": tensors["a.weight"].clone()})
    rebase(update, then=then, now=now, out=tmp_path / "moved", facility="a")
    match_tensors(open_checkpoint(now), open_checkpoint(tmp_path / "moved"), "a", federated=lambda _: True)
    other = late(tmp_path / "other", tensors | {"head.weight": tensors["a.weight"] + 1})
    with pytest.raises(UpdateRefused, match=r"'head.weight' of its late update is not in"):
        rebase(other, then=then, now=now, out=tmp_path / "refused", facility="a")


def test_running_statistics_stay_what_the_facility_saw(tmp_path: Path):
    """Its variance fell from 1 to 0.3 while that of the others fell to 0.4: moved as a step it would be -0.3."""
    variances = {"then": 1.0, "now": 0.4, "update": 0.3}
    made = {
        name: late(tmp_path / name, {"w": torch.zeros(2), "norm.running_var": torch.full((2,), value)})
        for name, value in variances.items()
    }
    rebase(made["update"], then=made["then"], now=made["now"], out=tmp_path / "moved", facility="a")
    moved = open_checkpoint(tmp_path / "moved")
    assert torch.equal(moved.read("norm.running_var"), torch.full((2,), 0.3))
    check_variances(moved.tensors, "a")


def test_another_shape_is_refused_by_name(tmp_path: Path):
    then, now = save(tmp_path / "then", 0), save(tmp_path / "now", 1)
    update = save(tmp_path / "update", 2, shape=(5, 8))
    write_manifest(update, Manifest(kind="update", federation="f", facility="a", round=3))
    with pytest.raises(UpdateRefused, match=r"'a.weight' of its late update is not in"):
        rebase(update, then=then, now=now, out=tmp_path / "moved", facility="a")
    assert not (tmp_path / "moved").exists()


@pytest.mark.parametrize("form", [FULL, BLOCKS, INT8])
def test_second_moments_begin_with_the_present_ones_too(tmp_path: Path, form: str):
    """kept * then + (1 - kept) * g becomes kept * now + (1 - kept) * g; first moments are the facility's own."""
    then, now, update = (save(tmp_path / name, seed, shape=(5, 70)) for seed, name in enumerate(("then", "now", "x")))
    write_manifest(update, Manifest(kind="update", federation="f", facility="a", round=3))
    draw, kept = np.random.default_rng(0), 0.6
    moment, first = (Moment(name="a.weight", form=one, shape=(5, 70)) for one in (form, FIRST))
    old, new, own = (level * draw.lognormal(size=(5, moment.width)).astype("f4") for level in (100.0, 1.0, 0.1))
    direction = draw.normal(size=(5, 70)).astype("f4")
    for where, values in ((then, old), (now, new), (update, kept * old + (1 - kept) * own)):
        moments = {moment: rows_of(values)} | ({first: rows_of(direction)} if where == update else {})
        write_moments(where, moments, steps=7, kept=kept if where == update else 0.0)
    rebase(update, then=then, now=now, out=tmp_path / "moved", facility="a")
    found, sent = (StoredMoments(one, {"a.weight": (5, 70)}) for one in (tmp_path / "moved", update))
    wanted = kept * new + (1 - kept) * own
    if form == INT8:  # each within 4.5 %, those of then are 100 times as large
        assert (found.read(moment, 0, 5) <= 1.05 * wanted + 0.05 * kept * 2 * old).all()
        assert (found.read(moment, 0, 5) >= 0.9 * kept * new).all()
    else:
        assert (np.abs(found.read(moment, 0, 5) - wanted) < 2e-7 * old).all(), (
            "float32's rounding of what was taken off"
        )
    assert np.array_equal(found.read(first, 0, 5), sent.read(first, 0, 5))
    assert (found.steps, found.kept) == (7, kept)
    assert verify_manifest(tmp_path / "moved").files.keys() >= {"moments/model.safetensors"}


def rows_of(values: np.ndarray) -> Rows:
    return lambda first, count: values[first : first + count]


def test_moments_that_cannot_be_are_their_facilitys_fault(tmp_path: Path):
    then, now, update = (save(tmp_path / name, seed) for seed, name in enumerate(("then", "now", "x")))
    write_manifest(update, Manifest(kind="update", federation="f", facility="a", round=3))
    for where, value in ((then, 1.0), (now, 1.0), (update, -1.0)):
        write_factors(where, {"b": Factors(np.full(3, value, np.float32))}, steps=7, kept=0.5)
    with pytest.raises(UpdateRefused, match="'a'.*its moments cannot be used.*no second moment has"):
        rebase(update, then=then, now=now, out=tmp_path / "moved", facility="a")
    assert not (tmp_path / "moved").exists()
