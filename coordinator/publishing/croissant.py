"""Croissant 1.0 cards (https://docs.mlcommons.org/croissant/docs/croissant-spec.html) of facilities that opt in.

Counts and digests only: no text, no file name, no address where the data could be fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.config.publishing import PublicSettings

TERMS = (
    "citeAs column extract field fileObject fileProperty fileSet format includes isLiveDataset jsonPath key md5 "
    "parentField path recordSet references regex repeated replace separator source subField transform"
).split()
"""Names that Croissant's own vocabulary defines."""
CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
} | {term: f"cr:{term}" for term in TERMS}
"""As the specification has it, in the appendix "JSON-LD context"."""


HEADER_BYTES = 128
"""Of a file of token blocks, before its rows; how large an image is, no count says."""


def card(name: str, dataset: Mapping[str, Any], public: PublicSettings) -> dict[str, Any]:
    """`dataset`: what `facility.exchange.messages.dataset_card` says of it."""
    counts = {
        split: {key: one[key] for key in ("documents", "tokens", "blocks")} for split, one in dataset["splits"].items()
    }
    images = dataset["task"] == "image-classification"
    counted = "; ".join(
        f"{split}: {one['documents']:,} " + ("images" if images else f"documents, {one['tokens']:,} tokens")
        for split, one in counts.items()
    )
    blocks = "as images" if images else f"in blocks of {dataset['block_tokens']} tokens"
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name.replace(" ", "-"),
        "description": f"Training data of {name}, prepared for {dataset['task']} {blocks}. "
        f"It stays at the facility; this card holds counts and digests only. {counted}.",
        "license": public.license or "not stated",
        "inLanguage": list(public.languages),
        "isAccessibleForFree": False,
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": f"{split}.npy",
                "name": f"{split}.npy",
                "description": f"{'images' if images else 'token blocks'} of the {split} split; not distributed",
                "contentUrl": f"{split}.npy",
                "encodingFormat": "application/octet-stream",
                "sha256": one["sha256"],
            }
            | ({} if images else {"contentSize": f"{HEADER_BYTES + one['blocks'] * dataset['block_tokens'] * 4} B"})
            for split, one in dataset["splits"].items()
        ],
        "variableMeasured": [
            {"@type": "sc:PropertyValue", "name": f"{split} {key}", "value": value}
            for split, one in counts.items()
            for key, value in one.items()
        ],
    }
