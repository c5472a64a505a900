"""What a plan file holds, and what the trainer refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.plan import CompressedLink, Plan, Span, Sync, plan_from_json, read_plan, write_plan

SMALL = Plan(stages=2, replicas=2, grid=((3, 1), (0, 2)), stage_units=((0, 2), (2, 6)), micro_batches=4)


def test_a_plan_survives_its_file(tmp_path):
    plan = dataclasses.replace(
        SMALL,
        micro_batches=(3, 5),
        micro_batch_samples=2,
        schedule="gpipe",
        sync=Sync(name="partial_reduce", options={"bound": 4}),
        compressed_links=(CompressedLink(source=3, destination=0, codec="int8", ratio=0.25),),
        predicted_seconds=1.5,
        reasons=("because",),
        tried=({"method": "even", "seconds": 2.0},),
        device_ids=("a", "b", "c", "d"),
    )
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan


def test_spans_are_derived_from_the_grid():
    assert set(SMALL.spans) == {
        Span(device=3, first_layer=0, end_layer=2),
        Span(device=1, first_layer=0, end_layer=2),
        Span(device=0, first_layer=2, end_layer=6),
        Span(device=2, first_layer=2, end_layer=6),
    }
    assert SMALL.place_of(2) == (1, 1) and SMALL.place_of(9) is None
    assert SMALL.replica_micro_batches == (4, 4)


def test_virtual_stages_loop_over_the_rows():
    plan = Plan(
        stages=2,
        replicas=1,
        grid=((1,), (0,)),
        stage_units=((0, 1), (1, 3), (3, 5), (5, 6)),
        virtual_stages=2,
        schedule="interleaved_1f1b",
    )
    assert plan.units_of_stage(0) == ((0, 1), (3, 5))
    assert plan.units_of_stage(1) == ((1, 3), (5, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": [[3, 1], [0, 3]]}, "device 3 more than once"),
        ({"grid": [[3, 1]]}, "expected 2 rows"),
        ({"grid": [[3, 1], [0, -2]]}, "device -2"),
        ({"grid": [[3, 1], [0, "x"]]}, "expected a whole number"),
        ({"stage_units": [[0, 2], [3, 6]]}, "unit 2 is in no stage"),
        ({"stage_units": [[0, 3], [2, 6]]}, "unit 2 is in two stages"),
        ({"stage_units": [[0, 0], [0, 6]]}, "is empty"),
        ({"stage_units": [[0, 6]]}, "expected 2 pairs"),
        ({"micro_batches": [1, 2, 3]}, "expected 2 numbers"),
        ({"micro_batches": 0}, "numbers of 1 to"),
        ({"micro_batches": 10**12}, "numbers of 1 to 1,048,576"),
        ({"micro_batches": [4, 2**63]}, "numbers of 1 to 1,048,576"),
        ({"schedule": "2f2b"}, "'2f2b', expected one of"),
        ({"virtual_stages": 2}, "expected 4 pairs"),
        ({"sync": {"name": "prayer"}}, "sync.name"),
        ({"spans": [{"device": 0, "first_layer": 0, "end_layer": 6}]}, "spans disagree"),
        ({"predicted_seconds": float("nan")}, "predicted_seconds is nan"),
        ({"stagez": 2}, "did you mean 'stages'"),
        ({"format": 99}, "newer than"),
    ],
)
def test_a_wrong_plan_gets_one_clear_error(change, message):
    raw = {**json.loads(json.dumps(SMALL.to_json())), **({} if "spans" in change else {"spans": []}), **change}
    with pytest.raises(ConfigurationError, match=message):
        plan_from_json(raw, file="plan.json")


def test_the_trainer_refuses_a_plan_for_another_model_or_allocation():
    SMALL.validate(world_size=4, layers=4)
    with pytest.raises(ConfigurationError, match="covers 6 units, expected 10"):
        SMALL.validate(world_size=4, layers=8)
    with pytest.raises(ConfigurationError, match="uses rank 3, but there are 3 ranks"):
        SMALL.validate(world_size=3, layers=4)


def test_a_file_that_is_no_plan(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ConfigurationError, match="plan.json: cannot be read"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_plan(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "text",
    [
        '{"token": "hunter2"}',
        '["hunter2"]',
        '"hunter2"',
        "hunter2",
        '{"hunter2": 1, "stages": 1}',
        '{"stages": "hunter2"}',
    ]
    + ["\udc80hunter2", "[" * 100_000],
)
def test_nothing_of_a_file_that_is_no_plan_is_quoted(tmp_path: Path, text: str):
    """`layout.plan` may name any file of the account, and the coordinator is told the reason."""
    path = tmp_path / "secret.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match="is not a plan|cannot be read as JSON") as found:
        read_plan(path)
    assert "hunter2" not in str(found.value)
