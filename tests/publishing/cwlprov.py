"""What `cwltool --provenance` recorded of the training steps: digests of the weights that went in and came out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from facility.exchange.messages.manifest import verify_manifest

STEP = re.compile(r"/train_\w+$")


def trained(record: Path, scratch: Path) -> dict[tuple[int, str], tuple[str, str]]:
    """By round and facility: SHA-256 of the model it got and of the update it left, from the files themselves."""
    # Each pass of the loop writes what was recorded so far: the last document has everything.
    documents = (record / "metadata" / "provenance").glob("workflow_20rounds*.cwlprov.json")
    document = json.loads(max(documents, key=lambda path: path.stat().st_size).read_text())
    got = _directories(document, "used", "model")
    left = _directories(document, "wasGeneratedBy", "update")
    found = {}
    for number, (activity, told) in enumerate(document["activity"].items()):
        if STEP.search(str(told["prov:label"])) is None:
            continue
        for entity, name in ((got[activity], "got"), (left[activity], "left")):
            _restore(record, document, entity, scratch / str(number) / name)
        before, after = (verify_manifest(scratch / str(number) / name) for name in ("got", "left"))
        found[after.round, after.facility] = (before.content_sha256, after.content_sha256)
    return found


def _directories(document: Mapping[str, Any], relation: str, port: str) -> dict[str, str]:
    """Entity by activity, of the relations whose role ends with the name of that port."""
    return {
        one["prov:activity"]: one["prov:entity"]
        for one in document[relation].values()
        if one["prov:role"]["$"].endswith(f"/{port}")
    }


def _restore(record: Path, document: Mapping[str, Any], entity: str, folder: Path) -> None:
    """Put a recorded directory together again from the record's files, which are named by SHA-1."""
    entities = document["entity"]
    content = {
        one["prov:specificEntity"]: one["prov:generalEntity"].removeprefix("data:")
        for one in document["specializationOf"].values()
    }
    folder.mkdir(parents=True)
    for pair in _listed(entities[entity], "prov:hadDictionaryMember"):
        told = entities[pair["$"]]
        name, member = told["prov:pairKey"], told["prov:pairEntity"]["$"]
        if member in content:
            shutil.copy(record / "data" / content[member][:2] / content[member], folder / name)
        else:
            _restore(record, document, member, folder / name)


def _listed(told: Any, key: str) -> list[Any]:
    """Values of a key of an entity, which PROV-JSON writes alone, in a list, or over several records."""
    found: list[Any] = []
    for record in told if isinstance(told, list) else [told]:
        value = record.get(key, [])
        found += value if isinstance(value, list) else [value]
    return found
