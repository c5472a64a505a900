"""What is worked out once for a whole workflow is what StreamFlow and cwl-utils work out for each of its steps."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from cwl_utils.parser import utils as parser_utils
from streamflow.core.workflow import Port, Step, Token
from streamflow.cwl.processor import CWLTokenProcessor
from streamflow.cwl.transformer import ValueFromTransformer
from streamflow.cwl.translator import CWLTranslator
from streamflow.workflow.token import ListToken, ObjectToken

from coordinator.streamflow_plugin import many_steps
from coordinator.streamflow_plugin.many_steps import checking, reading, referring, translating

PLAIN_TRANSFORM = inspect.unwrap(ValueFromTransformer.transform)
many_steps.install()


class Plain(Step):
    """A step of which only its ports count."""

    async def run(self) -> None: ...
    async def terminate(self, status: object) -> None: ...
    async def restore(self, on_tokens: object) -> None: ...


def test_the_steps_that_write_to_a_port_are_those_that_a_search_finds():
    """Also after steps and ports have come, several to one port or none, and where a step takes another's name."""
    workflow: Any = SimpleNamespace(steps={}, ports={})
    search, add, seen = Port.get_input_steps, Step.add_output_port, []

    def translate(self: object) -> str:
        for number in range(6):
            step = Plain(f"s{number % 5}", workflow)
            workflow.steps[step.name] = step
            for name in (f"p{number // 2}", "shared"):
                port = workflow.ports.setdefault(name, Port(workflow, name))
                step.add_output_port(name, port)
            workflow.ports[f"unwritten{number}"] = Port(workflow, f"unwritten{number}")
            Plain("never entered", workflow).add_output_port("shared", workflow.ports["shared"])
            for port in workflow.ports.values():
                seen.append(len(search(port)))
                assert set(port.get_input_steps()) == set(search(port))
        return "translated"

    assert translating(translate)(None) == "translated"
    assert max(seen) == 5 and min(seen) == 0
    assert Port.get_input_steps is search and Step.add_output_port is add


def facilities(count: int) -> ListToken:
    """What main.cwl is given: a record of each, whose values count how often they are looked at."""

    def record(number: int) -> ObjectToken:
        settings = {"class": "File", "path": f"/facilities/f{number}.json"}
        return ObjectToken(
            {"name": Counted(f"f{number}"), "dataset": Counted(f"/data/{number}"), "settings": Counted(settings)}
        )

    return ListToken([record(number) for number in range(count)])


class Counted(Token):
    """Counts in `looks` how often values are read."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            Counted.looks += 1
        return super().__getattribute__(name)


class Accepting:
    """A processor that lets every token pass, as that of `Any` does."""

    async def process(self, inputs: object, token: Token) -> Token:
        return token


def value_from(expression: str) -> Any:
    step = ValueFromTransformer.__new__(ValueFromTransformer)
    vars(step).update(value_from=expression, full_js=False, expression_lib=None, processor=Accepting())
    vars(step).update(workflow=SimpleNamespace(cwl_version="v1.2", context=None), output_ports={"it": "port"})
    return step


@pytest.mark.parametrize("key", ["name", "dataset", "settings"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_value_of_one_facility_is_what_the_engine_takes_from_all(key: str, number: int):
    inputs = {"it": facilities(3)}
    step = value_from(f"$(self[{number}].{key})")
    theirs = asyncio.run(PLAIN_TRANSFORM(step, inputs))["it"]
    ours = asyncio.run(referring(PLAIN_TRANSFORM)(step, inputs))["it"]
    assert type(ours) is type(theirs) and ours.value == theirs.value and ours.tag == theirs.tag
    assert ours.recoverable == theirs.recoverable


def test_however_many_facilities_there_are_one_value_is_looked_at():
    looks = {}
    for count in (2, 200):
        step, inputs = value_from("$(self[1].dataset)"), {"it": facilities(count)}
        Counted.looks = 0
        asyncio.run(referring(PLAIN_TRANSFORM)(step, inputs))
        looks[count] = Counted.looks
    assert looks[2] == looks[200] <= 2


@pytest.mark.parametrize(
    "expression", ["$(self.length)", "$(self[1].name)-x", "$(self[9].name)", "$(inputs.it[0].name)"]
)
def test_every_other_expression_is_left_to_the_engine(expression: str):
    asked = []

    async def original(self: Any, inputs: Any) -> str:
        asked.append(self.value_from)
        return "theirs"

    assert asyncio.run(referring(original)(value_from(expression), {"it": facilities(3)})) == "theirs"
    assert asked == [expression]


@pytest.mark.parametrize(
    ("file_format", "secondary_files", "inputs"),
    [(None, [], {}), ("$(inputs.kind)", [], {"a": 1}), (None, ["^.idx"], {"a": 1})],
)
def test_inputs_are_made_plain_data_where_an_expression_may_refer_to_them(
    file_format: str | None, secondary_files: list[str], inputs: dict[str, int]
):
    async def original(self: object, given: object, value: object) -> tuple[object, object]:
        return given, value

    processor = SimpleNamespace(file_format=file_format, secondary_files=secondary_files)
    assert asyncio.run(reading(original)(processor, {"a": 1}, "file")) == (inputs, "file")


def test_streamflow_is_as_known():
    """Else its own code would run, and hundreds of facilities would take long."""
    for function in (CWLTranslator.translate, ValueFromTransformer.transform, CWLTokenProcessor._process_file_token):
        assert hasattr(function, "__wrapped__"), function


def test_a_tool_is_loaded_once_for_all_steps_that_run_it(monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []

    def load(step: Any) -> object:
        loaded.append(step.run)
        return object()

    monkeypatch.setattr(parser_utils, "load_step", load)
    options = SimpleNamespace(fileuri="file:///round.cwl")
    steps = [SimpleNamespace(run=run, loadingOptions=options) for run in ("train.cwl", "receive.cwl") * 3]
    inline = SimpleNamespace(run={"class": "CommandLineTool"}, loadingOptions=options)
    workflow = SimpleNamespace(steps=[*steps, inline, inline])

    def check(same: Any) -> None:
        found = [parser_utils.load_step(step) for step in same.steps]
        assert found[0] is found[2] and found[0] is not found[1] and found[-1] is not found[-2]
        raise ValueError("types do not fit")

    with pytest.raises(ValueError, match="do not fit"):
        checking(check)(workflow)
    assert loaded == ["train.cwl", "receive.cwl", inline.run, inline.run]
    assert parser_utils.load_step is load
