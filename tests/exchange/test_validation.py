"""Validated dataclasses: nothing is converted silently, and an error says what was found and what was expected."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Lt
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator

from facility.exchange.errors import ConfigurationError
from facility.exchange.validation import AtLeastOne, Positive, Share, parse_dataclass, validated


@validated(frozen=True, kw_only=True)
class Inner:
    share: Share = 0.5
    count: Positive[int] = 1
    pairs: list[list[int]] = field(default_factory=list)
    fixed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ConfigurationError("count is 13, expected luck")


@validated(frozen=True, kw_only=True)
class Outer:
    name: str
    half: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    weights: Literal["equal"] | dict[str, Positive[float]] = "equal"
    inner: Inner = field(default_factory=Inner)
    rows: list[Inner] = field(default_factory=list)
    maybe: Inner | None = None
    part: Literal["all"] | AtLeastOne[int] | Share = "all"
    switch: Annotated[Inner | None, BeforeValidator(lambda given: given, json_schema_input_type=bool | Inner)] = None
    anything: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"name": 1}, "name is 1, expected text"),
        ({"name": None}, "name is empty, expected text"),
        ({"name": "x", "flag": 1}, "flag is 1, expected true or false"),
        ({"name": "x", "flag": "yes"}, "flag is 'yes', expected true or false"),
        ({"name": "x", "half": True}, "half is true, expected a number, 0 or more and less than 0.5"),
        ({"name": "x", "half": "0.1"}, "half is '0.1', expected a number, 0 or more and less than 0.5"),
        ({"name": "x", "half": 0.5}, "half is 0.5, expected 0 or more and less than 0.5"),
        ({"name": "x", "half": float("nan")}, "half is nan, expected a finite number, 0 or more and less than 0.5"),
        ({"name": "x", "kind": "c"}, "kind is 'c', expected one of 'a', 'b'"),
        ({"name": "x", "weights": "even"}, "weights is 'even', expected 'equal' or a mapping"),
        ({"name": "x", "weights": {"k": 0}}, "weights.k is 0, expected more than 0"),
        ({"name": "x", "inner": {"count": 1.0}}, "inner.count is 1.0, expected a whole number, more than 0"),
        ({"name": "x", "inner": {"count": 13}}, "inner: count is 13, expected luck"),
        ({"name": "x", "inner": 3}, "inner is 3, expected a mapping"),
        ({"name": "x", "maybe": 3}, "maybe is 3, expected a mapping"),
        ({"name": "x", "switch": 3}, "switch is 3, expected true or false or a mapping"),
        (
            {"name": "x", "part": 0},
            "part is 0, expected 'all' or a whole number (1 or more) or a number (more than 0 and at most 1)",
        ),
        ({"name": "x", "inner": {"pairs": [[1], [2, "3"]]}}, "inner.pairs[1][1] is '3', expected a whole number"),
        ({"name": "x", "inner": {"fixed": "12"}}, "inner.fixed is '12', expected a list"),
        (
            {"name": "x", "rows": [{}, {"cuont": 1}]},
            "unknown key 'rows[1].cuont'; did you mean 'count'? known keys are",
        ),
        ({"nme": "x"}, "unknown key 'nme'; did you mean 'name'? known keys are name, half"),
        ({"half": 0.1}, "the mapping lacks name"),
        ({"name": "x", 3: 4}, "unknown key '[3]'; known keys are"),
        ([], "found [], expected a mapping"),
    ],
)
def test_an_error_says_what_was_found_and_what_was_expected(raw: Any, message: str):
    with pytest.raises(ConfigurationError) as caught:
        parse_dataclass(Outer, raw)
    assert str(caught.value).startswith(message)


def test_the_first_error_of_the_file_is_told_with_key_and_file():
    with pytest.raises(ConfigurationError) as caught:
        parse_dataclass(Outer, {"name": "x", "kind": "c", "half": 7}, where="top", file="f.json")
    assert str(caught.value) == "f.json: top.kind is 'c', expected one of 'a', 'b'"
    assert caught.value.key == "top.kind"


@given(st.floats(1e-300, 0.49))
def test_numbers_with_an_exponent_may_be_text(number: float):
    text = f"{number:e}"
    assert parse_dataclass(Outer, {"name": "x", "half": text}).half == float(text)


def test_lists_and_whole_numbers_take_the_declared_type():
    made = parse_dataclass(Outer, {"name": "x", "inner": {"share": 1, "fixed": [1, 2]}})
    assert made.inner == Inner(share=1.0, fixed=(1, 2)) and type(made.inner.share) is float


def test_they_are_dataclasses_and_are_checked_on_construction():
    made = Outer(name="x", inner=Inner(count=2))
    assert dataclasses.replace(made, half=0.25).inner.count == 2
    assert parse_dataclass(Outer, dataclasses.asdict(made)) == made
    with pytest.raises(ConfigurationError, match="count is 0, expected more than 0"):
        dataclasses.replace(made.inner, count=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "y"  # type: ignore[misc]


def test_a_wrong_call_is_a_type_error_as_of_any_class():
    with pytest.raises(TypeError, match="cuont"):
        Inner(cuont=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lacks name"):
        Outer()  # type: ignore[call-arg]


def test_the_agreement_of_both_sides_loads_no_torch():
    code = (
        "import sys, facility.exchange.messages.settings, facility.exchange.validation as v; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
