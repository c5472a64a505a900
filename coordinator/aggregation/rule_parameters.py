"""Parameters of the shipped aggregation rules and server optimizers, as keys of `aggregation:` beside `rule`.

Each is declared once, in the file of its rule or optimizer. Several may declare the same name; where their defaults
differ, the key is unset unless given, and each has its own default.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from facility.exchange.registry import Parameter, Value

C = TypeVar("C", bound=type)


@functools.cache
def declared() -> dict[str, dict[str, Parameter]]:
    """The parameters by name, then by the rule or optimizer that has them."""
    found: dict[str, dict[str, Parameter]] = {}
    for entry in (*SERVER_OPTIMIZERS.built_in.values(), *RULES.built_in.values()):
        for parameter in entry.parameters:
            assert isinstance(parameter, Parameter), f"{entry.name} names a setting that is not its own"
            found.setdefault(parameter.name, {})[entry.name] = parameter
    return found


def unset(name: str) -> Value | None:
    """The value that means "the rule's own default"; None where all defaults are the same."""
    first, *others = declared()[name].values()
    if all(other.default == first.default for other in others):
        return None
    return float(first.above if first.above is not None else (first.at_least or 0.0) - 1)


def with_rule_parameters(cls: C) -> C:
    """Add a field for each declared parameter to a class that is about to become a dataclass."""
    for name, by_owner in declared().items():
        first, own = next(iter(by_owner.values())), unset(name)
        cls.__annotations__[name] = Annotated[type(first.default), *_limits(first, own), Field(description=_text(name))]
        setattr(cls, name, first.default if own is None else own)
    return cls


def _limits(parameter: Parameter, own: Value | None) -> list[Any]:
    """The range, as pydantic takes it; none where the value that means the default is outside it."""
    if own is not None:
        return []
    pairs = (
        (Gt, parameter.above),
        (Ge, parameter.at_least),
        (Lt, parameter.below),
        (Le, parameter.at_most),
    )
    return [mark(limit) for mark, limit in pairs if limit is not None]


def _text(name: str) -> str:
    """The documentation of a key, with the defaults where they differ."""
    by_owner, own = declared()[name], unset(name)
    text = next(iter(by_owner.values())).text
    if own is None:
        return text
    by_default: dict[Value, list[str]] = {}
    for owner, parameter in by_owner.items():
        by_default.setdefault(parameter.default, []).append(owner)
    listed = ", ".join(f"{default:g} of {' and '.join(owners)}" for default, owners in by_default.items())
    return f"{text} {own:g}: the default of the server optimizer, {listed}."
