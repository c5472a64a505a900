"""May this job be trained here? The signed order and the settings, held against the policy; nothing is run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.adapters import HEADS
from facility.exchange.checkpoints.base_model import base_digest
from facility.exchange.errors import CheckpointError, CrossFedError, InputError
from facility.exchange.files.audit_log import HEAD
from facility.exchange.files.bounded import real_path
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.manifest import MOST_BYTES as MANIFEST_BYTES
from facility.exchange.messages.manifest import NAME, Manifest, run_of, sha256_of
from facility.exchange.messages.masking import ENCODING, MaskingSettings
from facility.exchange.messages.order import verify_order
from facility.exchange.messages.settings import MOST_BYTES as SETTINGS_BYTES
from facility.exchange.messages.settings import FacilitySettings
from facility.gating.grammar import Request
from facility.gating.held import confined_source, paths_alone, reads_of
from facility.gating.ledger import ledger_locked
from facility.gating.refusal import Refused
from facility.gating.session import Session
from facility.gating.settings_copy import settings_copy
from facility.masking.request_copy import private_manifest
from facility.masking.site_rules import SiteRules

BY_NAME = ("optimizer", "policy", "schedule", "encoding", "model_encoding")
"""Keys of settings whose value may be the dotted path of code from outside the package."""


@dataclass(frozen=True, kw_only=True)
class Approved:
    """One round of training that the policy allows."""

    federation: str
    facility: str
    round: int
    run: str
    module: str
    model: Path
    settings: Path
    """The gate's own copy, which no request can alter."""
    dataset: Path
    model_sha256: str
    """Of the manifest: the job compares it, so that nothing is exchanged while it waits."""
    settings_sha256: str
    head: str
    """Of the coordinator's audit log, as the order holds it."""
    reads: list[str]
    """Paths that the job reads the model and the roster from, which no request alters before it is over."""
    roster: Path | None = None
    """The roster, where the settings ask for secure aggregation."""

    def logged(self) -> dict[str, Any]:
        """What the audit log says of it."""
        return {
            "federation": self.federation,
            "run": self.run,
            "round": self.round,
            "model": self.model_sha256,
            "settings": self.settings_sha256,
            "dataset": str(self.dataset),
            "coordinators_head": self.head,
        }


def approve_job(session: Session, request: Request) -> Approved:
    """Raises `Refused` with the reason."""
    policy = session.policy
    number = int(request["round"])
    with settings_copy(session) as copy, ExitStack() as stack:
        try:
            with paths_alone(session):
                model = confined_source(request["model"], session)
                roster = confined_source(request["roster"], session) if "roster" in request.given else None
                reads = reads_of(session, model, roster)
                copy.take(confined_source(request["settings"], session))
                check_length(model / NAME, MANIFEST_BYTES)
                signed = stack.enter_context(private_manifest(model))  # what is verified is what is read of it
            manifest = sha256_of(signed / NAME)
            settings = copy.read(session)
            order = verify_order(
                signed,
                copy.path,
                federation=settings.federation,
                facility=settings.facility,
                round=number,
                rounds=settings.rounds,
                allowed_signers=policy.coordinators,
            )
        except Refused:
            raise
        except (CrossFedError, OSError, ValueError) as error:
            raise Refused(str(error)) from None
        module = request.given.get("module", settings.trainer.module)
        dataset = check_asked(session, settings, module, request["dataset"])
        check_model(session, order, settings)
        if sha256_of(model / NAME) != manifest:
            raise Refused("the order was exchanged while it was read")
        kept = copy.keep(session)
    return Approved(
        federation=settings.federation,
        facility=settings.facility,
        round=number,
        run=run_of(order),
        module=module,
        model=model,
        settings=kept,
        dataset=dataset,
        settings_sha256=copy.digest,
        model_sha256=manifest,
        head=str(order.extra.get(HEAD, ""))[:64],
        reads=reads,
        roster=roster,
    )


def check_asked(session: Session, settings: FacilitySettings, module: str, dataset: str) -> Path:
    """All that the policy says of settings, apart from the model; returns the dataset's resolved path. Raises
    `Refused`."""
    check_settings(session, settings)
    check_module(session, module)
    found = check_dataset(session, dataset)
    if held_out := settings.evaluation.held_out:
        check_dataset(session, held_out)
    check_files(session, settings)
    check_tasks(session, settings)
    check_own_code(session, dataclasses.asdict(settings))
    return found


def test_settings(session: Session, request: Request) -> int:
    """Print whether the policy would allow a round with the settings on standard input; returns the exit code. No model
    is looked at, nothing is kept and nothing trained."""
    with settings_copy(session) as copy:
        copy.write(sys.stdin.buffer.read(SETTINGS_BYTES + 1))
        settings = copy.read(session)
    check_asked(session, settings, settings.trainer.module, request["dataset"])
    print("the policy allows what the settings ask for")
    return 0


def check_length(file: Path, most: int) -> None:
    """Raise `Refused` for a file that is too large, which could take for ever to hash. Raises `OSError` without it."""
    if (size := file.stat().st_size) > most:
        raise Refused(f"{file.name} has {size} bytes, expected at most {most}")


def check_settings(session: Session, settings: FacilitySettings) -> None:
    """What the settings ask for, against the policy."""
    policy, training = session.policy, settings.training
    encoding = training.encoding if settings.masking is None else ENCODING
    if policy.encodings and encoding not in policy.encodings:
        raise Refused(f"updates would travel as {encoding!r}, the policy allows {', '.join(policy.encodings)}")
    if policy.adapters_only and not training.lora.rank:
        raise Refused("the whole model would be trained, the policy allows low-rank adapters only")
    if policy.adapters_only and training.lora.rank > policy.adapters_rank:
        raise Refused(
            f"adapters of rank {training.lora.rank} would be trained, the policy's adapters_rank is "
            f"{policy.adapters_rank}: with a rank as large as a matrix's width they are as much as the whole model"
        )
    if policy.adapters_only and (whole := sorted({*training.lora.modules_to_save} - {*HEADS})):
        raise Refused(
            f"modules {', '.join(map(repr, whole[:3]))} would be trained whole (training.lora.modules_to_save), the "
            f"policy allows low-rank adapters only, and the heads of classifiers ({', '.join(HEADS)})"
        )
    if training.tracker and training.tracker not in policy.trackers:
        allowed = ", ".join(policy.trackers) or "none"
        raise Refused(f"steps would be logged to {training.tracker!r}, the policy allows {allowed}")
    if policy.secure_aggregation and settings.masking is None:
        raise Refused("the update would leave unmasked, the policy wants secure aggregation")
    if settings.masking is not None:
        check_masking(session, settings.masking)
    check_privacy(session, settings)


def check_masking(session: Session, masking: MaskingSettings) -> None:
    """Raise `Refused` where peers' keys, or the sums that are opened, would not be as the policy says."""
    policy = session.policy
    if policy.peer_signers is None:
        raise Refused(
            "the settings ask for secure aggregation, and the policy names no peer_signers: without a file of its own "
            "this site cannot distinguish the other facilities' keys from the coordinator's"
        )
    try:
        SiteRules(peer_signers=policy.peer_signers, minimum_sum=policy.minimum_sum).check(masking)
    except InputError as error:
        raise Refused(str(error)) from None


def check_privacy(session: Session, settings: FacilitySettings) -> None:
    """The site's privacy floor: differential privacy that is at least as strong as the policy wants."""
    policy, asked = session.policy, settings.differential
    if policy.dataset_epsilon and (asked is None or asked.epsilon > policy.dataset_epsilon):
        spent = "no differential privacy" if asked is None else f"an epsilon of {asked.epsilon:g}"
        raise Refused(
            f"the settings ask for {spent}, the policy allows an epsilon of {policy.dataset_epsilon:g} for all "
            "federations on one dataset together"
        )
    wanted = f"the policy wants differential privacy with an epsilon of {policy.epsilon:g} at most"
    if asked is None:
        if policy.epsilon:
            raise Refused(f"the settings ask for no differential privacy, {wanted}")
        return
    if policy.epsilon and asked.epsilon > policy.epsilon:
        raise Refused(f"the settings ask for an epsilon of {asked.epsilon:g}, {wanted}")
    if policy.delta and asked.delta > policy.delta:
        raise Refused(f"the settings ask for a delta of {asked.delta:g}, the policy allows {policy.delta:g} at most")
    if policy.unit == "document" and asked.unit != "document":
        raise Refused("the settings protect blocks, the policy wants whole documents protected")


def check_module(session: Session, module: str) -> None:
    """Raise `Refused` for a trainer that the policy does not list."""
    if module not in session.policy.modules:
        raise Refused(f"module {module!r} would train, the policy allows {', '.join(session.policy.modules)}")


def check_model(session: Session, order: Manifest, settings: FacilitySettings) -> None:
    """A run begins with a listed model; its later rounds follow from that. Other models that settings name by a path,
    LoRA's base and the reference of preferences, are listed themselves: any of this site's would be read."""
    models = session.policy.models
    check_listed(session, "base model", settings.training.lora.base)
    check_listed(session, "reference of preferences", settings.training.preference.reference)
    if not models:
        return
    run = f"{order.federation}/{run_of(order)}"
    with ledger_locked(session.ledger) as (ledger, _):
        if run in ledger.runs:
            return
        if order.content_sha256 not in models:
            raise Refused(
                f"the run begins with a model of digest {order.content_sha256:.16}..., which is not among the policy's "
                "models"
            )
        ledger.runs.append(run)


def check_listed(session: Session, what: str, path: str) -> None:
    """Raise `Refused` where a model at a path of this site's, if any is named, lies in the workdir, or is none of the
    policy's models, if it has any."""
    if not path:
        return
    if real_path(resolve_path(path)).is_relative_to(session.workdir):
        raise Refused(
            f"the {what} {path} lies in the workdir, where the coordinator writes: whatever its manifest says, "
            "its weights could be others; keep it elsewhere at this site"
        )
    if not session.policy.models:
        return
    try:
        digest = base_digest(resolve_path(path))
    except (CheckpointError, OSError) as error:
        raise Refused(f"the {what} {path} is none: {error}") from None
    if digest not in session.policy.models:
        raise Refused(f"the {what} {path} has {digest:.16}..., which is not among the policy's models")


def check_files(session: Session, settings: FacilitySettings) -> None:
    """Any private key of this account's would sign, and an error would show parts of any other file."""
    training, allowed = settings.training, {real_path(resolve_path(one)) for one in session.policy.files}
    named = {
        "training.signing_key": training.signing_key,
        "training.layout.plan": training.layout.plan,
        "training.sync.emulation.trace": training.sync.emulation.trace,
    }
    for key, path in named.items():
        if path and real_path(resolve_path(path)) not in allowed:
            listed = ", ".join(session.policy.files) or "none"
            raise Refused(f"{key} is {path}, the policy's files are: {listed}")


def check_tasks(session: Session, settings: FacilitySettings) -> None:
    """A task's YAML may name functions that lm-eval calls: only the site's own folders hold tasks."""
    directory = settings.evaluation.directory
    if not directory or not settings.evaluation.tasks:
        return
    found = real_path(resolve_path(directory))
    if found not in {real_path(resolve_path(one)) for one in session.policy.task_directories} or found.is_relative_to(
        session.workdir
    ):
        allowed = ", ".join(session.policy.task_directories) or "none"
        raise Refused(f"tasks of {directory} would be evaluated, the policy's task_directories are: {allowed}")


def check_own_code(session: Session, settings: Mapping[str, Any], above: str = "") -> None:
    """Raise `Refused` where an optimizer, policy, schedule or codec is a dotted path of a module that is not listed."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            check_own_code(session, value, f"{above}{key}.")
        elif key in BY_NAME and isinstance(value, str) and ("." in value or ":" in value):
            module = value.partition(":")[0]
            if not {module, module.rpartition(".")[0]} & set(session.policy.modules):
                allowed = ", ".join(session.policy.modules)
                raise Refused(f"{above}{key} is {value!r}, code of a module that the policy does not list: {allowed}")


def check_dataset(session: Session, dataset: str) -> Path:
    """The resolved path of a dataset that the policy lists; raises `Refused` for any other."""
    allowed = {real_path(resolve_path(one)) for one in session.policy.datasets}
    if (found := real_path(resolve_path(dataset))) not in allowed:
        raise Refused(f"the dataset {dataset} is not one of the policy's: {', '.join(session.policy.datasets)}")
    return found
