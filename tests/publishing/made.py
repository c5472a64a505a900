"""A made-up federation of three facilities with a finished model, of which one agrees to be named."""

from __future__ import annotations

import json
from pathlib import Path

from facility.exchange.messages.manifest import Manifest, write_manifest
from tests.pico import save_pico
from tests.report.made import made_archive

PEOPLE = [{"name": "Josiah Carberry", "orcid": "0000-0002-1825-0097", "affiliation": "Brown University"}]
MOST_BYTES = 5_000_000
"""Of a crate."""


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
