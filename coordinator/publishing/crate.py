"""A Workflow Run RO-Crate of a federation (https://w3id.org/ro/wfrun/workflow/0.5): what ran where and when.

One CreateAction for the whole run and one for each facility and round. Models and updates are entities with their
digest; no weights are in the crate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rocrate.model.contextentity import ContextEntity
from rocrate.model.person import Person
from rocrate.rocrate import ROCrate

from coordinator.archive.rounds import CARRIED
from coordinator.config.federation import Federation
from coordinator.publishing.card import published_name
from coordinator.publishing.names import address, identifier, slug
from facility import __version__
from facility.exchange.files.durable import write_text
from facility.exchange.files.paths import shipped_path
from facility.exchange.text import number_of

PROFILES = (
    ("https://w3id.org/ro/wfrun/process/0.5", "Process Run Crate", "0.5"),
    ("https://w3id.org/ro/wfrun/workflow/0.5", "Workflow Run Crate", "0.5"),
    ("https://w3id.org/workflowhub/workflow-ro-crate/1.0", "Workflow RO-Crate", "1.0"),
)
SPDX = "https://spdx.org/licenses/"
WEB = ("https://", "http://")
RUN = "https://w3id.org/ro/terms/workflow-run/context"


def write_crate(folder: Path, federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """Write ro-crate-metadata.json into `folder`, whose files it describes; adds the workflow's CWL."""
    crate = ROCrate(version="1.1")  # what the Workflow Run profiles 0.5 are made for
    crate.metadata.extra_contexts.append(RUN)
    title = federation.title or federation.name
    crate.name = title
    rounds, facilities = number_of(len(data["rounds"]), "round"), number_of(len(names), "facility", "facilities")
    crate.description = f"Federated training of {title} over {facilities}: {rounds}."
    crate.license = _license(crate, federation.license)
    crate.datePublished = datetime.now(UTC)
    crate.root_dataset["conformsTo"] = [_profile(crate, *one) for one in PROFILES]
    people = [_person(crate, one.name, one.orcid, one.affiliation) for one in federation.creators]
    if people:
        crate.root_dataset["author"] = people
        crate.root_dataset["creator"] = people
    if federation.funding:
        crate.root_dataset["funding"] = list(federation.funding)
    workflow = _workflow(crate, federation, people)
    files = _files(crate, folder)
    actions = _actions(crate, federation, names, data, workflow, files, people)
    crate.root_dataset["mentions"] = actions
    crate.write(folder)
    path = folder / "ro-crate-metadata.json"
    write_compact(path, json.loads(path.read_text(encoding="utf-8")))


def write_compact(path: Path, value: Any) -> None:
    """JSON without the spaces, which are half of a long federation's crate."""
    write_text(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def _workflow(crate: ROCrate, federation: Federation, people: list[Any]) -> Any:
    """main.cwl as the crate's main entity, with its tools as parts."""
    cwl = federation.file.parent.parent / "cwl"
    main, inner = "main.cwl", "round.cwl"
    source = cwl if (cwl / main).is_file() else shipped_path("cwl")
    workflow = crate.add_workflow(source / main, f"cwl/{main}", main=True, lang="cwl", lang_version="v1.2")
    workflow["name"] = "CrossFed federation"
    workflow["license"] = "https://spdx.org/licenses/Apache-2.0"
    if people:
        workflow["author"] = people
    parts = []
    for path in [source / inner, *sorted((source / "tools").glob("*.cwl"))]:
        if path.is_file():
            place = f"cwl/{path.relative_to(source)}"
            properties = {
                "@type": ["File", "SoftwareSourceCode"],
                "name": path.stem,
                "encodingFormat": "application/cwl",
            }
            parts.append(crate.add_file(path, place, properties=properties | {"programmingLanguage": {"@id": CWL}}))
    workflow["hasPart"] = parts
    return workflow


CWL = "https://w3id.org/workflowhub/workflow-ro-crate#cwl"
FILES = {
    "reproduce.md": ("How to make the model again", "text/markdown"),
    "workflow/federation.yml": ("The federation on one machine", "application/yaml"),
    "settings.json": ("Settings of the federation that was run", "application/json"),
    "history.json": ("What each facility did in each round", "application/json"),
    "sbom.json": ("Software: a CycloneDX document", "application/json"),
    "report.html": ("Report", "text/html"),
}


def _files(crate: ROCrate, folder: Path) -> dict[str, Any]:
    """Files of the folder, as entities by name."""
    found = {}
    for place, (name, kind) in FILES.items():
        if (folder / place).is_file():
            found[place] = crate.add_file(
                folder / place, place, properties={"name": name, "encodingFormat": kind, "description": name}
            )
    for path in sorted((folder / "croissant").glob("*.json")):
        place = str(path.relative_to(folder))
        about = {"name": f"Croissant card {path.stem}", "encodingFormat": "application/ld+json"}
        found[place] = crate.add_file(path, place, properties=about)
    return found


def _actions(
    crate: ROCrate,
    federation: Federation,
    names: Mapping[str, str],
    data: Mapping[str, Any],
    workflow: Any,
    files: Mapping[str, Any],
    people: list[Any],
) -> list[Any]:
    """The run as one action, and a training action for each facility and round."""
    digests = {one["name"]: one["sha256"] for one in data["artefacts"]}
    initial = _weights(crate, "initial model", digests.get("initial model", ""))
    engine = _software(crate)
    models = {-1: initial}
    trained = []
    times = _times(data)
    for entry in data["rounds"]:
        number = entry["round"]
        made = _weights(
            crate, f"global model after round {number}", digests.get(f"global model after round {number}", "")
        )
        for row in entry["facilities"]:
            if row["reason"] == CARRIED:
                continue  # not failed: the job goes on, and a later round has it
            received = models.get(number - 1 - row.get("staleness", 0), initial)
            trained.append(_training(crate, row, names, received, digests, number, times))
        models[number] = made
    final = models[data["model_round"]]
    if data["averaged"]:
        final = _weights(crate, published_name(data), digests[published_name(data)])
    begin, end = times.get("", ("", ""))
    run = crate.add(
        ContextEntity(
            crate,
            "#run",
            properties={
                "@type": "CreateAction",
                "name": f"Run of federation {federation.name}",
                "instrument": {"@id": workflow.id},
                "object": [{"@id": initial.id}, *({"@id": one.id} for one in files.values() if "federation" in one.id)],
                "result": [
                    {"@id": final.id},
                    *({"@id": f.id} for p, f in files.items() if "report" in p),
                ],
                "actionStatus": {"@id": _status(data["stopped"] is None)},
            }
            | _span(begin, end)
            | ({"agent": [{"@id": one.id} for one in people]} if people else {"agent": {"@id": engine.id}}),
        )
    )
    return [run, *trained]


def _training(
    crate: ROCrate,
    row: Mapping[str, Any],
    names: Mapping[str, str],
    model: Any,
    digests: Mapping[str, str],
    number: int,
    times: Mapping[str, tuple[str, str]],
) -> Any:
    """One facility's part of one round."""
    place = names.get(row["facility"], row["facility"])
    ok = row["status"] == "ok"
    begin, end = times.get(f"{number} {row['facility']}", ("", ""))
    late = row.get("staleness", 0)
    which = f"round {number - late}, averaged in round {number}" if late else f"round {number}"
    properties: dict[str, Any] = {
        "@type": "CreateAction",
        "name": f"Training at {place}, {which}",
        "instrument": {"@id": "cwl/tools/train.cwl"},
        "object": {"@id": model.id},
        "agent": {"@id": _site(crate, place).id},
        "actionStatus": {"@id": _status(ok)},
    } | _span(begin, end)
    if ok and (digest := row.get("update_sha256") or digests.get(f"update of {row['facility']}, round {number}", "")):
        properties["result"] = {"@id": _weights(crate, f"update of {place}, round {number}", digest).id}
    if not ok:
        properties["error"] = row["status"]
    return crate.add(ContextEntity(crate, f"#round-{number}-{slug(place)}", properties=properties))


def _weights(crate: ROCrate, name: str, digest: str) -> Any:
    """Weights that are named by their digest and are not in the crate."""
    own = f"urn:sha256:{digest}" if digest else f"#{name.replace(' ', '-').replace(',', '')}"
    if (found := crate.dereference(own)) is not None:
        if name not in (also := [found["name"], *found.get("alternateName", [])]):
            found["alternateName"] = [*also[1:], name]  # the same weights: no name of one facility for another's alone
        return found
    properties = {"@type": "CreativeWork", "name": name} | ({"sha256": digest, "identifier": digest} if digest else {})
    return crate.add(ContextEntity(crate, own, properties=properties))


def _times(data: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Begin and end by `ROUND FACILITY`, and of everything under ''."""
    spans: dict[str, list[float]] = {}
    for one in data["timeline"]["segments"]:
        for key in (f"{one['round']} {one['facility']}", ""):
            span = spans.setdefault(key, [one["begin"], one["end"]])
            span[0], span[1] = min(span[0], one["begin"]), max(span[1], one["end"])
    return {key: (_iso(begin), _iso(end)) for key, (begin, end) in spans.items()}


def _span(begin: str, end: str) -> dict[str, str]:
    """Times of an action; nothing where none was recorded."""
    return {"startTime": begin, "endTime": end} if begin else {}


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _status(ok: bool) -> str:
    return f"http://schema.org/{'Completed' if ok else 'Failed'}ActionStatus"


def _profile(crate: ROCrate, identifier: str, name: str, version: str) -> Any:
    properties = {"@type": "CreativeWork", "name": name, "version": version}
    return crate.add(ContextEntity(crate, identifier, properties=properties))


def _license(crate: ROCrate, license: str) -> Any:
    place = address(license if license.startswith(WEB) else f"{SPDX}{quote(license or 'NOASSERTION', safe='')}")
    properties = {"@type": "CreativeWork", "name": license or "not stated", "description": "licence of the model"}
    return crate.add(ContextEntity(crate, place, properties=properties))


def _person(crate: ROCrate, name: str, orcid: str, affiliation: str) -> Any:
    properties: dict[str, Any] = {"name": name}
    if affiliation:
        properties["affiliation"] = {"@id": _named(crate, "institution", affiliation).id}
    own = f"https://orcid.org/{orcid}" if orcid else identifier("person", name, _names(crate))
    return crate.add(Person(crate, own, properties=properties))


def _site(crate: ROCrate, name: str) -> Any:
    return _named(crate, "site", name)


def _named(crate: ROCrate, kind: str, name: str) -> Any:
    """The organization of this name."""
    own = identifier(kind, name, _names(crate))
    found = crate.dereference(own)
    properties = {"@type": "Organization", "name": name}
    return found if found is not None else crate.add(ContextEntity(crate, own, properties=properties))


def _names(crate: ROCrate) -> dict[str, str]:
    """Names by identifier, of all that has one."""
    return {one.id: str(one.get("name")) for one in crate.contextual_entities}


def _software(crate: ROCrate) -> Any:
    properties = {"@type": "SoftwareApplication", "name": "CrossFed", "version": __version__}
    return crate.add(ContextEntity(crate, "#crossfed", properties=properties))
