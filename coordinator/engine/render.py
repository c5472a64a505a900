"""Render federation.yml: streamflow.yml, settings.yml, coordinator.json, facilities/*.json, round.cwl.

Pure and deterministic: the same federation gives the same bytes on any machine, so the rendered files can be shipped,
compared and kept under version control. `write_rendered` puts them in place atomically.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from coordinator.aggregation.plan import norms_suffice
from coordinator.aggregation.settings import AggregationSettings
from coordinator.config.closing import MOST_LATE, carries_late
from coordinator.config.deployments import job_template, streamflow_deployments, workflow_name
from coordinator.config.described import describe_federation
from coordinator.config.federation import Facility, Federation
from coordinator.config.folded import fold_description
from coordinator.config.masked_moments import masked_moments
from coordinator.config.privacy import largest_step
from coordinator.config.settings import CoordinatorSettings, RoundSettings
from coordinator.config.yaml_lines import Lined
from coordinator.engine.masked_workflow import (
    login_target,
    login_template,
    masked_round,
    masking_settings,
)
from coordinator.engine.own_files import HEAD, LOGIN_SUFFIX, of_facility, own_files
from coordinator.engine.round_workflow import round_workflow
from coordinator.engine.shipped_cwl import differing_cwl, update_shipped
from coordinator.rounds.late import WORKDIR
from coordinator.rounds.verification import averages_encoded
from facility.exchange.checkpoints.adapters import CONFIG
from facility.exchange.checkpoints.checkpoint import ADAPTER
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.durable import write_text
from facility.exchange.files.paths import CHECKOUT
from facility.exchange.job_names import job_name
from facility.exchange.messages.evaluation import FacilityEvaluation
from facility.exchange.messages.masking import MaskingSettings
from facility.exchange.messages.preference import BENEATH, PreferenceSettings
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.messages.template_inheritance import find_template


def render(federation: Federation) -> dict[str, str]:
    """Text of every rendered file, by path relative to the folder above federation.yml's own."""
    here, cwl = federation.file.parent.name, _folder_of_cwl(federation)
    names = federation.names
    files = {
        f"{here}/streamflow.yml": _yaml(streamflow_file(federation)),
        f"{here}/settings.yml": _yaml(workflow_inputs(federation)),
        f"{here}/coordinator.json": _json(coordinator_settings(federation)),
    }
    encoded = federation.sending.encoding != "full"
    evaluates = federation.evaluation.for_coordinator(names) is not None
    archive = carries_late(federation.closing) or federation.evaluation.matrix
    workflow = round_workflow(names, encoded=encoded, archive=archive, evaluates=evaluates)
    files[f"{cwl}/round.cwl"] = _yaml(masked_round(workflow, names) if federation.masks else workflow)
    for facility in federation.facilities:
        if (template := _template(federation, facility)) is not None:
            files[f"{here}/jobs/{facility.name}.sh"] = template
        if federation.masks and facility.deployment.host:
            files[f"{here}/jobs/{facility.name}{LOGIN_SUFFIX}"] = login_template(facility.deployment)
        files[f"{here}/facilities/{facility.name}.json"] = facility_settings(federation, facility)
    return files


def write_rendered(federation: Federation) -> list[Path]:
    """Write the rendered files beside federation.yml and the CWL into its folder; returns those that changed.

    CWL that is not rendered is the one that ships with CrossFed; settings of facilities that are gone are removed.
    Raises `InputError`, and writes nothing, where a file of a person's own would be replaced.
    """
    root = federation.file.parent.parent
    files = render(federation)
    if own := files_it_would_replace(federation, files):
        raise InputError(
            f"{own[0]} was not rendered by CrossFed, and a rendering would replace it: move it away (a template of "
            "your own to another name), or keep federation.yml in a folder of its own"
        )
    changed = update_shipped(root / _folder_of_cwl(federation), masked=bool(federation.masks))
    for name in _unlike(root, files):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, files[name])
        changed.append(target)
    return changed + _remove_gone(federation)


def files_it_would_replace(federation: Federation, rendered: Iterable[str]) -> list[Path]:
    """Files of a person's own that a rendering would replace; `rendered`: names of all that it writes."""
    root, folder = federation.file.parent.parent, federation.file.parent
    written = [root / name for name in rendered]
    named = [one.deployment.template for one in federation.facilities if one.deployment.template]
    templates = {find_template(name, folder).resolve() for name in named}
    return own_files(written, templates)


def _remove_gone(federation: Federation) -> list[Path]:
    """Remove what was rendered for facilities that are gone; returns that. Files of the person's own stay."""
    here, names = federation.file.parent, federation.names
    gone = [
        path for path in sorted((here / "facilities").glob("*.json")) if path.stem not in names and of_facility(path)
    ]
    gone += [here / "jobs" / f"{path.stem}{suffix}" for path in tuple(gone) for suffix in (".sh", LOGIN_SUFFIX)]
    gone += [] if federation.masks else [here / "jobs" / f"{name}{LOGIN_SUFFIX}" for name in names]
    jobs = {f"{name}.sh" for name in names}  # of a facility `a-login` beside `a`, too
    found = [path for path in gone if path.is_file() and path.name not in jobs]
    for path in found:
        path.unlink()
    return found


def _folder_of_cwl(federation: Federation) -> str:
    """Relative to the folder above federation.yml's own: `cwl` beside `workflow/`, else within federation.yml's own
    folder, so that nothing is written outside it."""
    here = federation.file.parent.name
    return "cwl" if here == "workflow" else f"{here}/cwl"


def stale_files(federation: Federation, rendered: Mapping[str, str] | None = None) -> list[str]:
    """Files that `write_rendered` would write: missing, or not as in `rendered` (default: a rendering) and the "
    "shipped CWL."""
    root, cwl = federation.file.parent.parent, _folder_of_cwl(federation)
    files = _unlike(root, render(federation) if rendered is None else rendered)
    return files + [f"{cwl}/{name}" for name in differing_cwl(root / cwl, masked=bool(federation.masks))]


def _unlike(root: Path, rendered: Mapping[str, str]) -> list[str]:
    """Names of the rendered files that are not below `root` as they are rendered."""
    paths = {name: root / name for name in rendered}
    return [n for n, path in paths.items() if not path.exists() or path.read_text(encoding="utf-8") != rendered[n]]


def _template(federation: Federation, facility: Facility) -> str | None:
    """A facility's job template. Raises `ConfigurationError` at the facility's line."""
    where = f"facilities[{federation.facilities.index(facility)}].deployment"
    try:
        name = job_name(federation.name, facility.name)
        return job_template(facility.deployment, federation.file.parent, name)
    except ConfigurationError as error:
        key = f"{where}.{error.key}" if error.key else where
        raise Lined(federation.file).error(f"{where}: {error.message}", key) from None


def coordinator_settings(federation: Federation) -> dict[str, Any]:
    """The content of coordinator.json: what the steps at the coordinator read of a federation."""
    settings = CoordinatorSettings(
        federation=federation.name,
        facilities=federation.names,
        sequences={facility.name: _sequences(federation, facility) for facility in federation.facilities},
        lora=federation.facilities[0].training.lora,
        seed=federation.seed if carries_late(federation.closing) and federation.facilities[0].training.lora.rank else 0,
        chosen=federation.chosen,
        largest_step=largest_step(federation.training_of) if federation.masks else 0.0,
        masked_moments=masked_moments([*federation.training_of.values()]) if federation.masks else None,
        closing=federation.closing,
        limits=federation.limits,
        even=federation.even,
        longest_queue_hours=federation.longest_queue_hours,
        ahead=dict(federation.ahead),
        steps={one.name: one.training.steps for one in federation.facilities} if federation.even else {},
        described=describe_federation(federation),
        evaluation=federation.evaluation.for_coordinator(federation.names),
        asked_tasks=federation.evaluation.asked(federation.names),
        comparison=federation.evaluation.comparison(masked=bool(federation.masks)),
        **{key.name: getattr(federation, key.name) for key in dataclasses.fields(RoundSettings)},
    )
    settings = dataclasses.replace(settings, aggregation=_aggregation(federation))
    values = {"federation": federation.name} | dataclasses.asdict(settings)
    values["described"] = fold_description(settings.described)
    if key := federation.sending.signing_key:
        values["sending"]["signing_key"] = _for_a_step(federation.path(key))
        values["settings_sha256"] = {
            facility.name: hashlib.sha256(facility_settings(federation, facility).encode()).hexdigest()
            for facility in federation.facilities
        }
    optional = (
        "privacy",
        "seed",
        "largest_step",
        "masked_moments",
        "closing",
        "limits",
        "even",
        "ahead",
        "steps",
        "described",
        "evaluation",
        "comparison",
        "settings_sha256",
    )
    return {name: value for name, value in values.items() if value or name not in optional}


def _aggregation(federation: Federation) -> AggregationSettings:
    """Settings of the aggregation with its signers' resolved path, and the staleness that carried updates may have."""
    found = federation.aggregation
    if found.allowed_signers:
        found = dataclasses.replace(found, allowed_signers=_for_a_step(federation.path(found.allowed_signers)))
    if carries_late(federation.closing):
        found = dataclasses.replace(
            found, maximum_staleness=max(found.maximum_staleness, most_rounds_behind(federation))
        )
    return found


def facility_settings(federation: Federation, facility: Facility) -> str:
    """Text of the file that is staged to a facility with every round."""
    settings = FacilitySettings(
        federation=federation.name,
        facility=facility.name,
        rounds=federation.rounds,
        seed=federation.seed,
        training=_training(federation, facility),
        trainer=federation.trainer_of(facility),
        include=federation.aggregation.include,
        exclude=federation.aggregation.personal,
        evaluation=_evaluation(federation, facility),
        dataset_card=facility.public.dataset_card,
        model_encoding=federation.sending.encoding,
        behind=most_rounds_behind(federation),
        most_steps=0 if federation.even is None else federation.even.bounds(facility.training.steps)[1],
        step_norms=_states_norms(federation, facility),
        masking=_masking(federation, facility),
        differential=federation.privacy.differential if federation.privacy is not None else None,
    )
    values = dataclasses.asdict(settings)
    for key in ("held_out", "own_models"):
        if not values["evaluation"][key]:
            del values["evaluation"][key]
    absent = {"masking"} if settings.masking is None else set()
    absent |= set() if settings.differential else {"differential"}
    absent |= {name for name in ("most_steps", "step_norms") if not values[name]}
    absent |= {"trainer"} if settings.trainer.built_in else set()
    return _json({name: value for name, value in values.items() if name not in absent})


def _states_norms(federation: Federation, facility: Facility) -> bool:
    """True if the norm of a facility's step saves the coordinator a reading of its update."""
    read_as_sent = facility.training.encoding == "full" or averages_encoded(federation)
    return read_as_sent and not federation.masks and norms_suffice(federation.aggregation, len(federation.facilities))


def _evaluation(federation: Federation, facility: Facility) -> FacilityEvaluation:
    """What a facility evaluates; a local one's held-out data is relative to federation.yml's folder."""
    found = federation.evaluation.for_facility(facility.name, masked=bool(federation.masks))
    if facility.deployment.type != "local" or not found.held_out:
        return found
    return dataclasses.replace(found, held_out=_for_a_step(federation.path(found.held_out)))


def most_rounds_behind(federation: Federation) -> int:
    """Rounds that a facility at work may be behind the newest model."""
    return 0 if federation.closing is None else (federation.keep_rounds or MOST_LATE + 1) - 1


def _masking(federation: Federation, facility: Facility) -> MaskingSettings | None:
    """A facility's part in secure aggregation; a local one's peers are relative to federation.yml's folder."""
    found = masking_settings(federation, facility)
    if found is None or facility.deployment.type != "local" or not found.peer_signers:
        return found
    return dataclasses.replace(found, peer_signers=_for_a_step(federation.path(found.peer_signers)))


def _training(federation: Federation, facility: Facility) -> TrainingSettings:
    """A facility's settings with resolved paths; a local facility's are relative to federation.yml's folder."""
    training = dataclasses.replace(facility.training, preference=_preference(federation, facility))
    if facility.deployment.type != "local":
        return training

    def here(path: str) -> str:
        return _for_a_step(federation.path(path)) if path else ""

    reference = training.preference.reference
    emulation = dataclasses.replace(training.sync.emulation, trace=here(training.sync.emulation.trace))
    return dataclasses.replace(
        training,
        signing_key=here(training.signing_key),
        layout=dataclasses.replace(training.layout, plan=here(training.layout.plan)),
        lora=dataclasses.replace(training.lora, base=here(training.lora.base)),
        preference=dataclasses.replace(
            training.preference, reference=reference if reference == BENEATH else here(reference)
        ),
        sync=dataclasses.replace(training.sync, emulation=emulation),
    )


def _preference(federation: Federation, facility: Facility) -> PreferenceSettings:
    """How a facility learns preferences: new adapters add nothing, so the model of round 0 is the one beneath them, of
    which a facility that comes later has all it needs."""
    found, model = facility.training.preference, federation.path(federation.model)
    new = facility.training.lora.rank and not any((model / name).exists() for name in (ADAPTER, CONFIG))
    return dataclasses.replace(found, reference=BENEATH) if new and not found.reference else found


def _sequences(federation: Federation, facility: Facility) -> int:
    """At most, in a round; replicas that go at speeds of their own divide the round's updates unevenly."""
    training = facility.training
    steps = training.steps if federation.even is None else federation.even.bounds(training.steps)[1]
    return steps * training.batch_sequences * (1 if training.sync.policy == "allreduce" else 2)


def workflow_inputs(federation: Federation) -> dict[str, Any]:
    """The CWL input object: what main.cwl is given."""
    inputs = {
        "model": {"class": "Directory", "path": _relative(federation, federation.model)},
        "federation": {"class": "File", "path": "coordinator.json"},
        "archive": _for_a_step(federation.archive_path),
    }
    records = [
        {
            "name": facility.name,
            "dataset": _for_a_step(federation.path(facility.dataset))
            if facility.deployment.type == "local"
            else facility.dataset,
            "settings": {"class": "File", "path": f"facilities/{facility.name}.json"},
        }
        for facility in federation.facilities
    ]
    return inputs | {"facilities": records}


def streamflow_file(federation: Federation) -> dict[str, Any]:
    """streamflow.yml: every step on the coordinator, except a facility's training."""
    above = "../" if _folder_of_cwl(federation) == "cwl" else ""
    workdir = _relative(federation, federation.workdir or f"../.crossfed/{federation.name}/work")
    deployments: dict[str, Any] = {"coordinator": {"type": "local", "config": {}, "workdir": f"{workdir}/{WORKDIR}"}}
    bindings: list[dict[str, Any]] = [{"step": "/", "target": {"deployment": "coordinator"}}]
    for facility in federation.facilities:
        entries, target = streamflow_deployments(
            facility.deployment,
            federation=federation.name,
            facility=facility.name,
            template=f"jobs/{facility.name}.sh",
            workdir=f"{workdir}/{facility.name}",
        )
        deployments |= entries
        bindings.append({"step": f"/rounds/train_{facility.name}", "target": target})
        if federation.masks:
            place = f"{workdir}/{facility.name}"
            target = login_target(deployments, facility.deployment, facility.name, workdir=place)
            bindings += [{"step": f"/rounds/{kind}_{facility.name}", "target": target} for kind in ("keys", "unmask")]
    return {
        "version": "v1.0",
        "workflows": {
            workflow_name(federation.name): {
                "type": "cwl",
                "config": {"file": f"{above}cwl/main.cwl", "settings": "settings.yml"},
                "bindings": bindings,
            }
        },
        "deployments": deployments,
    }


def _relative(federation: Federation, text: str) -> str:
    """A path in federation.yml as seen from its folder: relative stays relative."""
    return text if not os.path.isabs(text) and not text.startswith("~") else str(federation.path(text))


def _for_a_step(absolute: Path) -> str:
    """A path here in the form that `facility.exchange.files.paths.resolve_path` reads in a job: relative in the "
    "checkout."""
    return str(absolute.relative_to(CHECKOUT)) if absolute.is_relative_to(CHECKOUT) else str(absolute)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(value: Any) -> str:
    return HEAD + yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
