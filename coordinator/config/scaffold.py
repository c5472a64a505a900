"""`crossfed init`: a first federation.yml to fill in, one entry per facility, each from the site's template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from coordinator.config.facility_names import check_names
from coordinator.config.schema import FIRST_LINE, NAME, write_schema
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.durable import make_parents, write_text
from facility.exchange.messages.template_inheritance import read_template, shipped_templates, unfilled_placeholders
from facility.exchange.text import NAME as FACILITY_NAME
from facility.exchange.text import NAME_WORDS

HEAD = """\
# Fill in what is in <angle brackets>. Then, in the folder above this one: crossfed check, crossfed run
name: {name}
# The model of round 0: a directory with a Hugging Face checkpoint (config.json, *.safetensors), absolute or relative to
# this file. `crossfed model ORG/NAME --out DIR` fetches one from the hub, or converts a local one to the dtype that is
# sent.
model: <directory of the initial model>
rounds: 5
training: # for every facility; each may change any of it
  steps: 100
  batch_sequences: 64
  learning_rate: 1e-4
facilities:
"""
LOCAL = """\
  - name: {site}
    # On this machine: python -m facility.prepare --input TEXT.jsonl --tokenizer MODEL --out DIR --block-tokens 512
    dataset: <prepared dataset, absolute or relative to this file>
"""
QUEUES = ("pbs", "flux", "gridengine", "ssh")


def write_scaffold(folder: Path, name: str, facilities: list[str]) -> Path:
    """Write `folder/workflow/federation.yml` and its schema.

    `facilities`: `NAME=TEMPLATE`, a template's name for both, or `NAME=local`. Raises `InputError`, and writes nothing,
    if the file exists, a template does not, or a name would be refused in federation.yml.
    """
    file = folder / "workflow" / "federation.yml"
    if file.exists():
        raise InputError(f"{file} exists already; edit it, or choose another folder")
    known = shipped_templates()
    _check_name("--name", name)
    sites: dict[str, str] = {}
    text = HEAD.format(name=_scalar(name))
    for word in facilities:
        site, _, template = word.partition("=")
        template = template or site
        _check_name("--facility", site)
        if site.lower() in map(str.lower, sites):
            raise InputError(f"--facility names {site!r} twice; names must differ (case does not count)")
        sites[site] = template
        if template == "local":
            text += LOCAL.format(site=_scalar(site))
        elif template in known:
            text += _remote(site, template, known[template])
        else:
            raise InputError(f"there is no template {template!r}; there are local, {', '.join(known)}")
    _check_together(sites)
    make_parents(file)
    write_text(file, FIRST_LINE + text)
    write_schema(file.with_name(NAME))
    return file


def _check_name(option: str, name: str) -> None:
    """Raise `InputError` for what federation.yml would not take as a name."""
    if not FACILITY_NAME.fullmatch(name):
        raise InputError(f"{option} has the name {name!r}, {NAME_WORDS}")


def _check_together(sites: Mapping[str, str]) -> None:
    """Raise `InputError` for a name of `sites`, from name to template, that federation.yml would refuse beside the
    others or for what a run keeps under it."""
    try:
        check_names([*sites], [name for name, template in sites.items() if template == "local"])
    except ConfigurationError as error:
        raise InputError(f"--facility: {error.message}") from None


def _scalar(name: str) -> str:
    """The name as YAML, which takes `2026` and `on` for other things than text unless they stand between quotes."""
    return name if yaml.safe_load(name) == name else f'"{name}"'


def _remote(site: str, template: str, path: Path) -> str:
    guide = re.search(r"https://\S+", path.read_text(encoding="utf-8"))
    lines = [
        f"  - name: {_scalar(site)}",
        "    dataset: <prepared dataset, absolute path at the facility>",
        f"    deployment: # {guide.group() if guide else template}",
        f"      type: {template if template in QUEUES else 'slurm'}",
        "      host: <login node>",
        "      user: <login name>",
        "      workdir: <absolute path on a fast file system that the nodes share>",
        f"      template: {template}",
    ]
    if words := unfilled_placeholders(read_template(path), {}):
        lines.append(f"      fill: {{{', '.join(f'{word}: <{word}>' for word in words)}}}")
    return "\n".join(lines) + "\n"
