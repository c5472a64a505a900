"""What is worked out once for a whole workflow is what StreamFlow and cwl-utils work out for each of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cwl_utils.parser import utils as parser_utils
from streamflow.core.workflow import Port

from coordinator.streamflow_plugin.many_steps import checking, injecting


def test_the_steps_that_write_to_a_port_are_those_that_a_search_finds():
    """Also after steps and ports have come, and several to one port, or none."""
    workflow: Any = SimpleNamespace(steps={}, ports={})
    search, seen = Port.get_input_steps, []

    def inject(self: object, same: Any) -> None:
        for number in range(5):
            workflow.steps[f"s{number}"] = SimpleNamespace(output_ports={"a": f"p{number // 2}", "b": "shared"})
            workflow.ports[f"p{number}"] = Port(workflow, f"p{number}")
            workflow.ports["shared"] = Port(workflow, "shared")
            for port in workflow.ports.values():
                seen.append(port.name)
                assert list(port.get_input_steps()) == list(search(port))

    injecting(inject)(None, workflow)
    assert len(seen) > 15 and Port.get_input_steps is search


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
