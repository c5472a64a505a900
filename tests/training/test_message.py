"""Law: a message that the trainer writes from memory is to the last bit the one that is made of its update on disk."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from facility.exchange.checkpoints.checkpoint import ADAPTER, open_checkpoint
from facility.exchange.checkpoints.delta_parts import FILE
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.step_norms import NAME as NORMS
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from facility.exchange.messages.settings import TrainingSettings, read_facility_settings
from facility.rounds.sealed import find_flaw
from facility.rounds.smaller import make_smaller, pending_residual, residual_path, residual_to_add, residual_to_resume
from facility.training.state.save import all_finite
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in

CODED = {"export_dtype": "float32", "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def received(tmp_path_factory) -> tuple[Path, Path]:
    """A model in half precision with tied weights, and a dataset."""
    root = tmp_path_factory.mktemp("received")
    model = save_pico(root / "model", dtype="bfloat16", tie_word_embeddings=True)
    write_manifest(model, Manifest(kind="model", federation="pico", round=0))
    return model, write_dataset(root / "data")


def straight(root: Path) -> list[str]:
    return ["--unsent-out", str(pending_residual(root / "state"))]


def smaller(root: Path, model: Path, round: int = 0) -> None:
    """What `facility.round` does once the trainer has ended."""
    settings = read_facility_settings(root / "settings.json")
    make_smaller(
        root / "out",
        model=model,
        state=root / "state",
        round=round,
        settings=settings.training,
        patterns=Patterns(),
        norms=settings.step_norms,
    )


def tensor_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


@pytest.mark.parametrize("encoding", ["delta-int8", "delta-int4", "sparse"])
def test_every_bit_is_that_of_an_update_encoded_from_disk(tmp_path: Path, received, encoding: str):
    model, dataset = received
    first, second = tmp_path / "first", tmp_path / "second"
    training = {"encoding": encoding} | CODED
    rounds_in(
        [
            ("disk", arguments(first, model, dataset, **training)),
            ("memory", arguments(second, model, dataset, **training) + straight(second)),
        ]
    )
    assert not (first / "out" / FILE).exists() and (second / "out" / FILE).exists()
    for root in (first, second):
        smaller(root, model)
        verify_manifest(root / "out")
    one, other = (tensor_files(root / "out") for root in (first, second))
    assert one == other and len(one[FILE]) > 1000
    kept = [residual_path(root / "state", 0) for root in (first, second)]
    assert tensor_files(kept[0]) == tensor_files(kept[1]) and sum(map(len, tensor_files(kept[0]).values())) > 1000
    assert find_flaw(kept[1]) == "" and not pending_residual(second / "state").exists()
    assert {path.name for path in (first / "out").iterdir()} == {path.name for path in (second / "out").iterdir()}
    manifests = [read_manifest(root / "out") for root in (first, second)]
    assert dataclasses.replace(manifests[0], files={}) == dataclasses.replace(manifests[1], files={})


def test_adapters_are_written_whole_whatever_was_received(tmp_path: Path, received):
    """A round from a model without adapters, and one from adapters alone."""
    model, dataset = received
    training = {"encoding": "delta-int8", "lora": {"rank": 4, "base": str(model)}} | CODED
    for name in ("first", "second"):
        root = tmp_path / name
        rounds_in([(name, arguments(root, model, dataset, **training) + straight(root))])
        smaller(root, model)
        assert list(tensor_files(root / "out")) == [ADAPTER] and read_manifest(root / "out").encoding == "lora"
        model = Path(shutil.copytree(root / "out", tmp_path / f"after-{name}"))
        write_manifest(model, dataclasses.replace(read_manifest(model), kind="model", files={}))


def test_what_a_message_left_is_added_to_the_next_one_as_from_disk(tmp_path: Path, received):
    """An encoding that fades, two rounds: `--left`, and `--unsent`, a share of which is trained from."""
    first, dataset = received
    roots = tmp_path / "disk", tmp_path / "memory"
    sparse = {"encoding": "sparseloco", "unsent_share": 0.25}
    settings = TrainingSettings(export_dtype="float32", **sparse)
    for number in range(2):
        model = Path(shutil.copytree(first, tmp_path / f"model{number}"))
        write_manifest(model, Manifest(kind="model", federation="pico", round=number))
        cases = []
        for root in roots:
            rest = residual_to_resume(root / "state", number, settings)
            more = ["--unsent", str(rest)] if rest is not None else []
            cases.append((root.name, arguments(root, model, dataset, number, **sparse, **CODED) + more))
        before = residual_to_add(roots[1] / "state", number, settings)
        assert (before is None) == (number == 0)
        cases[1][1].extend(straight(roots[1]) + (["--left", str(before)] if before is not None else []))
        rounds_in(cases)
        assert not (roots[0] / "out" / FILE).exists() and (roots[1] / "out" / FILE).exists()
        for root in roots:
            smaller(root, model, number)
        messages, kept = zip(
            *((tensor_files(root / "out"), tensor_files(residual_path(root / "state", number))) for root in roots),
            strict=True,
        )
        assert messages[0] == messages[1] and kept[0] == kept[1] and len(messages[0][FILE]) > 1000
        for root in roots:
            (root / "out").rename(root / f"message{number}")
    assert (roots[0] / "message0" / FILE).read_bytes() != (roots[0] / "message1" / FILE).read_bytes()


def test_moments_leave_beside_a_message_as_beside_an_update(tmp_path: Path, received):
    model, dataset = received
    roots = tmp_path / "disk", tmp_path / "memory"
    shared = {"optimizer_state": "shared", "optimizer_state_form": "int8", "first_moments": "mean"}
    training = {"encoding": "delta-int8", **shared, **CODED}
    cases = [(root.name, arguments(root, model, dataset, **training)) for root in roots]
    cases[1][1].extend(straight(roots[1]))
    rounds_in(cases)
    found = []
    for root in roots:
        smaller(root, model)
        assert {"second_moments", "moments"} <= {path.name for path in (root / "out").iterdir()}
        found.append({name: tensor_files(root / "out" / name) for name in ("second_moments", "moments")})
    assert found[0] == found[1] and all(found[0].values())


def test_the_step_that_a_message_decodes_to_is_stated_alike(tmp_path: Path, received):
    model, dataset = received
    roots = tmp_path / "disk", tmp_path / "memory"
    cases = [(root.name, arguments(root, model, dataset, encoding="delta-int8", **CODED)) for root in roots]
    for root in roots:
        settings = root / "settings.json"
        settings.write_text(settings.read_text().replace('"training":', '"step_norms": true, "training":', 1))
    cases[1][1].extend(straight(roots[1]))
    rounds_in(cases)
    for root in roots:
        smaller(root, model)
    stated = [(root / "out" / NORMS).read_text() for root in roots]
    assert stated[0] == stated[1] and '"squares"' in stated[0]


def test_shards_of_several_ranks_are_written_whole_and_encoded_afterwards(tmp_path: Path, received):
    model, dataset = received
    root = tmp_path / "fsdp"
    rounds_in([("fsdp", arguments(root, model, dataset, encoding="delta-int8", **CODED) + straight(root))], ranks=2)
    assert set(open_checkpoint(root / "out").tensors) == set(open_checkpoint(model).tensors)
    assert not pending_residual(root / "state").exists()
    smaller(root, model)
    assert (root / "out" / FILE).is_file() and find_flaw(residual_path(root / "state", 0)) == ""


def test_weights_that_are_not_finite_leave_no_update(tmp_path: Path, received):
    model, dataset = received
    root = tmp_path / "diverged"
    case = arguments(root, model, dataset, encoding="delta-int8", export_dtype="float32", learning_rate=1e38)
    said = rounds_in([("diverged", case + straight(root))], expect=None)["diverged"][0]
    assert "training diverged" in said or "no loss or gradient was finite" in said
    assert not (root / "out").exists() and not pending_residual(root / "state").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [1.0, 0.0, "largest", "-largest", float("inf"), -float("inf"), float("nan")])
def test_values_that_are_not_finite_are_found_whatever_their_sum(dtype: torch.dtype, value: float | str):
    """The largest of a dtype overflow in a sum, and two infinities of unlike sign make NaN: each is the oracle."""
    largest = torch.finfo(dtype).max
    number = {"largest": largest, "-largest": -largest}.get(str(value), value)
    for more in (0.0, 1.0, -float("inf"), largest):
        values = torch.full((1000,), 0.5, dtype=dtype)
        values[7:900] = number
        values[-1] = more
        assert all_finite(values) == bool(torch.isfinite(values).all())
