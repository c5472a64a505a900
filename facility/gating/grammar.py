"""What a request may say: one verb and its words, each of a fixed form. Nothing of it ever reaches a shell.

    crossfed-gate put-piece /scratch/alice/crossfed/0f3c/model/model.safetensors 0 67108864

sshd hands the text over in SSH_ORIGINAL_COMMAND; it is split by shlex as a shell would split it, without a shell's
meaning of `;`, `$` or `|`: those are letters of a word here, and no word may contain them.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from facility.exchange.gate_requests import GATE
from facility.gating.refusal import Refused

LONGEST = 8192
PATH = re.compile(r"/[A-Za-z0-9_./@%+=:,-]{0,4000}")
WHOLE = re.compile(r"\d{1,15}")
JOB = re.compile(r"[A-Za-z0-9ƒ][\w.\[\]@-]{0,99}")
TEXT = re.compile(r"[A-Za-z0-9_./@%+=:,~ -]{1,4000}")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,9}")

Check = Callable[[str], bool]


def _path(word: str) -> bool:
    return bool(PATH.fullmatch(word)) and posixpath.normpath(word) == word


def _form(pattern: re.Pattern[str]) -> Check:
    return lambda word: bool(pattern.fullmatch(word))


def _one_of(*known: str) -> Check:
    return lambda word: word in known


whole, text, job, module = _form(WHOLE), _form(TEXT), _form(JOB), _form(MODULE)
mode = _form(re.compile(r"[0-7]{3}"))


@dataclass(frozen=True, kw_only=True)
class Form:
    """What follows one verb."""

    words: tuple[tuple[str, Check], ...] = ()
    """Name and form of each word."""
    more: Check | None = None
    """Form of up to 64 words after them, at least one."""
    options: tuple[tuple[str, Check], ...] = ()
    """`--name VALUE`, each once and in any order; all but those of `optional` must be there."""
    optional: tuple[str, ...] = ()


STEP = (("directory", _path), ("temporary", _path), ("settings", _path), ("dataset", text), ("round", whole))
TRAINING = Form(options=(*STEP, ("model", _path), ("roster", _path), ("module", module)), optional=("roster", "module"))
FORMS = {
    "hello": Form(),
    "nothing": Form(),
    "hold": Form(),
    "sink": Form(),
    "probe": Form(options=(("dataset", text), ("reserve", whole))),
    "test-job": Form(),
    "test-settings": Form(options=(("dataset", text),)),
    "test": Form(words=(("flag", _one_of("-e", "-d", "-f", "-L", "-x")), ("path", _path))),
    "resolve": Form(words=(("path", _path),)),
    "sha1": Form(words=(("path", _path),)),
    "walk": Form(words=(("kind", _one_of("d", "f")), ("path", _path))),
    "make": Form(more=_path),
    "remove": Form(more=_path),
    "link": Form(words=(("source", _path), ("target", _path))),
    "put-tree": Form(words=(("path", _path),)),
    "put-file": Form(words=(("path", _path), ("mode", mode))),
    "put-piece": Form(words=(("path", _path), ("offset", whole), ("length", whole))),
    "sizes": Form(),
    "list": Form(words=(("path", _path),)),
    "get-tree": Form(words=(("path", _path),)),
    "get-file": Form(words=(("path", _path),)),
    "get-piece": Form(words=(("path", _path), ("offset", whole), ("length", whole))),
    "submit": TRAINING,
    "run": TRAINING,
    "submit-ahead": Form(options=(("settings", _path), ("wait", whole))),
    "hand-over": Form(options=(("job", job), *TRAINING.options), optional=TRAINING.optional),
    "waited": Form(words=(("id", job),)),
    "keys": Form(options=STEP),
    "unmask": Form(options=(*STEP, ("request", _path))),
    "jobs": Form(words=(("name", text),)),
    "cancel": Form(words=(("name", text),)),
    "cancel-waiting": Form(words=(("name", text),)),
    "cancel-ids": Form(more=job),
    "states": Form(more=job),
    "begins": Form(words=(("id", job),)),
    "ending": Form(words=(("id", job),)),
    "output": Form(words=(("id", job),)),
}
"""Every verb there is."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, taken apart."""

    verb: str
    given: dict[str, str]
    """Words and options by name."""
    more: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> str:
        return self.given[name]


def parse_request(command: str | None) -> Request:
    """Take SSH_ORIGINAL_COMMAND apart. Raises `Refused` for whatever is not of a known form."""
    if not command:
        raise Refused("no command was given: this key opens a gate, not a shell")
    if len(command) > LONGEST or not command.isprintable():
        raise Refused("the command is too long or holds control characters")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise Refused(f"the command cannot be split into words: {error}") from None
    if len(words) < 2 or words[0] != GATE or words[1] not in FORMS:
        known = ", ".join(FORMS)
        raise Refused(f"{' '.join(words[:2])!r:.80} is not a request, expected {GATE} and one of {known}")
    verb, form, rest = words[1], FORMS[words[1]], words[2:]
    if form.options:
        return Request(verb=verb, given=_options(verb, form, rest))
    if form.more is not None:
        if not 1 <= len(rest) <= 64:
            raise Refused(f"{verb} has {len(rest)} words, expected 1 to 64")
        return Request(verb=verb, given={}, more=tuple(_fits(verb, "word", form.more, one) for one in rest))
    if len(rest) != len(form.words):
        wanted = " ".join(name.upper() for name, _ in form.words) or "nothing"
        raise Refused(f"{verb} has {len(rest)} words after it, expected {wanted}")
    given = {name: _fits(verb, name, check, word) for (name, check), word in zip(form.words, rest, strict=True)}
    return Request(verb=verb, given=given)


def _options(verb: str, form: Form, rest: list[str]) -> dict[str, str]:
    known, given = dict(form.options), {}
    if len(rest) % 2:
        raise Refused(f"{verb} has an option without a value")
    for option, value in zip(rest[::2], rest[1::2], strict=True):
        name = option.removeprefix("--")
        if not option.startswith("--") or name not in known or name in given:
            raise Refused(f"{option!r:.40} is not an option of {verb}, or stands there twice")
        given[name] = _fits(verb, name, known[name], value)
    if missing := [name for name in known if name not in given and name not in form.optional]:
        raise Refused(f"{verb} lacks --{', --'.join(missing)}")
    return given


def _fits(verb: str, name: str, check: Check, word: str) -> str:
    if not check(word):
        raise Refused(f"{name} of {verb} is {word!r:.80}, which is not of the form expected there")
    return word
