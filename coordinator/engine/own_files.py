"""Which files a rendering wrote, and which are a person's own: these are never replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from facility.exchange.json_text import object_in

HEAD = "# Rendered by `crossfed render` from federation.yml: edit that file and render again.\n"
LOGIN_SUFFIX = "-login.sh"
"""Of the template of a facility's commands on its login node."""


def own_files(paths: Iterable[Path], templates: Collection[Path]) -> list[Path]:
    """Those of the files that a rendering writes which exist and were not rendered; `templates`: that it reads."""
    return [path for path in paths if path.exists() and (path.resolve() in templates or not _rendered(path))]


def of_facility(path: Path) -> bool:
    """Whether a file holds the settings of the facility that it is named by, as a rendering writes them."""
    return _federated(path).get("facility") == path.stem


def _rendered(path: Path) -> bool:
    if path.suffix == ".sh":  # a job template is rendered as it is, beside the settings of its facility
        names = {path.stem, path.name.removesuffix(LOGIN_SUFFIX)}
        return any(of_facility(path.parent.parent / "facilities" / f"{name}.json") for name in names)
    if path.suffix == ".json":
        return of_facility(path) if path.parent.name == "facilities" else "facilities" in _federated(path)
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline() == HEAD
    except (OSError, ValueError):
        return False


def _federated(path: Path) -> dict[str, object]:
    """The values of a JSON file that names a federation; none of any other."""
    try:
        values = object_in(path.read_bytes()) or {}
    except OSError:
        return {}
    return values if "federation" in values else {}
