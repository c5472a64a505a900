"""`policy.yml`: what this site lets a coordinator do. Owned and written by the site; read again for every request.

Parsed without pydantic, since the gate starts for every command: PyYAML's nodes give the line of every error. Unknown
keys, aliases and values of another type are errors, and a gate without a sound policy refuses everything.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.bounded import real_path
from facility.exchange.files.owners import of_another
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.signatures import FINGERPRINT
from facility.exchange.messages.strict_json import HEX
from facility.exchange.typed_text import typed_text

STATE = "gate"
"""Directory beside the policy that holds the gate's log, its ledger and what its jobs need."""
SCHEDULERS = ("slurm", "pbs", "flux", "ssh")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PLACE = re.compile(r"/[A-Za-z0-9_./@%+=:,-]+")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
DECIMAL = re.compile(r"[-+]?(0|[1-9]\d{0,17})(\.\d*)?([eE][-+]?\d{1,3})?")
"""A number that is what it looks like: YAML 1.1 reads 2:00 as 120, and 010 as 8."""
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
KEPT = ("CROSSFED_HOME", "CROSSFED_STATE")
"""Variables that name what a facility keeps: code, environment, optimizer state, shares of keys."""
MOST_BYTES = 1 << 20
MOST_LEVELS = 20
"""Of lists and mappings within each other."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The keys of policy.yml."""

    facility: str
    """This facility's name in the federations."""
    federations: tuple[str, ...]
    """Names of the federations that may run here."""
    keys: tuple[str, ...]
    """Fingerprints (`SHA256:...`) of the ssh keys that may come through the gate."""
    coordinators: Path
    """Allowed-signers file (ssh-keygen(1)); the principal is the federation's name. Only signed models are trained."""
    workdir: Path
    """Directory for models and updates: nothing outside of it is read or written for a coordinator."""
    datasets: tuple[str, ...]
    """Prepared datasets that may be trained on; relative paths count from $CROSSFED_HOME."""
    scheduler: str
    """`slurm`, `pbs`, `flux`, or `ssh` for the host itself."""
    template: str = ""
    """The site's job template: the name of a shipped one or a path; only `ssh` may do without."""
    fill: dict[str, str] = dataclasses.field(default_factory=dict)
    """Values of the template's placeholders."""
    nodes: int = 1
    """Nodes of one job."""
    hours: float = 2.0
    """Time limit of one job, a second or more: a limit of 0 is none to a scheduler, and counts no node-hours."""
    node_hours_per_day: float = 24.0
    """Most node-hours of jobs submitted within 24 hours; a job counts with its limit, or until its end."""
    ahead_seconds: float = 0.0
    """Most seconds that a job may wait on its nodes for a model that has not come yet (`submit_ahead` in
    federation.yml), one such job a federation; 0: jobs are submitted with their model alone."""
    bytes_out_per_day: int = 100_000_000_000
    """Most bytes that leave within 24 hours."""
    bytes_in_per_day: int = 1_000_000_000_000
    """Most bytes that are written to the workdir for a coordinator within 24 hours, its jobs' own apart; a file, a
    directory or a link counts with 4096 more."""
    log_bytes_per_day: int = 100_000_000
    """Most bytes by which requests let the gate's log grow within a day (UTC), a quarter of a million or so; beyond it
    all are refused. The log is the site's to keep, and is never cut."""
    models: tuple[str, ...] = ()
    """Digests (`content_sha256` of their manifests) of the models that a run may begin with, and of other models that
    settings name by a path (LoRA's bases, references of preferences); none: any."""
    modules: tuple[str, ...] = ("facility.train",)
    """Python modules that may train, or be named by a dotted path as an optimizer, a policy, a schedule or a codec."""
    encodings: tuple[str, ...] = ()
    """How updates may travel: `full`, `masked` or codecs' names; none: in any way."""
    adapters_only: bool = False
    """Only low-rank adapters are trained, and leave."""
    adapters_rank: int = 64
    """Their largest rank: adapters whose rank is a matrix's width leave as much of it as the matrix itself."""
    secure_aggregation: bool = False
    """Only masked updates leave: settings must ask for secure aggregation."""
    peer_signers: Path | None = None
    """Allowed-signers file with the other facilities' keys, the only one that secure aggregation may use; without it
    no update is masked here."""
    minimum_sum: int = 0
    """Fewest updates in a sum that this facility helps to unmask; 0: as the settings say."""
    login_commands_per_day: int = 500
    """Most commands of secure aggregation (keys, unmask) within 24 hours; they run here, outside of the queue."""
    epsilon: float = 0.0
    """Largest privacy loss of differentially private training that settings may ask for; 0: it is not required."""
    delta: float = 0.0
    """Largest delta that settings may ask for; 0: any."""
    unit: str = ""
    """`document`: whole documents must be protected; empty: blocks are enough."""
    dataset_epsilon: float = 0.0
    """Largest sum of the epsilons that all federations on one dataset may spend; 0: no limit."""
    files: tuple[str, ...] = ()
    """Files that settings may name: private keys that sign, plans, traces of speeds. None: no file."""
    task_directories: tuple[str, ...] = ()
    """Folders with tasks of lm-eval that settings may name; their YAML files name code. None: its own tasks alone."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers (`training.tracker`) that may be used; none: no tracker."""
    job_output: bool = True
    """The end of what a job printed may be read by the coordinator."""

    @property
    def place(self) -> Path:
        """Where nothing is a symbolic link any more."""
        return real_path(self.workdir)


def read_policy(path: Path) -> Policy:
    """Raises `ConfigurationError` with file and line."""
    path = Path(path)
    try:
        root = yaml.compose(typed_text(path, MOST_BYTES), Loader=_Loader)
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=path) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or "is not YAML"
        raise ConfigurationError(str(what), file=path, line=mark.line + 1 if mark else None) from None
    return _Reader(path).policy(root)


def named_places(policy: Policy, file: Path) -> Iterator[tuple[str, Path]]:
    """What a policy names beside its workdir, by its keys. `file`: the policy's."""
    yield "coordinators", policy.coordinators
    if policy.peer_signers is not None:
        yield "peer_signers", policy.peer_signers
    if policy.template:
        yield "template", file.absolute().parent / policy.template
    for name in ("datasets", "task_directories", "files"):
        yield from ((name, resolve_path(one)) for one in getattr(policy, name))


class _Loader(yaml.SafeLoader):
    """Refuses what is nested deeper than `MOST_LEVELS`, which costs much time and then Python's stack."""

    level = 0

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        self._check(self.flow_level, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._check(self.level, self.peek_event().start_mark)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def _check(self, level: int, mark: yaml.Mark) -> None:
        if level >= MOST_LEVELS:
            problem = f"is nested too deeply: more than {MOST_LEVELS} lists and mappings within each other"
            raise yaml.MarkedYAMLError(None, None, problem, mark)


class _Reader:
    """Turns YAML nodes into the policy's values."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def policy(self, root: yaml.Node | None) -> Policy:
        if not isinstance(root, yaml.MappingNode):
            raise ConfigurationError("is empty or no mapping, expected the keys of a policy", file=self.file, line=1)
        known = {field.name: field for field in dataclasses.fields(Policy)}
        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, node in root.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self.error("a key is a list or a mapping, expected plain text", line)
            name = str(key.value)
            if name not in known:
                raise self.error(f"unknown key {name!r}; known keys are {', '.join(known)}", line)
            if name in found:
                raise self.error(f"{name} stands there twice", line)
            found[name], lines[name] = READ[name](self, name, node), line
        if missing := [name for name, field in known.items() if name not in found and _required(field)]:
            raise self.error(f"lacks {', '.join(missing)}", root.end_mark.line + 1)
        policy = Policy(**found)
        for name in ("delta", "unit"):
            if getattr(policy, name) and not (policy.epsilon or policy.dataset_epsilon):
                raise self.error(
                    f"{name} is set, and neither epsilon nor dataset_epsilon: settings without differential privacy "
                    "would be taken",
                    lines[name],
                )
        if policy.scheduler != "ssh" and not policy.template:
            raise self.error(f"scheduler is {policy.scheduler!r}, which needs a template", lines["scheduler"])
        for name, path in self._places(policy):
            if real_path(path).is_relative_to(policy.place):
                line = lines.get(name, lines["workdir"])
                raise self.error(f"{name} ({path}) lies in the workdir, where a coordinator reads and writes", line)
        if real_path(self.file).is_relative_to(policy.place):
            raise self.error("workdir holds this policy, which a coordinator could then replace", lines["workdir"])
        if policy.place.is_relative_to(real_path(self.file).parent / STATE):
            raise self.error("workdir lies in the gate's own directory, which no request may write", lines["workdir"])
        if "%" in str(policy.place):
            raise self.error("workdir holds a %, which a scheduler may replace in a job's output", lines["workdir"])
        self._check_private(policy, lines)
        return policy

    def _check_private(self, policy: Policy, lines: dict[str, int]) -> None:
        """Refuse what any other user of this host could write, and so decide what a coordinator may do."""
        named = {"policy": self.file, "workdir": policy.workdir, "coordinators": policy.coordinators}
        named |= {"peer_signers": policy.peer_signers} if policy.peer_signers else {}
        named |= {"template": self.file.absolute().parent / policy.template} if policy.template else {}
        for name, path in named.items():
            for place in (path, path.absolute().parent):
                try:
                    mode = place.stat().st_mode
                except OSError:  # what is absent is refused where it is used
                    continue
                if mode & stat.S_IWOTH and not (place != path and mode & stat.S_ISVTX):
                    raise self.error(f"{name}: every user may write {place}; chmod o-w it", lines.get(name, 1))
        if reason := of_another(policy.workdir):
            raise self.error(f"workdir: {reason}, who could exchange what jobs are given", lines["workdir"])

    def _places(self, policy: Policy) -> Iterator[tuple[str, Path]]:
        """What a coordinator must neither alter nor see, by the key or the variable that names it."""
        yield from named_places(policy, self.file)
        yield from ((name, Path(value)) for name in KEPT if (value := os.environ.get(name)))
        yield "the account's home", Path.home()
        yield "this code", Path(__file__).parents[2]
        yield "its Python", Path(sys.prefix)

    def error(self, message: str, line: int) -> ConfigurationError:
        return ConfigurationError(message, file=self.file, line=line)

    def scalar(self, name: str, node: yaml.Node, kinds: tuple[type, ...], expected: str) -> Any:
        value = None
        if isinstance(node, yaml.ScalarNode):
            maker = yaml.SafeLoader("")
            try:
                if node.tag not in NUMBERS or DECIMAL.fullmatch(node.value):
                    value = maker.construct_object(node)  # type: ignore[no-untyped-call]
            except (yaml.YAMLError, ValueError):
                value = None
        if type(value) not in kinds:
            raise self.error(f"{name} is {getattr(node, 'value', '')!r:.60}, expected {expected}", _line(node))
        return value

    def text(self, name: str, node: yaml.Node, pattern: re.Pattern[str] | None, expected: str) -> str:
        value = str(self.scalar(name, node, (str,), expected))
        if (pattern and not pattern.fullmatch(value)) or not value or not value.isprintable():
            raise self.error(f"{name} is {value!r:.60}, expected {expected}", _line(node))
        return value

    def texts(self, name: str, node: yaml.Node, pattern: re.Pattern[str] | None, expected: str) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(f"{name} is not a list, expected a list of {expected}", _line(node))
        return tuple(self.text(name, one, pattern, expected) for one in node.value)

    def number(self, name: str, node: yaml.Node, kinds: tuple[type, ...], least: float, expected: str) -> Any:
        value = self.scalar(name, node, kinds, expected)
        if not least <= value < float("inf"):
            raise self.error(f"{name} is {value!r}, expected {expected}", _line(node))
        return value

    def words(self, name: str, node: yaml.Node) -> dict[str, str]:
        if not isinstance(node, yaml.MappingNode):
            raise self.error(f"{name} is not a mapping, expected placeholder: value", _line(node))
        return {
            str(key.value): str(self.scalar(f"{name}.{key.value}", value, (str, int, float), "text or a number"))
            for key, value in node.value
        }

    def one_of(self, name: str, node: yaml.Node, known: tuple[str, ...]) -> str:
        value = self.text(name, node, None, f"one of {', '.join(known)}")
        if value not in known:
            raise self.error(f"{name} is {value!r:.60}, expected one of {', '.join(known)}", _line(node))
        return value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _texts(pattern: re.Pattern[str] | None, expected: str) -> Callable[[_Reader, str, yaml.Node], Any]:
    return lambda reader, name, node: reader.texts(name, node, pattern, expected)


def _flag(reader: _Reader, name: str, node: yaml.Node) -> bool:
    return bool(reader.scalar(name, node, (bool,), "true or false"))


def _exponent(reader: _Reader, name: str, node: yaml.Node) -> float:
    """A number that may be written like `1e-6`, which YAML 1.1 reads as text."""
    value = reader.scalar(name, node, (int, float, str), "a number such as 1e-6")
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise reader.error(f"{name} is {value!r:.60}, expected a number such as 1e-6", _line(node))
    return found


def _from_zero(reader: _Reader, name: str, node: yaml.Node) -> float:
    return float(reader.number(name, node, (int, float), 0.0, "a number, at least 0"))


def _hours(reader: _Reader, name: str, node: yaml.Node) -> float:
    expected = "a number of hours, a second (0.0003) or more: 0 is not a limit to a scheduler"
    return float(reader.number(name, node, (int, float), 1 / 3600, expected))


def _whole(least: int) -> Callable[[_Reader, str, yaml.Node], Any]:
    return lambda reader, name, node: reader.number(name, node, (int,), least, f"a whole number, at least {least}")


def _path(reader: _Reader, name: str, node: yaml.Node) -> Path:
    return Path(reader.text(name, node, PLACE, "an absolute path of letters, digits and _./@%+=:,-"))


READ: dict[str, Callable[[_Reader, str, yaml.Node], Any]] = {
    "facility": lambda reader, name, node: reader.text(name, node, NAME, "a facility's name"),
    "federations": _texts(NAME, "federations' names"),
    "keys": _texts(FINGERPRINT, "fingerprints as `ssh-keygen -lf KEY.pub` prints them (SHA256:...)"),
    "coordinators": _path,
    "workdir": _path,
    "datasets": _texts(None, "paths"),
    "scheduler": lambda reader, name, node: reader.one_of(name, node, SCHEDULERS),
    "template": lambda reader, name, node: reader.text(name, node, None, "a template's name or path"),
    "fill": lambda reader, name, node: reader.words(name, node),
    "nodes": _whole(1),
    "hours": _hours,
    "node_hours_per_day": _from_zero,
    "ahead_seconds": _from_zero,
    "bytes_out_per_day": _whole(0),
    "bytes_in_per_day": _whole(0),
    "log_bytes_per_day": _whole(1),
    "models": _texts(HEX, "sha256 digests"),
    "modules": _texts(MODULE, "modules' names"),
    "encodings": _texts(NAME, "codecs' names"),
    "adapters_only": _flag,
    "adapters_rank": _whole(1),
    "secure_aggregation": _flag,
    "peer_signers": _path,
    "minimum_sum": _whole(0),
    "login_commands_per_day": _whole(0),
    "epsilon": _from_zero,
    "delta": _exponent,
    "unit": lambda reader, name, node: reader.one_of(name, node, ("document", "block")),
    "dataset_epsilon": _from_zero,
    "files": _texts(None, "paths"),
    "task_directories": _texts(None, "paths"),
    "trackers": _texts(NAME, "trackers' names"),
    "job_output": _flag,
}
"""How each key is read."""
