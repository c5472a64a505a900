"""The job template of one facility, made from a file in `templates/`: placeholders filled, environment chosen.

A template is a shell script with placeholders like `<account>`, filled from `deployment.fill` in federation.yml, and
with `{{ streamflow_command }}` where the engine puts the job's command. A value in a scheduler's directive (a
line that begins with `#`) must be one plain word; elsewhere placeholders stand between single quotes, and whatever is
filled in stays one word there, quotes and blanks included.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import field
from typing import Literal

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.template_inheritance import COMMAND, PLACEHOLDER, unfilled_placeholders
from facility.exchange.text import Line
from facility.exchange.validation import validated

PLAIN = re.compile(r"[A-Za-z0-9_.,:/@+=%-]+")
START = 'bash -c "$command"'
"""How a template starts the command on every node; a container runtime goes before it."""
MODULES = "command -v module >/dev/null || [ ! -r /etc/profile ] || . /etc/profile"
"""A job's shell reads no profile; a task of PBS, or a job that a gate submitted, gets no function of another shell."""
ENTER = re.compile(r"^\. '<home>/env\.sh'$", re.MULTILINE)
"""The line that enters the facility's environment."""
NO_LOGIN = "unset SSH_CLIENT SSH2_CLIENT"
"""Below a login by ssh, as these variables say, bash reads ~/.bashrc for a command too, the last one of a script
included, whose PATH (conda's, pyenv's) would come before that of the environment."""


@validated(frozen=True, kw_only=True)
class Environment:
    """Where a facility's Python comes from."""

    home: Line = "~/crossfed"
    """CrossFed's directory at the facility: `facility/setup.sh` wrote `env.sh` there."""
    modules: list[str] = field(default_factory=list)
    """`module load` these first."""
    venv: Line = ""
    """Directory of a virtual environment to use instead of `<home>/env.sh`."""
    conda: Line = ""
    """Name or path of a conda environment to use instead of `<home>/env.sh`."""
    image: Line = ""
    """Apptainer or Singularity image to run the command in."""
    gpu: Literal["none", "nvidia", "amd"] = "none"
    """Which GPUs the image shall see: `nvidia` is --nv, `amd` is --rocm."""
    bind: list[Line] = field(default_factory=list)
    """Paths that the image sees besides the working directory and the home."""

    def __post_init__(self) -> None:
        if self.venv and self.conda:
            raise ConfigurationError("environment names both a venv and a conda environment, expected one", key="conda")
        for name, path in (("home", self.home), ("venv", self.venv or self.home)):
            if not path.startswith(("/", "~/")):
                raise ConfigurationError(
                    f"{name} is {path!r}, expected an absolute path at the facility, or one that begins with ~/ "
                    "(variables such as $WORK are not replaced)",
                    key=name,
                )
        for word in self.modules:
            if not PLAIN.fullmatch(word):
                raise ConfigurationError(
                    f"module {word!r} is not the name of a module, as `module avail` lists it", key="modules"
                )


def fill_template(text: str, *, fill: dict[str, str], environment: Environment, workdir: str, name: str) -> str:
    """The facility's own template, filled. Raises `ConfigurationError` naming what is not filled or not allowed there.

    `name`: of the template file, for messages. `workdir`: what a container must see.
    """
    if COMMAND not in text:
        raise ConfigurationError(f"{name} lacks {COMMAND}: the job would do nothing")
    if missing := unfilled_placeholders(text, fill):
        wanted = ", ".join(f"<{word}>" for word in missing)
        raise ConfigurationError(f"{name} has placeholders that nothing fills: {wanted}; set them under `fill:`")
    if unknown := sorted(set(fill) - set(PLACEHOLDER.findall(text)) - {"home"}):
        known = ", ".join(sorted(set(PLACEHOLDER.findall(text)))) or "none"
        raise ConfigurationError(
            f"fill has {', '.join(unknown)}, but {name} has no such placeholder; it has: {known}",
            key=f"fill.{unknown[0]}",
        )
    values = {"home": environment.home} | fill
    text = ENTER.sub(lambda _: "\n".join(filter(None, [NO_LOGIN, enter(environment)])), text)
    if environment.image:
        if START not in text:
            raise ConfigurationError(
                f"{name} has no {START}, so a container cannot go before it; write the command so, or use no image"
            )
        text = text.replace(START, _container(environment, workdir) + START)
    return "\n".join(_line(line, values, name) for line in text.split("\n"))


def _line(line: str, values: dict[str, str], name: str) -> str:
    def put(found: re.Match[str]) -> str:
        word, value = found.group(1), values.get(found.group(1), found.group(0))
        if (
            not value.strip()
            or any(ord(letter) < 32 for letter in value)
            or "{{" in value
            or "{%" in value
            or "{#" in value
        ):
            raise ConfigurationError(
                f"fill.{word} is {value!r}, expected text on one line without double braces", key=f"fill.{word}"
            )
        if line.startswith("#"):
            if not PLAIN.fullmatch(value):
                raise ConfigurationError(
                    f"fill.{word} is {value!r}, but is used in a directive of {name}: "
                    "expected one word of letters, digits and _.,:/@+=%-",
                    key=f"fill.{word}",
                )
            return value
        quoted = value.replace("'", "'\\''")
        return "'\"$HOME\"'" + quoted[1:] if value.startswith("~/") else quoted

    return PLACEHOLDER.sub(put, line)


def enter(environment: Environment) -> str:
    """Shell lines that enter the environment; `<home>` is still to be filled."""
    lines = [MODULES, f"module load {' '.join(environment.modules)}"] if environment.modules else []
    if environment.venv:
        lines.append(f". {path_word(environment.venv + '/bin/activate')}")
    elif environment.conda:
        lines.append('. "$(conda info --base)/etc/profile.d/conda.sh"')
        lines.append(f"conda activate {path_word(environment.conda)}")
    elif not environment.image:
        lines.append(". '<home>/env.sh'")
    return "\n".join(lines)


def _container(environment: Environment, workdir: str) -> str:
    flags = {"none": [], "nvidia": ["--nv"], "amd": ["--rocm"]}[environment.gpu]
    binds = " ".join(f"--bind {path_word(path)}" for path in [workdir, environment.home, *environment.bind])
    runtime = '"$(command -v apptainer || command -v singularity)"'
    return " ".join([runtime, "exec", *flags, binds, path_word(environment.image), ""])


def enter_lines(environment: Environment) -> str:
    """Shell lines that enter the environment, whole."""
    return "\n".join(_line(line, {"home": environment.home}, "environment") for line in enter(environment).split("\n"))


def path_word(path: str) -> str:
    """A path as one shell word; a leading `~/` is the account's home."""
    return f'"$HOME"{shlex.quote(path[1:])}' if path.startswith("~/") else shlex.quote(path)
