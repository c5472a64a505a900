"""`optimizer_state: shared`: the state's own factors are sent, and the next round steps by the received ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import (
    Factors,
    factors_of,
    has_factors,
    kept_of,
    kept_share,
    read_factors,
    steps_of,
    write_factors,
)
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.report import read_report, skipped_of
from facility.exchange.messages.settings import TrainingSettings
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
from tests.training.layouts import arguments, rounds_in
from tests.training.test_layouts import TWO

SHARED = {"optimizer_state": "shared"}
BETA2 = TrainingSettings().beta2


def with_factors_of_another(model: Path, out: Path) -> Path:
    """The model as it comes back from a federation whose other facility's second moments are far larger."""
    shutil.copytree(model, out)
    rng = np.random.default_rng(0)
    factors = {}
    for name, entry in open_checkpoint(model).tensors.items():
        rows = (rng.random(entry.shape[0]) * 1e-2).astype(np.float32)
        columns = rng.random(entry.elements // entry.shape[0]).astype(np.float32) if len(entry.shape) > 1 else None
        factors[name] = Factors(rows, columns)
    write_factors(out, factors, steps=9)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_layouts_send_and_take_over_the_same_second_moments(tmp_path: Path, optimizer: str):
    """Of Muon those of what AdamW trains; what comes for its matrices is passed over."""
    dataset = write_dataset(tmp_path / "data")
    received = save_pico(tmp_path / "received")
    following = with_factors_of_another(received, tmp_path / "following")
    layouts = {"one": {}} | {name: TWO[name] for name in ("fsdp", "1f1b")}
    for ranks, names in ((1, ["one", "personal"]), (2, ["fsdp", "1f1b"])):
        cases = []
        for name in names:
            settings = {"optimizer": optimizer} | ({} if name == "personal" else SHARED | layouts[name])
            first = arguments(tmp_path / name / "0", received, dataset, **settings)
            second = arguments(tmp_path / name / "1", following, dataset, 1, **settings)
            second[second.index("--state") + 1] = str(tmp_path / name / "0" / "state")
            cases += [(f"{name} 0", first), (f"{name} 1", second)]
        rounds_in(cases, ranks=ranks)

    shapes = {name: entry.shape for name, entry in open_checkpoint(received).tensors.items()}
    one, steps = read_factors(tmp_path / "one" / "0" / "out", shapes)
    state = open_checkpoint(tmp_path / "one" / "0" / "state" / "round-0").tensors
    kept = {key.removeprefix("exp_avg_sq.") for key in state if key.startswith("exp_avg_sq.")}
    assert steps == 3 and one.keys() == kept and (kept == shapes.keys()) == (optimizer == "adamw") and len(kept) > 1
    for name, found in one.items():
        expected = factors_of(state[f"exp_avg_sq.{name}"], 1 / (1 - BETA2**3))
        assert np.array_equal(found.rows, expected.rows)
    for name in ("fsdp", "1f1b"):
        other, _ = read_factors(tmp_path / name / "0" / "out", shapes)
        assert all(np.allclose(other[key].rows, one[key].rows, rtol=1e-3, atol=1e-10) for key in one)
        assert largest_difference(tmp_path / "one" / "1" / "out", tmp_path / name / "1" / "out") < 1e-5, name
    assert not has_factors(tmp_path / "personal" / "0" / "out")
    assert largest_difference(tmp_path / "one" / "0" / "out", tmp_path / "personal" / "0" / "out") == 0
    assert largest_difference(tmp_path / "one" / "1" / "out", tmp_path / "personal" / "1" / "out") > 1e-4


def test_moments_that_are_not_kept_cannot_be_shared():
    with pytest.raises(ConfigurationError, match="keep_optimizer"):
        TrainingSettings(optimizer_state="shared", keep_optimizer=False)


def test_adapters_share_their_second_moments_as_whole_models_do(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    settings = SHARED | {"lora": {"rank": 2}}
    rounds_in([("first", arguments(tmp_path / "first", model, dataset, **settings))])
    sent = {name: entry.shape for name, entry in open_checkpoint(tmp_path / "first" / "out").tensors.items()}
    factors, _ = read_factors(tmp_path / "first" / "out", sent)
    assert factors.keys() == sent.keys()
    following = tmp_path / "following"
    shutil.copytree(model, following)
    write_factors(following, {name: Factors(one.rows * 1e4, one.columns) for name, one in factors.items()}, steps=3)
    cases = []
    for name, received in (("own", model), ("shared", following)):
        second = arguments(tmp_path / name, received, dataset, 1, **settings)
        second[second.index("--state") + 1] = str(shutil.copytree(tmp_path / "first" / "state", tmp_path / f"{name}-s"))
        cases.append((name, second))
    rounds_in(cases)
    assert largest_difference(tmp_path / "own" / "out", tmp_path / "shared" / "out") > 1e-4


def test_skipped_steps_are_none_after_which_received_moments_are_forgotten(tmp_path: Path):
    """The first steps in float16 overflow: what is left of the received moments is more by each of them."""
    from tests.training.test_loss_scale import steep_model

    model = with_factors_of_another(steep_model(tmp_path / "steep"), tmp_path / "model")
    chosen = {"steps": 12, "compute_dtype": "float16", "learning_rate": 1e-5, **SHARED}
    rounds_in([("one", arguments(tmp_path, model, write_dataset(tmp_path / "data"), **chosen))])
    skipped = skipped_of(read_report(tmp_path / "out"))
    assert 0 < skipped < 12
    assert steps_of(tmp_path / "out") == 9 + 12 - skipped
    assert kept_of(tmp_path / "out") == kept_share(BETA2, before=9, steps=9 + 12 - skipped)
