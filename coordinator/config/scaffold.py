"""`crossfed init`: a first federation.yml to fill in, one entry a facility, each from the site's template."""

from __future__ import annotations

import re
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_text
from facility.exchange.files.paths import CHECKOUT
from facility.exchange.messages.job_template import unfilled

HEAD = """\
# Fill in what stands in <angle brackets>, then: crossfed check -f {file}, crossfed run -f {file}
name: {name}
model: <directory of the initial model; bash coordinator/setup.sh --model NAME makes one>
rounds: 5
training: # for every facility; each may change any of it
  steps: 100
  batch_sequences: 64
  learning_rate: 1e-4
facilities:
"""
QUEUES = ("pbs", "flux", "ssh")


def init(folder: Path, name: str, facilities: list[str]) -> Path:
    """Write `folder/workflow/federation.yml`. `facilities`: `NAME=TEMPLATE`, or a template's name for both, or `NAME=local`.

    Raises `InputError` when the file is there already or a template is not.
    """
    file = folder / "workflow" / "federation.yml"
    if file.exists():
        raise InputError(f"{file} exists already; edit it, or choose another folder")
    known = {path.stem: path for path in sorted((CHECKOUT / "templates").glob("*.sh"))}
    text = HEAD.format(name=name, file=file)
    for word in facilities:
        site, _, template = word.partition("=")
        template = template or site
        if template != "local" and template not in known:
            raise InputError(f"there is no template {template!r}; there are local, {', '.join(known)}")
        text += _entry(site, template, known.get(template))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    return file


def _entry(site: str, template: str, path: Path | None) -> str:
    lines = [
        f"  - name: {site}",
        f"    dataset: <prepared dataset{'' if path is None else ', absolute path at the facility'}>",
    ]
    if path is not None:
        guide = re.search(r"https://\S+", path.read_text())
        lines += [
            f"    deployment: # {guide.group() if guide else template}",
            f"      type: {template if template in QUEUES else 'slurm'}",
            "      host: <login node>",
            "      user: <login name>",
            "      workdir: <absolute path on a fast file system that the nodes share>",
            f"      template: {path}",
        ]
        if words := unfilled(path.read_text(), {}):
            lines.append(f"      fill: {{{', '.join(f'{word}: <{word}>' for word in words)}}}")
    return "\n".join(lines) + "\n"
