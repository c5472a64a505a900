"""How a facility is reached: `facilities[].deployment` in federation.yml, and what it becomes in streamflow.yml.

    deployment:
      type: slurm                         # local, ssh, slurm, pbs, flux or gridengine
      host: login.example.org             # its login node
      user: alice
      workdir: /scratch/alice/crossfed
      template: slurm
      fill: {account: proj42, partition: gpu}

StreamFlow's own connectors, stacked with `wraps`. Host keys are always checked, and only paths of keys are written.
"""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from coordinator.config.deployment_names import CONNECTION, INTERFACE, deployment_name
from coordinator.config.firecrest import API, FIRECREST, FirecrestAccess
from coordinator.config.options import check_fill, check_options
from coordinator.schedulers.none import MARK
from coordinator.schedulers.registry import schedulers
from coordinator.schedulers.scheduler import BatchScheduler
from facility.exchange.errors import ConfigurationError
from facility.exchange.job_names import job_name
from facility.exchange.messages.job_template import Environment, fill_template
from facility.exchange.messages.template_inheritance import COMMAND, find_template, read_template
from facility.exchange.text import Line
from facility.exchange.validation import AtLeastOne, NonNegative, validated

HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:(\d{1,5}))?|\[[0-9A-Fa-f:.]+\](:(\d{1,5}))?")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
WORKDIR = re.compile(r"/[A-Za-z0-9_./@%+=:,-]*")
QUEUES = tuple(sorted(one.name for one in schedulers().values() if isinstance(one, BatchScheduler)))
"""Deployment types with a queue: what `coordinator.schedulers` finds."""
KINDS = ("local", "ssh", *QUEUES)


def _kind(value: str) -> str:
    if value not in KINDS:
        close = difflib.get_close_matches(value, KINDS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected one of {', '.join(KINDS)}{hint}")
    return value


Kind = Annotated[str, AfterValidator(_kind), WithJsonSchema({"type": "string", "enum": list(KINDS)})]
GATED = ("ssh", "slurm", "pbs", "flux")
"""Kinds of deployment that a gate can stand before (`facility.gating.queue`)."""
GATE, SYSTEM = "gate", "system-ssh"
"""Types in streamflow.yml of a gated facility's ssh deployment, and of one that goes through the system's ssh."""
SERVICE, PREFIX = "train", "crossfed-"


@validated(frozen=True, kw_only=True)
class Connection:
    """One ssh host."""

    host: str = ""
    """Name or address, with `:port` where it is not 22."""
    user: str = ""
    """Login name there; empty: what ~/.ssh/config says."""
    key: str = ""
    """Private key on this machine; empty: ssh-agent or ~/.ssh/config. A certificate is `<key>-cert.pub` beside it."""
    passphrase_file: Line = ""
    """File on this machine that holds the key's passphrase, for `crossfed run` alone: `crossfed check`, `setup` and
    `share` ask ssh-agent, which serves all of them."""

    def __post_init__(self) -> None:
        found = HOST.fullmatch(self.host)
        if self.host and not found:
            raise ConfigurationError(
                f"host is {self.host!r}, expected a name or address, with :port if need be", key="host"
            )
        if found and (port := found[2] or found[4]) and not 1 <= int(port) <= 65535:
            raise ConfigurationError(f"host is {self.host!r}, expected a port of 1 to 65535", key="host")
        if self.user and not USER.fullmatch(self.user):
            raise ConfigurationError(f"user is {self.user!r}, expected a login name", key="user")
        if "PRIVATE KEY" in self.key or "\n" in self.key:
            raise ConfigurationError("key holds a key, expected the path of its file", key="key")

    def streamflow(self) -> dict[str, Any]:
        """As StreamFlow's `tunnel` and `dataTransferConnection` are written."""
        values = {
            "hostname": self.host,
            "username": self.user,
            "sshKey": _home(self.key),
            "sshKeyPassphraseFile": _home(self.passphrase_file),
        }
        return {key: value for key, value in values.items() if value} | {"checkHostKey": True}


OF_ANOTHER_MACHINE = (
    *("host", "user", "key", "passphrase_file", "known_hosts", "renew", "gate"),
    *("template", "fill", "options"),
)
"""Keys that say nothing of a facility on this machine."""


@validated(frozen=True, kw_only=True)
class Deployment(Connection):
    """`facilities[].deployment`."""

    type: Kind = "local"
    """How its jobs are started: on this machine, by ssh, or by a scheduler."""
    tunnel: Connection = field(default_factory=Connection)
    """Jump host to go through."""
    transfer: Connection = field(default_factory=Connection)
    """Host for data transfers, where the site has a separate one that sees the same file system."""
    workdir: str = ""
    """Absolute path at the facility for models and updates: fast, shared by its nodes, with room for three models."""
    template: Line = ""
    """Job template: the name of one of `templates/`, such as `leonardo`, or the path of your own, relative to
    federation.yml."""
    fill: dict[str, Any] = field(default_factory=dict)
    """Values of the template's placeholders: account, partition, ..."""
    options: dict[str, Any] = field(default_factory=dict)
    """Scheduler limits by StreamFlow's names (`time: "04:00:00"`, `nodes: "4"`, ...); they override the template's."""
    environment: Environment = field(default_factory=Environment)
    """Where the facility's Python comes from."""
    max_jobs: AtLeastOne[int] = 2
    """Jobs of ours in the queue at once."""
    polling_seconds: AtLeastOne[int] = 10
    """How often the queue is asked."""
    give_up_minutes: NonNegative[int] = 120
    """Minutes that a stuck job (held, partition down, no such nodes, budget spent) may wait before it is cancelled and
    the round continues without the facility; 0: for ever."""
    connections: AtLeastOne[int] = 1
    """ssh connections at once; more where each gives so few sessions that there would not be four."""
    sessions: AtLeastOne[int] = 10
    """Sessions in each ssh connection; sshd's MaxSessions is 10 unless the site changed it. Where it gives fewer, the
    run says so and goes on with those."""
    retries: AtLeastOne[int] = 240
    """Times a lost ssh connection is tried again. A login node that answers and opens no session for 10 minutes counts
    as often as tries fit into them."""
    gate: bool = False
    """The facility lets us in through its gate (`facility/setup.sh --gate`): it submits a template of its own, and its
    `policy.yml` says what we may do."""
    retry_seconds: AtLeastOne[int] = 30
    """Pause between two tries: with the default number, the login node may be away for two hours."""
    connect_seconds: AtLeastOne[int] = 30
    """Time for one try."""
    gpu_memory_gb: NonNegative[float] = 0.0
    """Memory of one GPU in GB, for the check's estimate; 0: unknown."""
    ssh: Literal["built-in", "system"] = "built-in"
    """`system`: every command and transfer is a session of this machine's ssh command, which uses a connection that you
    have opened and share (`ControlMaster`, `ControlPath` in ~/.ssh/config): for logins with a second factor."""
    firecrest: FirecrestAccess = field(default_factory=FirecrestAccess)
    """FirecREST, for `type: firecrest`: a site that gives machines no ssh login."""
    renew: Line = ""
    """The site's command that renews the login, such as `step ssh login ...`; `crossfed login` runs it on the
    terminal, without a shell."""
    known_hosts: Line = ""
    """File of host keys for `crossfed check`; StreamFlow reads ~/.ssh/known_hosts, or the UserKnownHostsFile that
    ~/.ssh/config sets for the host, and the check fails where those lack it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "home" in self.fill:  # the same place under its other name
            try:
                environment = replace(self.environment, home=str(self.fill["home"]))
            except ConfigurationError as error:
                raise ConfigurationError(f"fill.{error.message}", key="fill.home") from None
            object.__setattr__(self, "environment", environment)
            object.__setattr__(self, "fill", {key: value for key, value in self.fill.items() if key != "home"})
        try:
            shlex.split(self.renew)
        except ValueError as error:
            raise ConfigurationError(f"renew is {self.renew!r}, expected a command: {error}", key="renew") from None
        if self.type == "local":
            given = {name: getattr(self, name) for name in OF_ANOTHER_MACHINE}
            given |= {"ssh": self.ssh != "built-in", "firecrest": self.firecrest.url}
            given |= {"tunnel": self.tunnel.host, "transfer": self.transfer.host}
            for name, value in given.items():
                if value:
                    raise ConfigurationError(
                        f"{name} is set, but a local facility needs none; is `type` missing?", key=name
                    )
            object.__setattr__(self, "workdir", _home(self.workdir))
            return
        if self.type == "ssh" and not self.host:
            raise ConfigurationError("host is missing, expected the facility's login node", key="type")
        if (self.host or self.workdir or self.firecrest.url) and not WORKDIR.fullmatch(self.workdir):
            raise ConfigurationError(
                f"workdir is {self.workdir!r}, expected an absolute path at the facility, without blanks or quotes "
                "(StreamFlow does not quote it)",
                key="workdir",
            )
        self._check_letters()
        check_fill(self.fill)
        self._check_firecrest()
        if self.ssh == "system":
            self._check_system_ssh()
        if self.gate:
            self._check_gate()
        if self.type in QUEUES and not self.template and not self.gate:
            raise ConfigurationError(f"template is missing, expected for instance `template: {self.type}`", key="type")
        if self.type in QUEUES:
            check_options(self.type, self.options)
        elif self.options:
            raise ConfigurationError(
                "options is set, but plain ssh has no queue; remove it, or set type to the site's scheduler",
                key="options",
            )

    def _check_gate(self) -> None:
        """Raise `ConfigurationError` for what the site's own policy decides, and for what a gate cannot do."""
        for name in ("template", "fill", "options"):
            if getattr(self, name):
                raise ConfigurationError(
                    f"{name} is set, but behind a gate the facility's own policy has it; remove it", key=name
                )
        if not self.host:
            raise ConfigurationError(
                "gate is set, but there is no host that a gate could stand at; give host, or remove gate",
                key="gate",
            )
        if self.type not in GATED:
            raise ConfigurationError(
                f"gate is set with type {self.type!r}: a gate knows the commands of {', '.join(GATED)}", key="gate"
            )

    def _check_letters(self) -> None:
        """Raise `ConfigurationError` for a letter of a path that qsub or a container's runtime takes for more."""
        if self.type in ("pbs", "gridengine") and (found := re.search("[:,]", self.workdir)):
            raise ConfigurationError(
                f"workdir is {self.workdir!r}, but qsub takes what precedes {found[0]!r} in a job's output file "
                "for a host, or for a file of its own; choose a path without it",
                key="workdir",
            )
        places = {"workdir": self.workdir, "environment.home": self.environment.home}
        for key, path in places.items() if self.environment.image else ():
            if found := re.search("[:,]", path):
                raise ConfigurationError(
                    f"{key} is {path!r}, but a container's runtime takes {found[0]!r} in a path to bind for its end; "
                    "choose a path without it",
                    key=key,
                )

    def _check_firecrest(self) -> None:
        """Raise `ConfigurationError` unless type and section agree, and nothing of ssh is set beside them."""
        if (self.type == FIRECREST) != bool(self.firecrest.url):
            raise ConfigurationError(
                f"type is {self.type!r} with{'' if self.firecrest.url else 'out'} a firecrest section, expected "
                f"`type: {FIRECREST}` and `firecrest: {{url: ...}}` together",
                key="firecrest",
            )
        if self.type == FIRECREST:
            for name in ("host", "user", "key", "passphrase_file"):
                if getattr(self, name):
                    raise ConfigurationError(f"{name} is set, but FirecREST needs no ssh login; remove it", key=name)

    def _check_system_ssh(self) -> None:
        """Raise `ConfigurationError` for what a session of the user's own connection cannot do."""
        if not self.host:
            raise ConfigurationError(
                "ssh is set, but there is no host to log in to; give host, or remove ssh", key="ssh"
            )
        if self.gate:
            raise ConfigurationError("ssh is `system`, but a gate has one key for one command; remove it", key="ssh")
        if self.passphrase_file:
            raise ConfigurationError(
                "passphrase_file is set, but the system's ssh asks ssh-agent for it; remove it", key="passphrase_file"
            )

    def filled(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.fill.items()}


def job_template(deployment: Deployment, folder: Path, name: str = "") -> str | None:
    """Text of the facility's job template, or None without one. `folder`: of federation.yml; `name`: of its jobs."""
    if deployment.gate:
        return f"{COMMAND}\n"
    if deployment.type == "ssh" and name:
        rest = job_template(deployment, folder) or f"#!/bin/bash\n{COMMAND}\n"
        mark = f"export {MARK}={name}\n"
        text, found = re.subn(r"^#!.*\n", lambda first: first[0] + mark, rest, count=1, flags=re.MULTILINE)
        return text if found else mark + rest
    if not deployment.template:
        return None
    try:
        path = find_template(deployment.template, folder)
        text = read_template(path)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, key="template") from None
    return fill_template(
        text, fill=deployment.filled(), environment=deployment.environment, workdir=deployment.workdir, name=path.name
    )


def streamflow_deployments(
    deployment: Deployment, *, federation: str, facility: str, template: str, workdir: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of streamflow.yml for one facility, and the target that its training step is bound to.

    `template`: path of the rendered job template as seen from streamflow.yml. `workdir`: of a local facility.
    """
    name = deployment_name(facility)
    if deployment.type == "local":
        return {name: {"type": "local", "config": {}, "workdir": deployment.workdir or workdir}}, {"deployment": name}
    place = {"workdir": deployment.workdir or workdir}
    result: dict[str, Any] = {}
    if deployment.type == FIRECREST:
        patience = {"retries": deployment.retries, "retryDelay": deployment.retry_seconds}
        result[deployment_name(facility, INTERFACE)] = {
            "type": API,
            "config": deployment.firecrest.streamflow() | patience,
        } | place
    if deployment.host:
        services = {SERVICE: template} if deployment.type == "ssh" else {}
        ssh_name = name if deployment.type == "ssh" else deployment_name(facility, CONNECTION)
        result[ssh_name] = {
            "type": GATE if deployment.gate else SYSTEM if deployment.ssh == "system" else "ssh",
            "config": _ssh(deployment) | ({"services": services} if services else {}),
        } | place
        if deployment.type == "ssh":
            return result, {"deployment": name, "service": SERVICE}
    queue = {
        "maxConcurrentJobs": deployment.max_jobs,
        "pollingInterval": deployment.polling_seconds,
        "services": {SERVICE: {"file": template, "jobName": job_name(federation, facility)} | deployment.options},
    }
    inner = CONNECTION if deployment.host else INTERFACE if deployment.type == FIRECREST else ""
    wraps = {"wraps": deployment_name(facility, inner)} if inner else {}
    result[name] = {"type": deployment.type, "config": queue} | wraps | place
    return result, {"deployment": name, "service": SERVICE}


def workflow_name(federation: str) -> str:
    """The federation's name in streamflow.yml, where StreamFlow wants a lower-case letter first."""
    plain = federation[0].islower() and not federation.startswith(PREFIX)
    return federation if plain else PREFIX + federation


def federation_of(workflow: str) -> str:
    """The inverse of `workflow_name`."""
    return workflow.removeprefix(PREFIX)


def _ssh(deployment: Deployment) -> dict[str, Any]:
    one = deployment.streamflow()
    config: dict[str, Any] = {"nodes": [one.pop("hostname")]} | one
    config |= {
        "connectTimeout": deployment.connect_seconds,
        "retries": deployment.retries,
        "retryDelay": deployment.retry_seconds,
        "maxConnections": deployment.connections,
        "maxConcurrentSessions": deployment.sessions,
    }
    if deployment.tunnel.host:
        config["tunnel"] = deployment.tunnel.streamflow()
    if deployment.transfer.host:
        config["dataTransferConnection"] = deployment.transfer.streamflow()
    return config


def _home(path: str) -> str:
    """A path on this machine; `~` is expanded, since StreamFlow may run with another HOME."""
    return str(Path(path).expanduser()) if path else ""
