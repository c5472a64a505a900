"""The bounds on disk, by hand; that real runs keep them: tests/engine/test_disk.py."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, read_federation
from coordinator.config.settings import SendingSettings, read_coordinator_settings
from coordinator.engine.render import render
from coordinator.memory.figures import ModelFigures, model_figures
from coordinator.memory.need import needed_bytes
from coordinator.preflight.cost import check_link
from coordinator.preflight.disk import IN_FLIGHT, coordinator_disk, facility_disk
from coordinator.rounds.verification import averaged_as_encoded, averages_encoded
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.messages.layout import LimitSettings, LoraSettings
from facility.exchange.messages.settings import TrainingSettings
from facility.probe import disk
from tests.federations import write_federation
from tests.pico import save_pico

P = 1024
MODEL = ModelFigures(parameters=P, bytes=2 * P, vocabulary=50, positions=0, hidden=8, layers=2, heads=2)


def test_a_facility_holds_two_models_an_update_a_state_and_what_a_round_writes_at_its_end():
    assert facility_disk(MODEL, TrainingSettings()).bytes == 2 * 2 * P + 2 * P + 8 * P + (8 + 12) * P
    limited = TrainingSettings(limits=LimitSettings(seconds=60))
    assert facility_disk(MODEL, limited).bytes == 2 * 2 * P + 2 * P + 8 * P + 2 * 12 * P
    without = TrainingSettings(keep_optimizer=False)
    assert facility_disk(MODEL, without).bytes == 2 * 2 * P + 2 * P + 12 * P
    message = P + 4 * P // 256
    assert facility_disk(MODEL, without, "delta-int8").bytes == 3 * 2 * P + message + 2 * P + 12 * P
    assert facility_disk(MODEL, without, "changed").parts["a model's encoded form"] == math.ceil(1.05 * 2 * P)
    encoded = TrainingSettings(keep_optimizer=False, encoding="delta-int8", export_dtype="float32")
    assert facility_disk(MODEL, encoded).bytes == 2 * 2 * P + 4 * P + (P + 4 * P // 256) + 2 * 4 * P + 12 * P


def test_an_optimizers_state_follows_from_the_shapes():
    shapes = {"model.embed_tokens.weight": (16, 30), "a.weight": (16, 30), "a.bias": (64,)}
    model = dataclasses.replace(MODEL, shapes=shapes)
    expected = {
        "adamw": 8 * P,
        "muon": 8 * 480 + 4 * 480 + 8 * 64,
        "adafactor": 4 * (16 + 30) + 4 * (16 + 30) + 4 * 64,
    }
    for name, state in expected.items():
        training = TrainingSettings(optimizer=name)
        disk = facility_disk(model, training)
        assert disk.parts["optimizer state"] == state, name
        assert disk.bytes == 2 * 2 * P + 2 * P + state + (4 * P + state) + state, name
        needed = needed_bytes(model, training, 10, 1)
        assert needed - needed_bytes(model, TrainingSettings(), 10, 1) == state - 8 * P, name
    assert facility_disk(MODEL, TrainingSettings(optimizer="muon")).parts["optimizer state"] == 8 * P


def test_correcting_drift_takes_a_walk_with_every_state_and_a_byte_a_parameter_with_every_model():
    plain, drift = TrainingSettings(), TrainingSettings(drift_correction=True)
    more = facility_disk(MODEL, drift).bytes - facility_disk(MODEL, plain).bytes
    assert more == 2 * P + 4 * P + (8 + 4) * P + 4 * P  # models, the state before, the one that the mean holds, the new
    there = [coordinator_disk(MODEL, {"a": one}, rule="mean", rounds=5, keep_rounds=2).bytes for one in (plain, drift)]
    assert there[1] - there[0] == (2 + 1) * P + 2 * 4 * P
    assert MODEL.mean_walk(drift) == P and MODEL.mean_walk(plain) == 0
    assert needed_bytes(MODEL, drift, 10, 1) - needed_bytes(MODEL, plain, 10, 1) == 4 * P


def test_moments_that_travel_are_with_every_model_and_update_and_are_told_with_the_link():
    shapes = {"a.weight": (16, 60), "a.bias": (64,)}
    model = dataclasses.replace(MODEL, shapes=shapes)
    plain = TrainingSettings(optimizer_state="personal")
    shared = dataclasses.replace(plain, optimizer_state="shared")
    both = dataclasses.replace(shared, optimizer_state_form="int8", first_moments="mean")
    for one, size in ((plain, 0), (shared, 4 * 76 + 4 * 64), (both, 960 + 4 * 16 + 4 * 64 + 2 * P)):
        assert model.moments(one) == size
        assert facility_disk(model, one).bytes - facility_disk(model, plain).bytes == 3 * size
        there = [coordinator_disk(model, {"a": o}, rule="mean", rounds=5, keep_rounds=2).bytes for o in (plain, one)]
        assert there[1] - there[0] == (2 + 1 + 1) * size
    row = check_link(Facility(name="a", dataset="/d", training=both), Deployment(), model, SendingSettings())
    assert "5.38 kB there (3.33 kB of it moments) and 5.38 kB back a round" in row.found, row
    one = Facility(name="a", dataset="/d", training=shared)
    row = check_link(one, Deployment(), model, SendingSettings(), masked_bits=16)  # in 8 bytes a value on the way back
    assert "2.61 kB there (560 B of it moments) and 3.17 kB back a round" in row.found, row
    here = facility_disk(model, shared, masked_bits=16).parts["its masked form"]
    there = coordinator_disk(model, {"a": shared}, rule="mean", rounds=5, keep_rounds=2, masked_bits=16)
    assert here == 2 * there.parts[IN_FLIGHT] == 2 * 3168, "what is sent, and what an earlier roster left"


def test_the_coordinator_does_not_need_more_for_more_rounds():
    one, two = TrainingSettings(), TrainingSettings(export_dtype="float32")
    few, many = (
        coordinator_disk(MODEL, {"a": one, "b": two}, rule="fedavgm", rounds=rounds, keep_rounds=3)
        for rounds in (3, 3000)
    )
    assert few.bytes == many.bytes == (1 + 3 + 1) * 2 * P + (2 * P + 4 * P) + 2 * (4 + 4) * P
    plain = coordinator_disk(MODEL, {"a": one}, rule="mean", rounds=5, keep_rounds=0)
    assert plain.bytes == (1 + 5 + 1) * 2 * P + 2 * P + 2 * 4 * P
    assert "server state, old and new 8.19 kB" in str(plain)


@pytest.mark.parametrize(("encoding", "message"), [("delta-int8", P + 4 * P // 256), ("changed", 1.05 * 2 * P)])
def test_messages_of_models_are_beside_the_models(encoding: str, message: float):
    """That of each kept round and of the next; and as it is made, the model that is encoded. All values may change."""
    plain, more = (
        coordinator_disk(MODEL, {"a": TrainingSettings()}, rule="mean", rounds=5, keep_rounds=2, sending=one).bytes
        for one in (SendingSettings(), SendingSettings(encoding=encoding))
    )
    assert more - plain == 3 * math.ceil(message) + 2 * P


def test_a_message_that_is_averaged_as_it_came_takes_its_own_room_alone():
    encoded = TrainingSettings(encoding="delta-int8", export_dtype="float32")
    updates, message = {"a": encoded, "b": TrainingSettings()}, P + 4 * P // 256
    there = [
        coordinator_disk(MODEL, updates, rule="mean", rounds=5, keep_rounds=2, decoded=one).parts[IN_FLIGHT]
        for one in (False, True)
    ]
    assert there == [message + 2 * P, message + 4 * P + 2 * P]


@pytest.mark.parametrize(
    ("changes", "as_they_came"),
    [
        ({}, True),
        ({"rounds": {"count": 2, "quorum": 1, "grace": 5}}, False),
        ({"evaluation": {"matrix": True}}, False),
    ],
    ids=str,
)
def test_check_and_the_steps_agree_on_whether_messages_are_decoded_to_files(
    tmp_path: Path, changes: dict[str, Any], as_they_came: bool
):
    federation = read_federation(write_federation(tmp_path, ["a", "b"], **changes))
    rendered = tmp_path / "coordinator.json"
    rendered.write_text(render(federation)["workflow/coordinator.json"])
    settings = read_coordinator_settings(rendered)
    assert averages_encoded(federation) is averaged_as_encoded(settings) is as_they_came


def test_of_adapters_only_they_travel_and_only_they_have_a_state():
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 24),
        "model.layers.0.input_layernorm.weight": (8,),
        "score.weight": (2, 8),
    }
    parameters = 800 + 64 + 192 + 8 + 16
    model = dataclasses.replace(MODEL, parameters=parameters, bytes=2 * parameters, shapes=shapes)
    every = TrainingSettings(lora=LoraSettings(rank=2))
    assert model.trained(every) == 2 * (8 + 8) + 2 * (8 + 24) + 16
    one = TrainingSettings(lora=LoraSettings(rank=2, targets=["q_proj"], modules_to_save=["embed_tokens"]))
    trained = 2 * (8 + 8) + 800
    assert model.trained(one) == trained and model.written(one) == 2 * trained
    assert facility_disk(model, one).parts["optimizer state"] == 8 * trained
    assert facility_disk(model, one).parts["models"] == 2 * (2 * parameters + 2 * trained)
    based = TrainingSettings(lora=LoraSettings(rank=2, targets=["q_proj"], base="base"))
    assert facility_disk(model, based).parts["models"] == 2 * 2 * (2 * (8 + 8) + 16)
    there = coordinator_disk(model, {"a": one}, rule="mean", rounds=1, keep_rounds=1).parts
    assert there["the next model"] == 2 * parameters + 2 * trained
    assert there["server state, old and new"] == 2 * 4 * trained
    linked = coordinator_disk(model, {"a": one}, rule="mean", rounds=9, keep_rounds=3, links=True)
    assert linked.parts["initial model"] == 2 * parameters, "which all rounds share"
    assert linked.parts["models of 3 rounds"] == 3 * linked.parts["the next model"] == 3 * 2 * trained
    plain = {"a": TrainingSettings()}
    kept = [coordinator_disk(model, plain, rule="mean", rounds=9, keep_rounds=3, links=one) for one in (True, False)]
    assert kept[0] == kept[1], "a round changes all of a model that is trained whole"


SHAPES = {
    "model.embed_tokens.weight": (16, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
}
HELD = dataclasses.replace(MODEL, shapes=SHAPES, dtypes=dict.fromkeys(SHAPES, "BF16"))
E, B = 256, 2 * 384
"""Values of the embedding, and of the block."""
HEADLESS = Patterns(exclude=("model.embed_tokens.*",))


def headers(values: int) -> int:
    """Bytes beside these of `HELD`'s values in a message of `delta-int8`: 210 a tensor, by their share of values."""
    return 210 * math.ceil(3 * values / P)


def test_what_stays_at_its_facility_is_there_in_float32_for_three_rounds_and_in_no_update():
    """By the files of a third round: tests/rounds/test_personal.py."""
    plain, own = TrainingSettings(), facility_disk(HELD, TrainingSettings(), federated=HEADLESS)
    assert HELD.written(plain, HEADLESS) == 2 * B and HELD.written(plain, HEADLESS, whole=True) == 2 * B + 4 * E
    more = {"a model with its own tensors": 2 * B + 4 * E, "its own tensors": 3 * 4 * E}
    more |= {"update": 2 * B, "with its own tensors": 2 * B + 4 * E}
    assert own.parts == facility_disk(HELD, plain).parts | more
    # Either the update with them and without, or that without and its message with what that leaves.
    encoded = TrainingSettings(encoding="delta-int8", export_dtype="float32")
    parts, message = facility_disk(HELD, encoded, federated=HEADLESS).parts, B + 4 * B // 256 + headers(B)
    assert parts["update"] == 4 * B and parts["its encoded form"] == message and parts["residuals"] == 2 * 4 * B
    assert parts["with its own tensors"] + message + 4 * B == max(4 * (B + E), message + 4 * B)
    coordinator = coordinator_disk(HELD, {"a": plain}, rule="mean", rounds=5, keep_rounds=2, federated=HEADLESS)
    assert coordinator.parts[IN_FLIGHT] == 2 * B
    assert coordinator.parts["server state, old and new"] == 2 * 4 * B
    row = check_link(Facility(name="a", dataset="/d"), Deployment(), HELD, SendingSettings(), federated=HEADLESS)
    assert "2.05 kB there and 1.54 kB back a round" in row.found, row


def test_frozen_tensors_have_no_state_and_are_in_no_message_but_in_whole_updates():
    frozen = TrainingSettings(freeze=["model.layers.*"])
    encoded = dataclasses.replace(frozen, encoding="delta-int8", export_dtype="float32")
    assert HELD.trained(frozen) == E and HELD.written(frozen) == 2 * (E + B) and HELD.averaged(frozen) == E + B
    parts = facility_disk(HELD, frozen).parts
    assert parts["optimizer state"] == 8 * E and parts["state of a round that ends or pauses"] == 20 * E
    parts = facility_disk(HELD, encoded, "delta-int8").parts
    assert (
        parts["its encoded form"] == parts["a model's encoded form"] == E + 4 + headers(E)
        and parts["residuals"] == 8 * E
    )
    sending = SendingSettings(encoding="delta-int8")
    row = check_link(Facility(name="a", dataset="/d", training=encoded), Deployment(), HELD, sending)
    assert f"{E + 4 + headers(E)} B there and {E + 4 + headers(E)} B back a round" in row.found, row
    # Another facility trains what this one does not, so that models that are sent differ in all of it.
    other = dataclasses.replace(encoded, freeze=["model.embed*"])
    assert HELD.changed(encoded, other) == E + B
    messages = [
        coordinator_disk(HELD, updates, rule="mean", rounds=5, keep_rounds=2, sending=sending).parts[
            "messages of these"
        ]
        for updates in ({"a": encoded}, {"a": encoded, "b": other})
    ]
    assert messages == [3 * (E + 4 + headers(E)), 3 * (E + B + 4 * (E + B) // 256 + headers(E + B))]


@pytest.mark.parametrize(
    "patterns, all_of_them",
    [
        (Patterns(include=("base_model.*",)), True),
        (Patterns(exclude=("model.*",)), True),
        (Patterns(exclude=("base_model.*",)), False),
    ],
)
def test_patterns_mean_tensors_of_adapters_by_the_names_that_updates_have(patterns: Patterns, all_of_them: bool):
    lora = TrainingSettings(lora=LoraSettings(rank=2))
    assert HELD.changed(lora) == 2 * 2 * (24 + 16)
    assert HELD.changed(lora, federated=patterns) == all_of_them * HELD.changed(lora)
    assert HELD.written(lora, patterns) == all_of_them * HELD.written(lora)


def test_adapters_travel_whole_in_any_encoding_and_a_model_that_is_sent_differs_in_them_alone():
    lora = TrainingSettings(lora=LoraSettings(rank=2))
    encoded = dataclasses.replace(lora, encoding="delta-int8", export_dtype="float32")
    adapters = 2 * 2 * (24 + 16)
    assert HELD.returned(encoded) == HELD.written(encoded) == 4 * adapters
    assert (
        facility_disk(HELD, encoded).parts["its encoded form"] == facility_disk(HELD, encoded).parts["residuals"] == 0
    )
    sending, options = SendingSettings(encoding="delta-int8"), {"rule": "mean", "rounds": 5, "keep_rounds": 2}
    row = check_link(Facility(name="a", dataset="/d", training=lora), Deployment(), HELD, sending)
    message = round(adapters * (1 + 4 / 256)) + headers(adapters)
    assert f"{message} B there and {2 * adapters} B back a round" in row.found, row
    parts = coordinator_disk(HELD, {"a": encoded}, links=True, sending=sending, **options).parts
    assert parts[IN_FLIGHT] == 4 * adapters
    # Each is decoded as its receivers do and is there whole; what is encoded has its base from the round before.
    assert parts["the next model"] == 2 * P + 4 * adapters and parts["the model that is encoded"] == 4 * adapters


@pytest.mark.parametrize("bits", [16, 32])
def test_masked_updates_take_as_many_bits_as_the_settings_say(bits: int):
    row = check_link(Facility(name="a", dataset="/d"), Deployment(), HELD, SendingSettings(), masked_bits=bits)
    assert f"2.05 kB there and {2.05 if bits == 16 else 4.1:g} kB back a round" in row.found, row
    plain = TrainingSettings()
    parts = coordinator_disk(HELD, {"a": plain}, rule="mean", rounds=5, keep_rounds=2, masked_bits=bits).parts
    assert parts[IN_FLIGHT] == P * bits // 8
    parts = facility_disk(HELD, plain, masked_bits=bits).parts
    assert parts["its masked form"] == parts["residuals"] == 2 * P * bits // 8 and parts["update"] == 4 * P


def test_the_adapters_counted_are_those_that_the_trainer_makes(tmp_path: Path):
    """peft is the oracle, on two families that name their layers differently."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for family, targets in (("llama", ["q_proj", "down_proj"]), ("gpt2", ["c_attn", "c_proj"])):
        base = save_pico(tmp_path / family, family)
        adapted = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            LoraConfig(r=3, target_modules=targets, fan_in_fan_out=family == "gpt2"),
        )
        expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        told = TrainingSettings(lora=LoraSettings(rank=3, targets=targets))
        assert model_figures(base).trained(told) == expected


@pytest.mark.parametrize(
    ("program", "refused"),
    [
        ('[ "$LC_ALL" = C ] && echo Operation not supported >&2 || echo wird nicht unterstützt >&2; exit 1', None),
        ("echo fallocate failed: Disk quota exceeded >&2; exit 1", "fallocate failed: Disk quota exceeded"),
        ("kill -XFSZ $$", "ulimit -f allows no file so large"),
        ("exit 3", "fallocate ended with 3"),
    ],
)
def test_what_keeps_room_from_being_reserved_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, refused: str | None
):
    """In whatever language the account has; a file system that cannot reserve refuses nothing."""
    (tmp_path / "fallocate").write_text(f"#!/bin/bash\n{program}\n")
    (tmp_path / "fallocate").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert disk(tmp_path, 1).get("refused") == refused
