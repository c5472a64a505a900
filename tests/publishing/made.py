"""A made-up federation of three facilities with a finished model, of which one agrees to be named."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from coordinator.archive.rounds import Archive
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from tests.pico import save_pico
from tests.report.made import made_archive

PEOPLE = [{"name": "Josiah Carberry", "orcid": "0000-0002-1825-0097", "affiliation": "Brown University"}]
ODD = [
    'A "quoted" <b>name</b> \\ {x}|^`',
    "José Ünal (MIT) #1 50% a/b?c=d&e",
    "山田 太郎",
    "\u202eevil\u0301\u0301\u0301\u0301 name",
    "x" * 3000,
    "A B",
    "A-B",
    "run",
    "./",
    "../../x",
    "urn:sha256:0",
    "https://e.example/<script>",
    "' OR 1=1; --",
]
"""Names that a person, an institution or a licence may have, or that somebody makes up."""
MOST_BYTES = 5_000_000
"""Of a crate."""


def record_model(archive: Archive) -> None:
    """Have the record of the last round name the weights that lie there."""
    path = archive.round_directory(2) / "round.json"
    digest = read_manifest(path.parent / "model").content_sha256
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_sha256": digest}))


def made_federation(root: Path) -> Path:
    """Its federation.yml; the facility that is named publishes counts of its data, and two of nine jobs failed."""
    archive = made_archive(root / "archive", facilities=3, rounds=3)
    counts = {"blocks": 10, "documents": 20, "tokens": 160, "sha256": "a" * 64}
    for number in range(3):
        path = archive.round_directory(number) / "round.json"
        record = json.loads(path.read_text())
        record["facilities"][0]["dataset"] = {"task": "causal-lm", "block_tokens": 16, "splits": {"train": counts}}
        path.write_text(json.dumps(record))
    for place in (archive.path / "initial" / "model", archive.round_directory(2) / "model"):
        save_pico(place)
        write_manifest(place, Manifest(kind="model", federation="made", round=0))
    record_model(archive)
    path = root / "workflow" / "federation.yml"
    path.parent.mkdir()
    public = "public: {named: true, dataset_card: true, languages: [it], license: cc-by-4.0}"
    path.write_text(
        "name: made\nmodel: ../model\nrounds: 3\narchive: ../archive\nworkdir: ../work\n"
        f"title: A made model\nlicense: apache-2.0\ncreators: {json.dumps(PEOPLE)}\nfunding: [Grant 1]\n"
        f"facilities:\n  - {{name: facility-00, dataset: /data, {public}}}\n"
        "  - {name: facility-01, dataset: /data}\n  - {name: facility-02, dataset: /data}\n"
    )
    return path


def hostile_federation(root: Path) -> Path:
    """The same with the oddest of names, titles and licences, and facilities called as things of the crate are."""
    path = made_federation(root)
    people = [{"name": one, "affiliation": ODD[-1 - place]} for place, one in enumerate(ODD)]
    described = yaml.safe_load(path.read_text()) | {
        "title": ODD[0] + ODD[2],
        "license": ODD[1],
        "creators": [*people, *PEOPLE],
        "funding": ODD,
    }
    names = {"facility-00": "run", "facility-01": "ro-crate-metadata.json", "facility-02": "crossfed"}
    for one, license in zip(described["facilities"], (ODD[0], ODD[2], ODD[11]), strict=True):
        one["name"] = names[one["name"]]
        one["public"] = {"named": True, "dataset_card": True, "license": license, "languages": [ODD[0], "it", ODD[2]]}
    path.write_text(yaml.safe_dump(described))
    archive = Archive(root / "archive")
    for number in range(3):
        file = archive.round_directory(number) / "round.json"
        record = json.loads(file.read_text())
        dataset = record["facilities"][0]["dataset"]
        for row in record["facilities"]:
            row["facility"], row["dataset"] = names[row["facility"]], dataset
        file.write_text(json.dumps(record))
    return path
