"""`crossfed share`: one tokenizer (and model) at every facility, with the same digest.

The files go to HOME/shared/model of each facility, with a SHA256SUMS that the facility itself verifies. A facility that
holds them already is recognised by the digest of that file, and nothing is sent.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.config.deployments import Deployment
from coordinator.config.federation import Federation
from coordinator.config.firecrest import FIRECREST
from coordinator.preflight.remote import answer_of, run_there, ssh_command
from facility.exchange.checkpoints.companions import SOURCE, refuse_links_elsewhere
from facility.exchange.checkpoints.tokenizer import tokenizer_digest
from facility.exchange.errors import InputError, TransientError
from facility.exchange.files.durable import write_text
from facility.exchange.messages.job_template import path_word
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.strict_json import clean_text

log = logging.getLogger(__name__)

BEHIND_GATE = (
    "it has a gate, which takes no tokenizer: its own people prepare the data with this one, and `crossfed check` "
    "compares the digests"
)
WITHOUT_SHELL = (
    "it has FirecREST, which gives no shell: copy the tokenizer there in another way, for the preparation of the data, "
    "and `crossfed check` compares the digests"
)
FOLDER = "shared/model"
"""Below a facility's home."""
SUMS = "SHA256SUMS"
MOST_SECONDS = 24 * 3600.0
"""For one facility to take the files, whole models among them."""
WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What one facility holds now."""

    facility: str
    path: str
    digest: str
    """sha256 of SHA256SUMS, which names every file; the same at every facility."""
    sent: bool
    """False: it was there already, or the facility is on this machine."""


def share_tokenizer(federation: Federation, *, weights: bool, only: Sequence[str] = ()) -> Iterator[Shared]:
    """Send to all facilities, or `only` some: one after the other, as the result is read.

    Raises `InputError` without a tokenizer, for an unknown name or a link out of the model's folder; `TransientError`
    for those that failed, at the end.
    """
    federation.check_named("--facility", only)
    model = federation.path(federation.model)
    if tokenizer_digest(model) is None:
        raise InputError(f"{model} has no tokenizer; `crossfed model` keeps the one that comes with a model")
    refuse_links_elsewhere(model, but=WEIGHTS)
    files = [
        path
        for path in sorted(model.iterdir())
        if path.is_file() and path.name != SOURCE and (weights or not path.name.endswith(WEIGHTS))
    ]
    sums = "".join(f"{sha256_of(path)}  {path.name}\n" for path in files if path.name != SUMS)
    digest = hashlib.sha256(sums.encode()).hexdigest()
    failed = []
    for facility in federation.facilities:
        if only and facility.name not in only:
            continue
        deployment = facility.deployment
        if deployment.gate:
            log.warning("%s: %s", facility.name, BEHIND_GATE)
            continue
        if deployment.type == FIRECREST:
            log.warning("%s: %s", facility.name, WITHOUT_SHELL)
            continue
        if not deployment.host:
            yield Shared(facility=facility.name, path=str(model), digest=digest, sent=False)
            continue
        place = f"{deployment.environment.home}/{FOLDER}"
        sent = not _holds(deployment, place, digest)
        try:
            if sent:
                _send(facility.name, deployment, place, model, [path.name for path in files], sums)
        except TransientError as error:
            failed.append(str(error))
        else:
            yield Shared(facility=facility.name, path=place, digest=digest, sent=sent)
    if failed:
        raise TransientError("; ".join(failed))


def _holds(deployment: Deployment, place: str, digest: str) -> bool:
    """True when the facility has these files, all as SHA256SUMS says, which it computes itself."""
    there = path_word(place)
    script = (
        f'cd {there} 2>/dev/null && [ "$(sha256sum <{SUMS} | cut -d" " -f1)" = {digest} ] && '
        f"sha256sum --check --quiet --strict {SUMS} >/dev/null && echo crossfed-same\n"
    )
    return "crossfed-same" in run_there(deployment, script, seconds=600).out


def _send(name: str, deployment: Deployment, place: str, model: Path, names: Sequence[str], sums: str) -> None:
    """Unpack beside the old folder, verify there, then take its place; two at once do so one after the other."""
    there, new = path_word(place), path_word(f"{place}.new.{secrets.token_hex(4)}")
    parent, name_there = place.rsplit("/", 1)
    left = f"-maxdepth 1 -name {shlex.quote(name_there + '.new*')} -mmin +{MOST_SECONDS / 60:.0f}"  # killed ones'
    script = (
        f"umask 077; mkdir -p {new} && find {path_word(parent)} {left} -exec rm -rf {{}} + ; tar xf - -C {new} && "
        f"cd {new} && sha256sum --check --quiet --strict {SUMS} && rm -rf {there} && mv -T {new} {there}"
    )
    with tempfile.TemporaryDirectory(prefix="crossfed-share-") as scratch:
        write_text(Path(scratch) / SUMS, sums)
        chosen = [one for one in names if one != SUMS]
        packing = subprocess.Popen(
            ["tar", "chf", "-", "-C", scratch, SUMS, "-C", str(model), "--", *chosen],  # a hub's cache holds links
            stdout=subprocess.PIPE,
        )
        command = [*ssh_command(deployment), shlex.join(["bash", "-c", script])]
        assert packing.stdout is not None
        sent = answer_of(command, data=packing.stdout, seconds=MOST_SECONDS)
        packing.stdout.close()
        packing.wait()
    if sent.code:
        said = (sent.error.strip() or f"code {sent.code}").splitlines()[-1]
        raise TransientError(f"{name} did not take the tokenizer at {place}: {clean_text(said, 300)}")
