"""What StreamFlow works out again for every step of a workflow, worked out once: with hundreds of facilities a run
begins in a fraction of the time, with the same steps.

Where StreamFlow's or cwl-utils' own code is not as it was when this was written, it runs as it is.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from cwl_utils.parser import utils as parser_utils
from streamflow.core.workflow import Port, Step
from streamflow.cwl.translator import CWLTranslator


def checking(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`static_checker`: a tool is loaded once for all steps that run it, not once for every port of each of them."""

    @wraps(original)
    def static_checker(workflow: Any) -> None:
        loaded: dict[tuple[str, str], Any] = {}
        load = parser_utils.load_step

        def load_once(step: Any) -> Any:
            if not isinstance(step.run, str):
                return load(step)
            key = (step.loadingOptions.fileuri, step.run)
            if key not in loaded:
                loaded[key] = load(step)
            return loaded[key]

        parser_utils.load_step = load_once
        try:
            original(workflow)
        finally:
            parser_utils.load_step = load

    return static_checker


def injecting(original: Callable[..., None]) -> Callable[..., None]:
    """`CWLTranslator._inject_inputs`: which steps write to a port is looked up, not searched for among all steps."""

    @wraps(original)
    def inject_inputs(self: Any, workflow: Any) -> None:
        writers: dict[str, list[Step]] = {}
        known: tuple[int, int] | None = None
        search = Port.get_input_steps

        def look_up(port: Port) -> list[Step]:
            nonlocal writers, known
            if port.workflow is not workflow:
                return list(search(port))
            size = len(workflow.steps), len(workflow.ports)
            if size != known:
                writers, known = writers_of(workflow), size
            return writers.get(port.name, [])

        Port.get_input_steps = look_up  # type: ignore[method-assign,assignment]
        try:
            original(self, workflow)
        finally:
            Port.get_input_steps = search  # type: ignore[method-assign]

    return inject_inputs


def writers_of(workflow: Any) -> dict[str, list[Step]]:
    """The steps that write to each port, by its name, in the order of the steps."""
    found: dict[str, list[Step]] = defaultdict(list)
    for step in workflow.steps.values():
        for name in dict.fromkeys(step.output_ports.values()):
            found[name].append(step)
    return dict(found)


def install() -> None:
    """Replace both, once, where they are as known."""
    if "load_step" not in vars(parser_utils) or hasattr(parser_utils.static_checker, "__wrapped__"):
        return
    parser_utils.static_checker = checking(parser_utils.static_checker)  # type: ignore[assignment]
    source = inspect.getsource(CWLTranslator._inject_inputs)
    if source.count("get_input_steps()") == 1 and source.count("_inject_input(") == 2:
        CWLTranslator._inject_inputs = injecting(CWLTranslator._inject_inputs)  # type: ignore[method-assign]
