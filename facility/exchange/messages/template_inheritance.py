"""The text of a job template: a site's template may extend another by jinja2's `extends` and `block`.

A template of `templates/` is found by its name alone (`leonardo`), another by its path. `extends` looks in the
template's own folder, then in `templates/`. The result is self-contained: a scheduler's script with placeholders
such as `<account>` and with the names that StreamFlow fills in, and no other jinja2.
"""

from __future__ import annotations

import re
from pathlib import Path

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.bounded import real_path
from facility.exchange.files.paths import shipped_path
from facility.exchange.typed_text import typed_text

ENGINE_NAMES = ("streamflow_command", "streamflow_environment", "streamflow_workdir")
"""What StreamFlow knows when it renders a job template."""
COMMAND = "{{ streamflow_command }}"
"""Where the engine puts a job's command."""
SYNTAX = re.compile(r"\{[{%#]")
PLACEHOLDER = re.compile(r"<([a-z][a-z0-9_]*)>")
SHORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MOST_BYTES = 1 << 20
"""Most bytes of a template."""


def shipped_templates() -> dict[str, Path]:
    """The templates that ship with CrossFed, by name."""
    return {path.stem: path for path in sorted(shipped_path("templates").glob("*.sh"))}


def find_template(name: str, folder: Path) -> Path:
    """Path of a template: `leonardo` is the shipped one, unless `folder` holds a file of that name; else a path."""
    path = real_path(folder / Path(name).expanduser())
    if SHORT.fullmatch(name) and not path.is_file():
        known = shipped_templates()
        if name not in known:
            raise ConfigurationError(f"there is no template {name!r}, expected a path or one of {', '.join(known)}")
        return known[name]
    return path


def read_template(path: Path) -> str:
    """Text of a template with what it extends. Raises `ConfigurationError`."""
    text = _text(path)
    return _inherit(path) if "{%" in text else text


def _text(path: Path) -> str:
    """With line ends of one kind: a scheduler refuses those of Windows."""
    try:
        text = typed_text(path, MOST_BYTES).replace("\r\n", "\n")
    except ConfigurationError as error:
        raise ConfigurationError(f"template {str(path)!r} {error.message}") from None
    except OSError as error:
        raise ConfigurationError(f"template {str(path)!r} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise ConfigurationError(f"template {str(path)!r} holds a null character, which no script may: save it as text")
    return text


def unfilled_placeholders(text: str, fill: dict[str, str]) -> list[str]:
    """Placeholders of a template that nothing fills."""
    return sorted(set(PLACEHOLDER.findall(text)) - set(fill) - {"home"})


def _inherit(path: Path) -> str:
    """Render everything but the engine's names."""
    import jinja2  # here, since a login node's Python, which only lists placeholders, may lack it

    def load(name: str) -> str | None:
        beside = path.parent / name
        for found in (path,) if name == str(path) else (beside, shipped_path("templates") / name):
            if found.is_file() and (name == str(path) or real_path(found) != real_path(path)):
                return _text(found)
        return None

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    marks = {name: f"\0{name}\0" for name in ENGINE_NAMES}
    try:
        text = environment.get_template(str(path)).render(marks)
    except jinja2.TemplateNotFound as error:
        known = ", ".join(found.name for found in shipped_templates().values())
        raise ConfigurationError(
            f"{path.name} extends {error.name}, which is neither beside it nor one of {known}"
        ) from None
    except (jinja2.TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = path.name if line is None else f"{Path(getattr(error, 'name', None) or path).name}, line {line}"
        raise ConfigurationError(f"{where}: {error}", file=path, line=line) from None
    return "".join(_literal(part, marks) for part in re.split(f"({'|'.join(marks.values())})", text))


def _literal(part: str, marks: dict[str, str]) -> str:
    """One part of the rendered text, so that rendering it once more leaves it as it is."""
    if part in marks.values():
        return f"{{{{ {part.strip(chr(0))} }}}}"
    return SYNTAX.sub(lambda found: f"{{% raw %}}{found[0]}{{% endraw %}}", part)


def script_of(template: str, command: str) -> str:
    """The script that the engine would render of a filled template for a job with this command."""
    return re.sub(r"\{#.*?-#\}\s*|\{% (?:end)?raw %\}", "", template, flags=re.DOTALL).replace(COMMAND, command)
