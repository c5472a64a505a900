"""YAML with the line of every key, so that an error can point at it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scanner import RoundTripScanner, ScannerError

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.strict_json import LARGEST_WHOLE
from facility.exchange.typed_text import typed_text

MOST_BYTES = 4 << 20
MOST_VALUES = 100_000
"""Values of a file with every alias written out; a few lines of aliases of aliases could name billions."""
MOST_LEVELS = 50
"""Of lists and mappings within each other: the parser's time grows with the square of their depth."""
TOO_DEEP = f"nested too deeply: more than {MOST_LEVELS} lists and mappings within each other"
BOOLEAN, TEXT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
INTEGER, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
UNSIGNED = re.compile(r"[eE]\d")
"""An exponent without a sign: no number in YAML 1.1."""
OTHER_BASE = re.compile(r"[-+]?0[\dxb_].*|.*:.*")
"""A number that is not what it looks like: YAML 1.1 reads 0123 as 83, and 2:00 as 120."""


class _Resolver(VersionedResolver):
    """YAML 1.1 as PyYAML reads it: `n` and `12e03` are text, so that an account of that name stays what it is.

    So are `0123`, `0x10` and `2:00`, which YAML 1.1 takes for numbers to other bases.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        letter = str(tag) == BOOLEAN and len(value) == 1
        bare = str(tag) == FLOAT and ("." not in value or UNSIGNED.search(value))
        other = str(tag) in (INTEGER, FLOAT) and OTHER_BASE.fullmatch(value)
        return type(tag)(suffix=TEXT) if letter or bare or other else tag


class _Scanner(RoundTripScanner):
    """Flow collections are not read ahead beyond the depth that is allowed."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        if self.flow_level >= MOST_LEVELS:
            raise ScannerError(None, None, TOO_DEEP, self.reader.get_mark())
        super().fetch_flow_collection_start(TokenClass, to_push)


class _Composer(Composer):
    """Keys are text, as `on` in `notify: {on: [done]}`, which YAML 1.1 takes for true; the depth is bounded."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.level += 1
        if self.level > MOST_LEVELS:
            raise ComposerError(None, None, TOO_DEEP, self.parser.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):  # each level of such keys doubles the time that hashing them takes
                raise ComposerError(None, None, "a key is a list or a mapping, expected plain text", key.start_mark)
            if str(key.tag) == BOOLEAN:
                key.ctag = type(key.ctag)(suffix=TEXT)
        return node


def _yaml() -> YAML:
    yaml = YAML(typ="rt", pure=True)
    yaml.Scanner = _Scanner
    return yaml


class Lined:
    """Plain data of a YAML file and the line of each value's key."""

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        self.lines: dict[str, int] = {}
        self._values = 0
        loaded = self._load(self._text())
        if loaded is None:
            raise ConfigurationError("the file is empty; `crossfed init` writes one to begin with", file=file)
        self.lines[""] = 1 + getattr(getattr(loaded, "lc", None), "line", 0)
        self.data = self._plain(loaded, "")

    def error(self, message: str, path: str) -> ConfigurationError:
        """An error at the line of `path` (such as `facilities[1].name`), or of the nearest enclosing key."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return ConfigurationError(message, file=self.file, line=self.lines.get(path))

    def texts(self) -> Iterator[tuple[str, str]]:
        """Path and value of every piece of text in the file, in its order."""
        yield from _texts(self.data, "")

    def _text(self) -> str:
        try:
            return typed_text(self.file, MOST_BYTES)
        except FileNotFoundError:
            raise ConfigurationError("no such file; `crossfed init` writes a first one", file=self.file) from None
        except IsADirectoryError:
            raise ConfigurationError("is a folder; name the file, such as its federation.yml", file=self.file) from None
        except OSError as error:
            raise ConfigurationError(f"cannot be read: {error.strerror}", file=self.file) from None

    def _load(self, text: str) -> Any:
        yaml = _yaml()
        yaml.Resolver = _Resolver
        yaml.Composer = _Composer
        yaml.version = (1, 1)  # type: ignore[assignment]
        try:
            self._refuse_recursion(text)
            return yaml.load(text)
        except ConfigurationError:
            raise
        except DuplicateKeyError as error:
            key = re.search(r'duplicate key "(.*?)"', str(error.problem))
            problem = f"key {key[1]!r} is given twice" if key else str(error.problem)
            raise self._at(problem, error.problem_mark) from None
        except MarkedYAMLError as error:
            how = "indent the lines of one level alike, by blanks and no tab, with a blank after a key's colon"
            raise self._at(f"not valid YAML: {error.problem or error}; {how}", error.problem_mark) from None
        except ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            problem = f"holds the control character U+{error.character:04X}: remove it"
            raise ConfigurationError(problem, file=self.file, line=line) from None
        except (YAMLError, RecursionError) as error:
            raise ConfigurationError(f"not valid YAML: {str(error) or 'nested too deeply'}", file=self.file) from None
        except (ValueError, ArithmeticError, AttributeError, LookupError) as error:  # a value is not what its tag says
            problem = f"not valid YAML: a value does not fit its tag, or an escape names no character ({error})"
            raise ConfigurationError(problem, file=self.file) from None

    def _refuse_recursion(self, text: str) -> None:
        """Raise `ConfigurationError` where an alias is inside the value that it names, or a value too deep."""
        within: list[str | None] = []
        for event in _yaml().parse(text) if "*" in text else ():
            if isinstance(event, CollectionStartEvent):
                within.append(event.anchor)
                if len(within) > MOST_LEVELS:
                    raise self._at(TOO_DEEP, event.start_mark)
            elif isinstance(event, CollectionEndEvent):
                within.pop()
            elif isinstance(event, AliasEvent) and event.anchor in within:
                raise self._at(
                    f"*{event.anchor} is an alias of the value that holds it: write it out", event.start_mark
                )

    def _at(self, message: str, mark: Any) -> ConfigurationError:
        return ConfigurationError(message, file=self.file, line=mark.line + 1 if mark else None)

    def _plain(self, value: Any, path: str) -> Any:
        """The value as Python's own types, with its line noted."""
        self._values += 1
        if self._values > MOST_VALUES:
            raise self.error(f"more than {MOST_VALUES} values once aliases are written out", path)
        tag = str(getattr(value, "tag", None))
        if isinstance(value, TaggedScalar) and tag in (TEXT, "!!str"):
            return str(value.value)
        if isinstance(value, TaggedScalar) or tag != "None":
            raise self.error(f"{path} has the YAML tag {tag}, expected plain data", path)
        if isinstance(value, CommentedMap):
            return {self._key(value, key): self._below(value, key, path) for key in value}
        if isinstance(value, CommentedSeq):
            items = []
            for number, item in enumerate(value):
                below = f"{path}[{number}]"
                self.lines.setdefault(below, value.lc.item(number)[0] + 1)
                items.append(self._plain(item, below))
            return items
        if value is None or type(value) is bool:
            return value
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
            raise self.error(f"{path} is a number of more than 64 bits, expected at most {LARGEST_WHOLE}", path)
        for kind in (str, int, float):
            if isinstance(value, kind):
                return bool(value) if type(value).__name__ == "ScalarBoolean" else kind(value)
        if isinstance(value, datetime.date):
            raise self.error(f"{path} is the date {value}, expected text or a number: put it between quotes", path)
        raise self.error(f"{path} is a {type(value).__name__}, expected plain data", path)

    def _key(self, mapping: CommentedMap, key: Any) -> str:
        if not isinstance(key, str):
            line = mapping.lc.data[key][0] + 1 if key in mapping.lc.data else None
            raise ConfigurationError(f"key {key!r} is not plain text: put it between quotes", file=self.file, line=line)
        return str(key)

    def _below(self, mapping: CommentedMap, key: str, path: str) -> Any:
        below = f"{path}.{key}" if path else key
        if key in (mapping.lc.data or {}):  # what `<<` brought has no line here
            self.lines.setdefault(below, mapping.lc.key(key)[0] + 1)
        return self._plain(mapping[key], below)


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _texts(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _texts(below, f"{path}[{number}]")
    elif isinstance(value, str):
        yield path, value
