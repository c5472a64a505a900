"""Registries: everything of one kind that can be chosen by name, found without importing it.

A built-in is one file of a package. It states what it is in a top-level constant, beside the code that does it:

    DECLARATION = Declaration(
        name="krum",
        summary="the update closest to its neighbours",
        citation="Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017",
        implementation="krum",
        parameters=(Parameter(name="byzantine", default=0, at_least=0, text="Updates that may be hostile."),),
    )

The declaration consists of literals only and is read from the file's source, so that names, parameters and help texts
are available wherever settings are validated, without importing torch. `load` imports the file and returns
`implementation`.

Code outside this package is added in two ways: an installed package offers an entry point (its name is the name), or
the settings give a dotted path, `package.module` or `package.module:object`. Such an object's module may define a
`DECLARATION` too; without one, the object has no parameters and the defaults of the declaration's other fields.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from facility.exchange.errors import ConfigurationError
from facility.exchange.text import KINDS, number_of

CONSTANT = "DECLARATION"
Value = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A number, switch or word that the user may set."""

    name: str
    default: Value
    """Its type is the parameter's: an integer default takes integers only, a float default takes both."""
    text: str = ""
    """What it is, with unit and off-value."""
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any, key: str = "") -> Value:
        """The value in the parameter's type. Raises `ConfigurationError` that names `key`."""
        key, kind = key or self.name, type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if (
            type(value) is not kind
            or (isinstance(value, float) and not math.isfinite(value))
            or not self._within(value)
        ):
            raise ConfigurationError(f"{key} is {value!r}, expected {self.expected}")
        return cast(Value, value)

    @property
    def expected(self) -> str:
        """The values allowed, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        limits = [
            f"{word} {limit:g}"
            for word, limit in (
                ("above", self.above),
                ("of at least", self.at_least),
                ("below", self.below),
                ("of at most", self.at_most),
            )
            if limit is not None
        ]
        return " ".join([KINDS[type(self.default)], " and ".join(limits)]).strip()

    def _within(self, value: Any) -> bool:
        return (
            (not self.choices or value in self.choices)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What one entry of a registry is. A kind that needs more derives from this class."""

    name: str
    summary: str = ""
    """One line for help texts and tables."""
    citation: str = ""
    """Authors, title, venue, year; empty: our own."""
    implementation: str = ""
    """Name of the class or function in the declaration's file."""
    parameters: tuple[Parameter | str, ...] = ()
    """Own parameters; a string names a setting of the kind's settings class that several entries share."""
    needs: tuple[str, ...] = ()
    """What must hold for it to be used, in words."""
    module: str = ""
    """Set by the registry: where the implementation is imported from."""

    def values(self, given: Mapping[str, Any], key: str = "parameters") -> dict[str, Value]:
        """Values of the own parameters: those given, checked, and defaults. Raises `ConfigurationError`."""
        own = {p.name: p for p in self.parameters if isinstance(p, Parameter)}
        for name in given:
            if name not in own:
                raise ConfigurationError(
                    f"{key}.{name} is unknown to {self.name}, expected {_listed(own)}{_close(name, own)}"
                )
        return {n: p.check(given[n], f"{key}.{n}") if n in given else p.default for n, p in own.items()}


D = TypeVar("D", bound=Declaration)


@dataclass(frozen=True, kw_only=True)
class Registry(Generic[D]):
    """Everything of one kind.

    `shared` returns the parameters that declarations may name as strings (usually fields of a settings class).
    """

    kind: str
    """In words, for messages: `synchronisation policy`."""
    package: str
    """Dotted name of the package of which each file may declare one entry."""
    entry_points: str
    """Group of entry points by which other packages add entries."""
    declaration: type[D]
    shared: Callable[[], Sequence[Parameter]] = tuple

    @cached_property
    def built_in(self) -> dict[str, D]:
        """The package's own entries by name, sorted."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations is not None, self.package
        modules = sorted(m.name for m in pkgutil.iter_modules(spec.submodule_search_locations))
        found = [self._declared(f"{self.package}.{name}") for name in modules]
        entries = sorted((entry for entry in found if entry is not None), key=lambda entry: entry.name)
        assert len({entry.name for entry in entries}) == len(entries), f"{self.package}: a name is declared twice"
        return {entry.name: entry for entry in entries}

    @cached_property
    def installed(self) -> dict[str, str]:
        """Entries of other packages: name to dotted path. A built-in's name cannot be taken."""
        points = importlib.metadata.entry_points(group=self.entry_points)
        return {point.name: point.value for point in points if point.name not in self.built_in}

    def names(self) -> tuple[str, ...]:
        """The names that can be chosen (dotted paths can be chosen beside them)."""
        return (*self.built_in, *sorted(self.installed))

    def get(self, name: str, key: str = "") -> D:
        """The declaration by name or dotted path; nothing is imported but a module's parents.

        Raises `ConfigurationError` that lists the names and the closest one.
        """
        if name in self.built_in:
            return self.built_in[name]
        if name in self.installed:
            return dataclasses.replace(self._outside(self.installed[name], key), name=name)
        if ":" in name or "." in name:
            return self._outside(name, key)
        raise ConfigurationError(
            f"{key or self.kind} is {name!r}, expected {_listed(self.names())}, "
            f"or a dotted path package.module:object{_close(name, self.names())}"
        )

    def load(self, name: str) -> Any:
        """The implementation, imported. Raises `ConfigurationError`, also for what one from outside raises then."""
        entry = self.get(name)
        try:
            return getattr(importlib.import_module(entry.module), entry.implementation)
        except Exception as error:
            if (plain := isinstance(error, ImportError | AttributeError)) or name not in self.built_in:
                said = str(error) if plain else f"{type(error).__name__}: {error}"
                raise ConfigurationError(f"{self.kind} {name!r} cannot be loaded: {said}") from error
            raise

    def call(self, name: str, *arguments: Any, **parameters: Any) -> Any:
        """What the implementation returns. Raises `ConfigurationError` where it cannot be loaded, or takes other
        arguments than these: a parameter that is declared and not taken, or taken and not declared."""
        implementation = self.load(name)
        try:
            inspect.signature(implementation).bind(*arguments, **parameters)
        except TypeError as error:
            raise ConfigurationError(
                f"{self.kind} {name!r} does not take what it is called with ({error}): expected "
                f"{number_of(len(arguments), 'positional argument')} and, by name, the parameters of its {CONSTANT}: "
                f"{', '.join(parameters) or 'none'}"
            ) from error
        except ValueError:  # a compiled one has no signature
            pass
        return implementation(*arguments, **parameters)

    def describe(self) -> list[dict[str, Any]]:
        """Name, summary, citation, needs and parameters (default, allowed values, text) of each, for documentation.

        Of a setting that several entries share and `shared` does not return, only the name.
        """
        return [self._description(self.get(name)) for name in self.names()]

    def _description(self, entry: D) -> dict[str, Any]:
        shared = {p.name: p for p in self.shared()}
        parameters = [shared.get(p, p) if isinstance(p, str) else p for p in entry.parameters]
        return {
            "name": entry.name,
            "summary": entry.summary,
            "citation": entry.citation,
            "needs": list(entry.needs),
            "parameters": [
                {"name": p}
                if isinstance(p, str)
                else {"name": p.name, "default": p.default, "expected": p.expected, "text": p.text}
                for p in parameters
            ],
        }

    def declares(self, path: str) -> bool:
        """Whether a dotted path leads to a declaration of this kind."""
        try:
            return self._outside(path, "", bare=False) is not None
        except ConfigurationError:
            return False

    def _outside(self, path: str, key: str, *, bare: bool = True) -> D:
        """The declaration behind `package.module`, `package.module:object` or `package.module.object`.

        `bare`: an object without a declaration will do.
        """
        module, colon, attribute = path.partition(":")
        if not colon:
            if (entry := self._module(path)) is not None:
                return dataclasses.replace(entry, name=path)
            module, _, attribute = path.rpartition(".")
        if not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise ConfigurationError(f"{key or self.kind} is {path!r}, expected a dotted path package.module:object")
        try:
            entry = self._declared(module)
        except ImportError as error:
            raise ConfigurationError(
                f"{key or self.kind} is {path!r}, and {module} cannot be found here: {error}. "
                "Install its package, or add its folder to PYTHONPATH"
            ) from error
        if entry is not None and entry.implementation == attribute:
            return entry
        if not bare:
            raise ConfigurationError(f"{key or self.kind} is {path!r}, which has no {CONSTANT}")
        spec = importlib.util.find_spec(module)
        assert spec is not None, "its declaration was read"
        if (bound := _bound(spec)) is not None and attribute not in bound:
            bound |= {one.name for one in pkgutil.iter_modules(spec.submodule_search_locations or [])}
            raise ConfigurationError(
                f"{key or self.kind} is {path!r}, and {module} has neither a module with a {CONSTANT} nor an object "
                f"{attribute!r}{_close(attribute, bound)}"
            )
        return self.declaration(name=path, implementation=attribute, module=module)

    def _module(self, path: str) -> D | None:
        """The declaration of the module at a dotted path; None: there is no such module, or it has none."""
        try:
            return self._declared(path) if all(part.isidentifier() for part in path.split(".")) else None
        except ImportError:
            return None

    def _declared(self, module: str) -> D | None:
        """The declaration in a module's source; None: it has none.

        Raises ImportError where there is no such module, `ConfigurationError` where its source or declaration is wrong.
        """
        spec = importlib.util.find_spec(module)
        if spec is None:
            raise ImportError(f"no module named {module!r}")
        try:
            return self._in_source(module, spec)
        except SyntaxError as error:
            raise ConfigurationError(
                f"{spec.origin}:{error.lineno} is no Python, so that no {self.kind} can be read from it: {error.msg}; "
                "correct it"
            ) from error
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the {CONSTANT} of {spec.origin} cannot be read ({error}); expected a {self.declaration.__name__} "
                "with its own fields, of literals only"
            ) from error

    def _in_source(self, module: str, spec: ModuleSpec) -> D | None:
        """The declaration in the source of a module that was found. Raises SyntaxError, TypeError, ValueError."""
        for statement in ast.parse(_source(spec)).body:
            if isinstance(statement, ast.Assign) and [ast.unparse(t) for t in statement.targets] == [CONSTANT]:
                known = {c.__name__: c for c in (Parameter, Declaration, self.declaration)}
                entry = _literal(statement.value, known)
                if not isinstance(entry, self.declaration):
                    raise ValueError(f"{module}.{CONSTANT} is not a {self.declaration.__name__}")
                return dataclasses.replace(entry, module=module)
        return None


def _source(spec: ModuleSpec) -> str:
    """A module's source text; empty where it has none (a namespace package, a compiled module)."""
    if isinstance(spec.loader, InspectLoader):
        return spec.loader.get_source(spec.name) or ""
    return Path(spec.origin).read_text(encoding="utf-8") if spec.origin and spec.origin.endswith(".py") else ""


def _bound(spec: ModuleSpec) -> set[str] | None:
    """Every name that a module's source binds anywhere, more than its own objects; None: its source does not show them.

    A package without `__init__.py` binds nothing.
    """
    if spec.origin is not None and not spec.origin.endswith(".py"):
        return None
    found = set[str]()
    for node in ast.walk(ast.parse(_source(spec))):
        match node:
            case (
                ast.FunctionDef(name="__getattr__") | ast.alias(name="*") | ast.Name(id="globals" | "setattr" | "exec")
            ):
                return None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
    return found


def _literal(node: ast.expr, classes: Mapping[str, type]) -> Any:
    """The value of an expression of literals and constructors of `classes`. Raises `ValueError`."""
    if isinstance(node, ast.Tuple):
        return tuple(_literal(item, classes) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes and not node.args:
        return classes[node.func.id](**{str(k.arg): _literal(k.value, classes) for k in node.keywords})
    return ast.literal_eval(node)


def _listed(names: Any) -> str:
    return f"one of {', '.join(names)}" if names else "none"


def _close(name: str, names: Any) -> str:
    match = get_close_matches(name, list(names), n=1)
    return f". Did you mean {match[0]!r}?" if match else ""
