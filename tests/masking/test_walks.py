"""Laws of what must be alike at facilities whose updates are summed under masks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facility.exchange.errors import InputError
from facility.exchange.masking.roster import Keys
from facility.exchange.masking.walks import (
    ALIKE,
    ALIKE_LORA,
    ALIKE_PREFERENCE,
    ALIKE_SYNC,
    AMOUNTS,
    check_own,
    decisive_digest,
    first_difference,
    odd_ones,
    sequences_of,
    walk_of,
)
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.preference import PreferenceSettings
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.messages.trainer import TrainerSettings

DATA = Path("/data")

OTHER: dict[str, Any] = {
    "optimizer": "adafactor",
    "optimizer_parameters": {"clip_threshold": 2.0},
    "learning_rate": 1e-9,
    "minimum_learning_rate_ratio": 0.0,
    "schedule": "linear",
    "warmup_steps": 10_000,
    "weight_decay": 0.1,
    "beta1": 0.99,
    "beta2": 0.9999,
    "epsilon": 1e6,
    "clip_norm": 1e-12,
    "proximal": 1e6,
    "keep_optimizer": False,
    "drift_correction": True,
    "freeze": ["*"],
    "optimizer_state": "shared",
    "optimizer_state_form": "full",
    "optimizer_state_every": 1_000,
    "first_moments": "mean",
    "export_dtype": "float16",
    "encoding": "sparse",
    "sparse_density": 1e-6,
    "unsent_share": 1e-9,
}
LORA: dict[str, Any] = {
    "rank": 4,
    "trained_rank": 1,
    "freeze_a": True,
    "alpha": 1e-9,
    "dropout": 0.99,
    "targets": ["q_proj"],
    "rslora": True,
    "dora": True,
    "parameters": ["experts.down_proj"],
    "modules_to_save": ["lm_head"],
    "base_sha256": "0" * 64,
}
SYNC: dict[str, Any] = {
    "policy": "diloco",
    "every": 10_000,
    "outer_learning_rate": 1e-9,
    "outer_momentum": 0.1,
    "weights": "equal",
    "optimizer_state": "reset",
    "step": "own",
    "progress": "each",
}
PREFERENCE: dict[str, Any] = {"beta": 1e-12, "label_smoothing": 0.4999}
FREE: dict[str, Any] = {
    "threads": 3,
    "device": "cpu",
    "micro_batch_sequences": 1,
    "compute_dtype": "bfloat16",
    "steps": 7,
}
ELSEWHERE = {"steps", "batch_sequences", "lora", "sync", "preference"}
"""Amounts, and parts whose fields are looked at one by one."""
OWN_AFFAIR = set(FREE) - {"steps"} | {
    "chunked_loss",
    "ranks",
    "peak_flops",
    "evaluation_sequences",
    "signing_key",
    "stall_seconds",
    "layout",
    "images",
    "limits",
    "tracker",
    "trace",
}
"""Fields by which an update becomes neither larger nor smaller: where and how fast it is computed, what is looked at,
and when a round is given up, which leaves no update."""


def settings_with(**training: Any) -> FacilitySettings:
    return FacilitySettings(
        federation="f", facility="a", rounds=3, seed=1, training=TrainingSettings(**{"optimizer": "adamw"} | training)
    )


def other_of(name: str) -> dict[str, Any]:
    needs: dict[str, dict[str, Any]] = {
        "optimizer_parameters": {"optimizer": "adafactor"},
        "drift_correction": {"keep_optimizer": True},
        "encoding": {"export_dtype": "float32"},
    }
    return needs.get(name, {}) | {name: OTHER[name]}


def test_every_key_that_must_be_alike_is_tried_here():
    assert set(OTHER) == set(ALIKE) and set(LORA) == set(ALIKE_LORA)
    assert {*SYNC, "parameters"} == set(ALIKE_SYNC), "parameters are of policies from outside this package"
    assert set(PREFERENCE) == set(ALIKE_PREFERENCE)


def test_nobody_adds_a_key_of_training_without_saying_whether_it_must_be_alike():
    known = {*ALIKE, *ELSEWHERE, *OWN_AFFAIR}
    assert {field.name for field in dataclasses.fields(TrainingSettings)} == known
    assert len(known) == len(ALIKE) + len(ELSEWHERE) + len(OWN_AFFAIR), "a field is in one of the lists"


@pytest.mark.parametrize("name", ALIKE)
def test_a_facility_that_is_told_another_value_has_another_digest_and_is_named(name: str):
    base, other = settings_with(), settings_with(**other_of(name))
    assert walk_of(base) != walk_of(other)
    found = first_difference({"x": base.training, "y": other.training})
    assert found is not None and found[1:] == ("x", "y") and found[0] in (name, "optimizer", "export_dtype")


@pytest.mark.parametrize("name", ALIKE_LORA)
def test_so_it_is_with_adapters(name: str):
    base = LoraSettings(rank=8, base="base")
    other = dataclasses.replace(base, **{name: LORA[name]})
    assert walk_of(settings_with(lora=base)) != walk_of(settings_with(lora=other))
    assert first_difference({"x": settings_with(lora=base).training, "y": settings_with(lora=other).training}) == (
        f"lora.{name}",
        "x",
        "y",
    )


@pytest.mark.parametrize(
    ("part", "kind", "name", "value"),
    [("sync", SyncSettings, *one) for one in SYNC.items()]
    + [("preference", PreferenceSettings, *one) for one in PREFERENCE.items()],
)
def test_and_with_replicas_and_preferences(part: str, kind: Any, name: str, value: Any):
    other = settings_with(**{part: kind(**{name: value})})
    assert walk_of(settings_with()) != walk_of(other)
    assert first_difference({"x": settings_with().training, "y": other.training}) == (f"{part}.{name}", "x", "y")


@pytest.mark.parametrize("name", FREE)
def test_what_is_a_facilitys_own_affair_changes_nothing(name: str):
    assert walk_of(settings_with()) == walk_of(settings_with(**{name: FREE[name]}))


def test_rounds_and_what_is_federated_count_too():
    base = settings_with()
    for other in (
        dataclasses.replace(base, rounds=3000),
        dataclasses.replace(base, include=["*.weight"]),
        dataclasses.replace(base, exclude=["*"]),
    ):
        assert walk_of(base) != walk_of(other)


def keys_of(settings: FacilitySettings) -> Keys:
    count = sequences_of(settings.training)
    return Keys(
        federation="f",
        facility="a",
        round=1,
        generation="0" * 64,
        public_key="1" * 64,
        steps=settings.training.steps,
        samples=count,
        tokens=64 * count,
        walk=walk_of(settings),
    )


def test_a_job_that_is_told_otherwise_than_its_keys_masks_nothing():
    settings = settings_with(steps=100)
    check_own(keys_of(settings), settings, DATA)
    check_own(keys_of(settings), settings, DATA, steps=100)
    with pytest.raises(
        InputError, match="settings of training, or the dataset, differ from those for which 'a' signed"
    ):
        check_own(keys_of(settings), settings_with(steps=100, learning_rate=1.0), DATA)
    for steps in (25, 99, 101, 400):
        with pytest.raises(InputError, match=f"asks 'a' for {steps} steps .* its signed keys say 100 and 800"):
            check_own(keys_of(settings), settings, DATA, steps=steps)
    for told in (settings_with(steps=99), settings_with(steps=100, batch_sequences=7)):
        with pytest.raises(InputError, match="its signed keys say 100 and 800, by which the others mask"):
            check_own(keys_of(settings), told, DATA)


def test_nor_does_one_that_is_told_to_make_another_update_of_the_model():
    """Neither larger nor smaller, but another: of two sums with one of them each, the difference is theirs."""
    settings = settings_with()
    keys = dataclasses.replace(keys_of(settings), told=decisive_digest(settings, DATA))
    check_own(keys, settings, DATA)
    check_own(keys, settings_with(threads=3, tracker="wandb", evaluation_sequences=5), DATA)
    others = [
        (settings, Path("/other")),
        (dataclasses.replace(settings, seed=2), DATA),
        (dataclasses.replace(settings, trainer=TrainerSettings(module="site.trainer")), DATA),
        (settings_with(compute_dtype="float16"), DATA),
    ]
    for told, dataset in others:
        with pytest.raises(InputError, match="settings of training, or the dataset, differ from"):
            check_own(keys, told, dataset)


@given(
    told=st.lists(st.sampled_from("ab"), min_size=3, max_size=7),
    amounts=st.lists(st.integers(1, 5000), min_size=7, max_size=7),
    taken=st.lists(st.integers(1, 50), min_size=7, max_size=7),
)
def test_without_the_odd_ones_everybody_masks_with_everybody(told: list[str], amounts: list[int], taken: list[int]):
    """Unless as many were told one thing as another; and nobody of an honest majority is left out."""
    one = keys_of(settings_with())
    keys = {
        f"f{place}": dataclasses.replace(
            one, facility=f"f{place}", walk=kind * 64, samples=amounts[place], steps=taken[place]
        )
        for place, kind in enumerate(told)
    }
    odd = odd_ones(keys)
    left = {name: key for name, key in keys.items() if name not in odd}
    for field, _, _, most in AMOUNTS:
        assert max(getattr(key, field) for key in left.values()) <= most * min(
            getattr(key, field) for key in left.values()
        )
    if told.count("a") != told.count("b"):
        assert len({key.walk for key in left.values()}) == 1
    every = list(zip(amounts, taken, strict=True))[: len(told)]
    if all(max(one) <= most * min(one) for one, (*_, most) in zip(zip(*every, strict=True), AMOUNTS, strict=True)):
        assert len(odd) <= len(told) / 2
