"""A registry reads what files declare without importing them, and finds entries of other packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError
from facility.exchange.registry import Declaration, Parameter, Registry

FILE = """
from facility.exchange.registry import Declaration, Parameter
raise_if_imported = {loud}

DECLARATION = Declaration(
    name="{name}",
    summary="for " "tests",
    citation="Nobody, 1900",
    implementation="apply",
    parameters=(Parameter(name="rate", default=-0.5, at_most=0.0, text="A rate."), "weights"),
    needs=("patience",),
)

def apply(): return "{name}"
"""
SHARED = Parameter(name="weights", default="samples", choices=("samples", "equal"))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Declaration]]:
    """Entries `one` and `two` in a package whose files fail on import, `three` by an entry point."""
    package = tmp_path / "rules_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "b.py").write_text(FILE.format(name="one", loud="1"))
    (package / "a.py").write_text(FILE.format(name="two", loud="1 / 0"))
    (package / "machinery.py").write_text("NAME = 'declares nothing'")
    (tmp_path / "outside_of_a_test.py").write_text(FILE.format(name="three", loud="1"))
    (tmp_path / "bare_of_a_test.py").write_text("def plain(): return 'plain'")
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[crossfed.test]\nmine = outside_of_a_test:apply\none = outside_of_a_test:apply\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield Registry(
        kind="rule",
        package="rules_of_a_test",
        entry_points="crossfed.test",
        declaration=Declaration,
        shared=lambda: [SHARED],
    )
    for name in [n for n in sys.modules if n.endswith("_of_a_test") or n.startswith("rules_of_a_test")]:
        del sys.modules[name]


def test_names_and_declarations_are_read_without_importing_a_file(registry: Registry[Declaration]) -> None:
    assert registry.names() == ("one", "two", "mine")  # what is built in keeps its name
    assert registry.get("two").summary == "for tests"
    assert [d["parameters"] for d in registry.describe()] == [
        [
            {"name": "rate", "default": -0.5, "expected": "a number of at most 0", "text": "A rate."},
            {"name": "weights", "default": "samples", "expected": "one of samples, equal", "text": ""},
        ]
    ] * 3
    assert not {n for n in sys.modules if "of_a_test." in n or n == "outside_of_a_test"}


def test_implementations_are_loaded_by_name_entry_point_and_dotted_path(registry: Registry[Declaration]) -> None:
    for name, expected in {
        "one": "one",
        "mine": "three",
        "outside_of_a_test:apply": "three",
        "outside_of_a_test.apply": "three",
        "bare_of_a_test:plain": "plain",
    }.items():
        assert registry.load(name)() == expected
    module = importlib.import_module("rules_of_a_test.b")
    assert registry.get("one") == Declaration(**(vars(module.DECLARATION) | {"module": module.__name__}))
    assert registry.get("bare_of_a_test:plain").parameters == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tow", "aggregation.rule is 'tow', expected one of one, two, mine, .*Did you mean 'two'?"),
        ("nowhere_at_all:f", "'nowhere_at_all:f', and nowhere_at_all cannot be found here.*PYTHONPATH"),
        ("os;system:f", "expected a dotted path"),
    ],
)
def test_unknown_names_are_refused_with_those_known(registry: Registry[Declaration], name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        registry.get(name, "aggregation.rule")


def test_a_missing_implementation_is_told_as_it_is_named(registry: Registry[Declaration]) -> None:
    """A check took any word after a package that is there for an object of it: after a round's training it was none."""
    with pytest.raises(ConfigurationError, match="neither a module with a DECLARATION nor an object 'absent'"):
        registry.get("bare_of_a_test:absent")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def wanted(): ...", True),
        ("class wanted: ...", True),
        ("wanted = print", True),
        ("try:\n    from math import exp as wanted\nexcept ImportError:\n    wanted = None", True),
        ("from math import *", True),
        ("def __getattr__(name): ...", True),
        ("globals()['wan' + 'ted'] = print", True),
        ("", False),
        ("def wanted_too(): ...\nprint('wanted')", False),
    ],
)
def test_an_object_that_a_module_may_bind_is_taken(
    registry: Registry[Declaration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: bool
) -> None:
    (tmp_path / "binds_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    if found:
        assert registry.get("binds_of_a_test.wanted").implementation == "wanted"
    else:
        with pytest.raises(ConfigurationError, match="nor an object 'wanted'"):
            registry.get("binds_of_a_test.wanted")


SLIPS = {
    "no_python": ("DECLARATION = (", r"no_python\.py:1 is no Python.*was never closed"),
    "misspelt": ("DECLARATION = Declaration(naem='x')", r"DECLARATION of .*misspelt\.py cannot be read.*'naem'"),
    "computed": ("DECLARATION = Declaration(name='x', summary=1 + len('x'), implementation='f')", "literals only"),
    "another": ("DECLARATION = 7", r"DECLARATION of .*another\.py cannot be read"),
}


@pytest.mark.parametrize("name", SLIPS)
@pytest.mark.parametrize("form", ["{}:f", "package.{}"])
def test_a_slip_in_a_module_of_ones_own_is_named_with_its_file(
    registry: Registry[Declaration], tmp_path: Path, name: str, form: str
) -> None:
    text, words = SLIPS[name]
    folder = tmp_path / "package" if "package" in form else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    with pytest.raises(ConfigurationError, match=words):
        registry.get(form.format(name))


def test_what_a_module_of_ones_own_raises_as_it_is_imported_is_one_error(
    registry: Registry[Declaration], tmp_path: Path
) -> None:
    (tmp_path / "raises_of_a_test.py").write_text(FILE.format(name="x", loud="1 / 0"))
    importlib.invalidate_caches()
    with pytest.raises(ConfigurationError, match="'raises_of_a_test:apply' cannot be loaded: ZeroDivisionError"):
        registry.load("raises_of_a_test:apply")
    with pytest.raises(ZeroDivisionError):  # our own mistake keeps its traceback
        registry.load("two")


@pytest.mark.parametrize("taken", ["updates", "updates, *, rate, weights, more", "updates, *, rat, weights"])
def test_a_function_that_does_not_take_its_declared_parameters_is_named(
    registry: Registry[Declaration], tmp_path: Path, taken: str
) -> None:
    text = FILE.format(name="x", loud="1").replace("def apply()", f"def apply({taken})")
    (tmp_path / "takes_of_a_test.py").write_text(text)
    importlib.invalidate_caches()
    with pytest.raises(ConfigurationError, match="'takes_of_a_test:apply' does not take .*: rate, weights"):
        registry.call("takes_of_a_test:apply", "the updates", rate=0.0, weights="equal")
    assert registry.call("mine") == "three"


@pytest.mark.parametrize("bad", [{"rate": 1}, {"rate": "x"}, {"rate": float("nan")}, {"rate": True}, {"rat": 0}])
def test_values_outside_the_declared_ones_are_refused(registry: Registry[Declaration], bad: dict) -> None:
    with pytest.raises(ConfigurationError, match="rate"):
        registry.get("one").values(bad)


def test_values_take_the_declared_type_and_default(registry: Registry[Declaration]) -> None:
    assert registry.get("one").values({}) == {"rate": -0.5}
    value = registry.get("one").values({"rate": -2})["rate"]
    assert (value, type(value)) == (-2.0, float)
