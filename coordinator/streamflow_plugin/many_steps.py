"""What StreamFlow works out again for every step of a workflow, worked out once: with hundreds of facilities a run
begins in a fraction of the time, with the same steps.

Where StreamFlow's or cwl-utils' own code is not as it was when this was written, it runs as it is.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from cwl_utils.parser import utils as parser_utils
from streamflow.core.workflow import Port, Step, Token
from streamflow.cwl import transformer
from streamflow.cwl.processor import CWLTokenProcessor
from streamflow.cwl.transformer import ValueFromTransformer
from streamflow.cwl.translator import CWLTranslator
from streamflow.workflow.token import ListToken, ObjectToken
from streamflow.workflow.utils import get_token_value

ELEMENT = re.compile(r"\$\(self\[(\d+)\]\.([A-Za-z_]\w*)\)")
"""One field of one record of a list, as round.cwl refers to a facility's."""


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


def translating(original: Callable[..., Any]) -> Callable[..., Any]:
    """`CWLTranslator.translate`: which steps write to a port is noted as they come, not searched for among all."""

    @wraps(original)
    def translate(self: Any) -> Any:
        writers: dict[tuple[int, str], list[Step]] = defaultdict(list)
        add, search = Step.add_output_port, Port.get_input_steps

        def note(step: Step, name: str, port: Port) -> None:
            writers[id(step.workflow), port.name].append(step)
            add(step, name, port)

        def look_up(port: Port) -> list[Step]:
            steps = port.workflow.steps
            known = dict.fromkeys(writers[id(port.workflow), port.name])
            return [one for one in known if steps.get(one.name) is one and port.name in one.output_ports.values()]

        Step.add_output_port = note  # type: ignore[method-assign]
        Port.get_input_steps = look_up  # type: ignore[method-assign]
        try:
            return original(self)
        finally:
            Step.add_output_port = add  # type: ignore[method-assign]
            Port.get_input_steps = search  # type: ignore[method-assign]

    return translate


def referring(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ValueFromTransformer.transform`: `$(self[3].dataset)` takes this one value, not all of the list first.

    Every facility's steps take their values from the one list of facilities, of which StreamFlow makes plain data
    several times for each of them, in every round.
    """

    @wraps(original)
    async def transform(self: Any, inputs: Any) -> Any:
        name = self.get_output_name()
        if (token := element_of(self.value_from, inputs.get(name))) is None:
            return await original(self, inputs)
        made = await transformer.build_token(
            cwl_version=self.workflow.cwl_version,
            inputs=inputs,
            streamflow_context=self.workflow.context,
            token_value=get_token_value(token),
            recoverable=True,
        )
        return {name: made}

    return transform


def element_of(expression: Any, token: Any) -> Token | None:
    """What such an expression refers to in a list of records; None for everything else."""
    reference = ELEMENT.fullmatch(expression.strip()) if isinstance(expression, str) else None
    if reference is None or not isinstance(token, ListToken):
        return None
    number, key = int(reference[1]), reference[2]
    record = token.value[number] if number < len(token.value) else None
    return record.value.get(key) if isinstance(record, ObjectToken) else None


def reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """`CWLTokenProcessor._process_file_token`: all inputs of the step are made plain data only where a format or
    secondary files are asked for, whose expressions may refer to them."""

    @wraps(original)
    async def process_file_token(self: Any, inputs: Any, token_value: Any) -> Any:
        return await original(self, inputs if self.file_format or self.secondary_files else {}, token_value)

    return process_file_token


def install() -> None:
    """Replace each of these, once, where it is as known."""
    if "load_step" not in vars(parser_utils) or hasattr(parser_utils.static_checker, "__wrapped__"):
        return
    parser_utils.static_checker = checking(parser_utils.static_checker)  # type: ignore[assignment]
    if _calls(Port.get_input_steps, "self.workflow.steps.values()", "s.output_ports.values()"):
        CWLTranslator.translate = translating(CWLTranslator.translate)  # type: ignore[method-assign]
    if _calls(
        ValueFromTransformer.transform, "self.processor.process(", "build_context(", "build_token(", "self.value_from"
    ):
        ValueFromTransformer.transform = referring(ValueFromTransformer.transform)  # type: ignore[method-assign]
    method = CWLTokenProcessor._process_file_token
    if _calls(method, "build_context(inputs)") and inspect.getsource(method).count("inputs") == 2:
        CWLTokenProcessor._process_file_token = reading(method)  # type: ignore[method-assign]


def _calls(function: Any, *texts: str) -> bool:
    """True if each of these is in the function's source exactly once."""
    source = inspect.getsource(function)
    return all(source.count(text) == 1 for text in texts)
