"""Moments that travel value by value: every layout sends those of its state, and goes on from those it receives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.moments import (
    BLOCKS,
    FIRST,
    INT8,
    StoredMoments,
    block_means,
    has_moments,
    shapes_in,
)
from facility.exchange.checkpoints.second_moments import has_factors, read_factors
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings
from facility.training.state.moments import largest_first
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in

BOTH = {"optimizer_state": "shared", "optimizer_state_form": "full", "first_moments": "mean"}
DEFAULTS = TrainingSettings()


def state_of(case: Path) -> dict[str, np.ndarray]:
    """What a facility keeps after its first round."""
    return {key: load_file(e.file)[key] for key, e in open_checkpoint(case / "state" / "round-0").tensors.items()}


def moments_of(case: Path) -> StoredMoments:
    return StoredMoments(case / "out", shapes_in(open_checkpoint(case / "out")))


def after(case: Path, received: Path, dataset: Path, place: Path, **settings: Any) -> list[str]:
    """The second round of a case, after a copy of its state."""
    second = arguments(place, received, dataset, 1, **settings)
    second[second.index("--state") + 1] = str(shutil.copytree(case / "state", place.with_name(place.name + "-state")))
    return second


def with_moments(model: Path, out: Path, update: Path) -> Path:
    """The model as it comes back from a federation of this facility alone: with the moments that it sent."""
    shutil.copytree(model, out)
    for folder in ("moments", "second_moments"):
        if (update / folder).is_dir():
            shutil.copytree(update / folder, out / folder)
    return out


@pytest.mark.slow
def test_the_layouts_send_and_take_over_the_same_moments(tmp_path: Path):
    """A mean over one facility is its own moments: the next round is that of a facility that keeps them."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    layouts = {"one": {}} | {name: TWO[name] for name in ("fsdp", "1f1b")}
    for ranks, names in ((1, ["one"]), (2, ["fsdp", "1f1b"])):
        cases = [(name, arguments(tmp_path / name, model, dataset, **BOTH | layouts[name])) for name in names]
        rounds_in(cases, ranks=ranks)
    state, one = state_of(tmp_path / "one"), moments_of(tmp_path / "one")
    assert one.steps == 3
    for moment in one.moments.values():
        kind, beta = ("exp_avg", DEFAULTS.beta1) if moment.form == FIRST else ("exp_avg_sq", DEFAULTS.beta2)
        expected = state[f"{kind}.{moment.name}"].reshape(moment.rows, -1) / (1 - beta**3)
        found = one.read(moment, 0, moment.rows)
        tolerance = 2.0**-8 if moment.form == FIRST else 1e-6
        assert np.allclose(found, expected, rtol=tolerance, atol=0), moment
    names = {name for name, first in one.moments if first}
    assert names == {*open_checkpoint(tmp_path / "one" / "out").tensors}
    vectors = {name for name, shape in shapes_in(open_checkpoint(model)).items() if len(shape) == 1}
    factors, _ = read_factors(tmp_path / "one" / "out", shapes_in(open_checkpoint(model)))
    assert factors.keys() == vectors and {name for name, first in one.moments if not first} == names - vectors
    received = with_moments(model, tmp_path / "received", tmp_path / "one" / "out")
    cases = [("own", after(tmp_path / "one", model, dataset, tmp_path / "own"))]
    cases += [("one", after(tmp_path / "one", received, dataset, tmp_path / "one-next", **BOTH))]
    rounds_in(cases)
    for name in ("fsdp", "1f1b"):
        other = moments_of(tmp_path / name)
        for moment in one.moments.values():
            pair = [each.read(moment, 0, moment.rows) for each in (one, other)]
            assert np.allclose(*pair, rtol=2e-2, atol=1e-6), (name, moment)
        rounds_in(
            [(name, after(tmp_path / name, received, dataset, tmp_path / f"{name}-next", **BOTH | TWO[name]))], ranks=2
        )
    expected = tmp_path / "own" / "out"
    assert largest_difference(tmp_path / "one-next" / "out", expected) < 1e-4  # bfloat16 of first moments
    for name in ("fsdp", "1f1b"):
        assert largest_difference(tmp_path / f"{name}-next" / "out", tmp_path / "one-next" / "out") < 1e-5, name


@pytest.mark.parametrize("form", [INT8, BLOCKS])
def test_a_facility_without_state_begins_with_the_mean(form: str, tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    settings = BOTH | {"optimizer_state_form": form}
    rounds_in([("first", arguments(tmp_path / "first", model, dataset, **settings))])
    sent, state = moments_of(tmp_path / "first"), state_of(tmp_path / "first")
    for (name, first), moment in sent.moments.items():
        if not first:
            assert moment.form == form
            values = state[f"exp_avg_sq.{name}"].reshape(moment.rows, -1) / np.float32(1 - DEFAULTS.beta2**3)
            wanted = block_means(values) if form == BLOCKS else values
            assert np.allclose(sent.read(moment, 0, moment.rows), wanted, rtol=0.045, atol=values.max() * 2.0**-31)
    received = with_moments(model, tmp_path / "received", tmp_path / "first" / "out")
    cases = [("kept", after(tmp_path / "first", received, dataset, tmp_path / "kept", **settings))]
    cases += [("new", arguments(tmp_path / "new", received, dataset, 1, **settings))]
    cases += [("alone", arguments(tmp_path / "alone", model, dataset, 1, **settings))]
    rounds_in(cases)
    # The same moments and as many steps: only the place in the data may differ, and here it does not.
    assert largest_difference(tmp_path / "new" / "out", tmp_path / "kept" / "out") < 1e-6
    assert largest_difference(tmp_path / "alone" / "out", tmp_path / "kept" / "out") > 1e-5


def test_momenta_of_muon_are_taken_over(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    muon = {"optimizer": "muon", "first_moments": "mean"}
    rounds_in([("first", arguments(tmp_path / "first", model, dataset, **muon))])
    state, sent = state_of(tmp_path / "first"), moments_of(tmp_path / "first")
    buffers = {key.partition(".")[2] for key in state if key.startswith("momentum_buffer.")}
    assert buffers and {name for name, _ in sent.moments} == {key.partition(".")[2] for key in state}
    for moment in sent.moments.values():
        kind, decay = ("momentum_buffer", 0.95) if moment.name in buffers else ("exp_avg", DEFAULTS.beta1)
        expected = state[f"{kind}.{moment.name}"].reshape(moment.rows, -1) / (1 - decay**3)
        assert np.allclose(sent.read(moment, 0, moment.rows), expected, rtol=2.0**-8, atol=0)
    received = with_moments(model, tmp_path / "received", tmp_path / "first" / "out")
    reversed_ = shutil.copytree(received, tmp_path / "reversed")
    file = reversed_ / "moments" / "model.safetensors"
    turned = {key: value ^ np.uint16(0x8000) for key, value in raw(file).items()}
    write_raw(file, turned)
    cases = [("own", after(tmp_path / "first", model, dataset, tmp_path / "own", **muon))]
    cases += [("taken", after(tmp_path / "first", received, dataset, tmp_path / "taken", **muon))]
    cases += [("turned", after(tmp_path / "first", reversed_, dataset, tmp_path / "turned", **muon))]
    cases += [("off", after(tmp_path / "first", reversed_, dataset, tmp_path / "off", optimizer="muon"))]
    rounds_in(cases)
    own = tmp_path / "own" / "out"
    near, far = (largest_difference(tmp_path / name / "out", own) for name in ("taken", "turned"))
    assert near < 1e-3 and far > 4 * near  # momenta of bfloat16, orthogonalised
    assert largest_difference(tmp_path / "off" / "out", own) == 0


def test_first_moments_of_others_move_what_a_facility_has_hardly_seen_no_further_than_its_own_could(tmp_path: Path):
    """Its second moments of a token that its text lacks are 0: AdamW would divide the others' mean by next to it."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    settings = {"optimizer_state": "personal", "first_moments": "mean", "weight_decay": 0.0, "learning_rate": 2e-3}
    rounds_in([("first", arguments(tmp_path / "first", model, dataset, **settings))])
    state = state_of(tmp_path / "first")
    assert any((value == 0).any() for key, value in state.items() if key.startswith("exp_avg_sq."))
    received = with_moments(model, tmp_path / "received", tmp_path / "first" / "out")
    large = shutil.copytree(received, tmp_path / "large")
    one = np.uint16(0x3F80)  # 1 in bfloat16, in the place of gradients' means of some 1e-3
    write_raw(
        large / "moments" / "model.safetensors",
        {key: np.full_like(value, one) for key, value in raw(large / "moments" / "model.safetensors").items()},
    )
    cases = [
        (name, after(tmp_path / "first", tmp_path / name, dataset, tmp_path / f"{name}-next", **settings))
        for name in ("received", "large")
    ]
    rounds_in(cases)
    most = 3 * 2e-3 * largest_first(DEFAULTS)  # of three steps
    moved = {name: largest_difference(tmp_path / f"{name}-next" / "out", model) for name in ("received", "large")}
    assert moved["received"] < moved["large"] < most, (moved, most)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40),
    st.sampled_from([(0.9, 0.999), (0.9, 0.99), (0.95, 0.95), (0.0, 0.5)]),
)
def test_a_first_moment_is_never_larger_than_its_bound(gradients: list[float], betas: tuple[float, float]):
    first = second = 0.0
    for gradient in gradients:
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
    bound = largest_first(TrainingSettings(beta1=betas[0], beta2=betas[1]))
    assert abs(first) <= bound * second**0.5 * (1 + 1e-9)


def raw(file: Path) -> dict[str, np.ndarray]:
    """The bits of a file of bfloat16 tensors."""
    import torch
    from safetensors.torch import load_file as load

    return {key: value.view(torch.uint16).numpy() for key, value in load(file).items()}


def write_raw(file: Path, tensors: dict[str, np.ndarray]) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file as save

    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save({key: torch.from_numpy(value).view(torch.bfloat16) for key, value in tensors.items()}, file, metadata)


def test_moments_are_sent_after_every_so_many_rounds(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    settings = {"optimizer_state": "shared", "optimizer_state_every": 2}
    first = arguments(tmp_path / "0", model, dataset, **settings)
    second = arguments(tmp_path / "1", model, dataset, 1, **settings)
    second[second.index("--state") + 1] = str(tmp_path / "0" / "state")
    rounds_in([("0", first), ("1", second)])
    assert not has_factors(tmp_path / "0" / "out") and has_factors(tmp_path / "1" / "out")
    assert not has_moments(tmp_path / "1" / "out")


@pytest.mark.parametrize(
    ("settings", "what"), [({"optimizer": "adafactor"}, "adafactor"), ({"keep_optimizer": False}, "keep_optimizer")]
)
def test_first_moments_that_are_not_there_cannot_be_averaged(settings: dict[str, Any], what: str):
    with pytest.raises(ConfigurationError, match=what):
        TrainingSettings(first_moments="mean", **settings)
