"""YAML with the line of every key, so that an error can point at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from facility.exchange.errors import ConfigurationError


class Lined:
    """Plain data of a YAML file and the line where each value's key stands."""

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        self.lines: dict[str, int] = {}
        try:
            node = yaml.compose(self.file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except FileNotFoundError:
            raise ConfigurationError("no such file; `crossfed init` writes a first one", file=file) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot be read: {error}", file=file) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or str(error)
            raise ConfigurationError(
                f"not valid YAML: {problem}", file=file, line=mark.line + 1 if mark else None
            ) from None
        if node is None:
            raise ConfigurationError("the file is empty", file=file)
        self.data = self._value(node, "")

    def error(self, message: str, path: str) -> ConfigurationError:
        """An error at the line of `path` (such as `facilities[1].name`), or of the nearest enclosing key."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return ConfigurationError(message, file=self.file, line=self.lines.get(path))

    def texts(self) -> Iterator[tuple[str, str]]:
        """Path and value of every piece of text in the file, in its order."""
        yield from _texts(self.data, "")

    def _value(self, node: yaml.Node, path: str) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value
                if not isinstance(key, str):
                    raise ConfigurationError(
                        "a key must be plain text", file=self.file, line=key_node.start_mark.line + 1
                    )
                below = f"{path}.{key}" if path else key
                if key in result:
                    raise ConfigurationError(
                        f"key {below!r} stands twice", file=self.file, line=key_node.start_mark.line + 1
                    )
                self.lines[below] = key_node.start_mark.line + 1
                result[key] = self._value(value_node, below)
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, f"{path}[{number}]") for number, item in enumerate(node.value)]
        return yaml.SafeLoader("").construct_object(node, deep=True)


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _texts(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _texts(below, f"{path}[{number}]")
    elif isinstance(value, str):
        yield path, value
