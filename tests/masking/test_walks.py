"""Laws of what must be alike at facilities whose updates are summed under masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facility.exchange.errors import InputError
from facility.exchange.masking.roster import Keys
from facility.exchange.masking.walks import (
    ALIKE,
    ALIKE_LORA,
    MOST_RATIO,
    check_own,
    odd_ones,
    sequences_of,
    unlike,
    walk_of,
)
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings

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
}
LORA: dict[str, Any] = {
    "rank": 4,
    "trained_rank": 1,
    "alpha": 1e-9,
    "dropout": 0.99,
    "targets": ["q_proj"],
    "rslora": True,
    "dora": True,
    "parameters": ["experts.down_proj"],
    "modules_to_save": ["lm_head"],
}
FREE: dict[str, Any] = {
    "threads": 3,
    "device": "cpu",
    "micro_batch_sequences": 1,
    "compute_dtype": "bfloat16",
    "steps": 7,
}


def settings_with(**training: Any) -> FacilitySettings:
    return FacilitySettings(
        federation="f", facility="a", rounds=3, seed=1, training=TrainingSettings(**{"optimizer": "adamw"} | training)
    )


def other_of(name: str) -> dict[str, Any]:
    needs = {"optimizer_parameters": {"optimizer": "adafactor"}, "drift_correction": {"keep_optimizer": True}}
    return needs.get(name, {}) | {name: OTHER[name]}


def test_every_key_that_must_be_alike_is_tried_here():
    assert set(OTHER) == set(ALIKE) and set(LORA) == set(ALIKE_LORA)


@pytest.mark.parametrize("name", ALIKE)
def test_a_facility_that_is_told_another_value_has_another_digest_and_is_named(name: str):
    base, other = settings_with(), settings_with(**other_of(name))
    assert walk_of(base) != walk_of(other)
    found = unlike({"x": base.training, "y": other.training})
    assert found is not None and found[1:] == ("x", "y") and found[0] in (name, "optimizer")


@pytest.mark.parametrize("name", ALIKE_LORA)
def test_so_it_is_with_adapters(name: str):
    base = LoraSettings(rank=8)
    other = dataclasses.replace(base, **{name: LORA[name]})
    assert walk_of(settings_with(lora=base)) != walk_of(settings_with(lora=other))
    assert unlike({"x": settings_with(lora=base).training, "y": settings_with(lora=other).training}) == (
        f"lora.{name}",
        "x",
        "y",
    )


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
        samples=count,
        tokens=64 * count,
        walk=walk_of(settings),
    )


def test_a_job_that_is_told_otherwise_than_its_keys_masks_nothing():
    settings = settings_with(steps=100)
    check_own(keys_of(settings), settings)
    check_own(keys_of(settings), settings, steps=25)
    check_own(keys_of(settings), settings, steps=400)
    with pytest.raises(InputError, match="settings of training differ from those for which 'a' signed"):
        check_own(keys_of(settings), settings_with(steps=100, learning_rate=1.0))
    for steps in (6, 1601):
        with pytest.raises(InputError, match="expected at most 16 times more or less"):
            check_own(keys_of(settings), settings, steps=steps)


@given(
    told=st.lists(st.sampled_from("ab"), min_size=3, max_size=7),
    amounts=st.lists(st.integers(1, 5000), min_size=7, max_size=7),
)
def test_without_the_odd_ones_everybody_masks_with_everybody(told: list[str], amounts: list[int]):
    """Unless as many were told one thing as another; and nobody of an honest majority is left out."""
    one = keys_of(settings_with())
    keys = {
        f"f{place}": dataclasses.replace(one, facility=f"f{place}", walk=kind * 64, samples=amounts[place])
        for place, kind in enumerate(told)
    }
    odd = odd_ones(keys)
    left = {name: key for name, key in keys.items() if name not in odd}
    assert max(key.samples for key in left.values()) <= MOST_RATIO * min(key.samples for key in left.values())
    if told.count("a") != told.count("b"):
        assert len({key.walk for key in left.values()}) == 1
    if max(amounts[: len(told)]) <= MOST_RATIO * min(amounts[: len(told)]):
        assert len(odd) <= len(told) / 2
