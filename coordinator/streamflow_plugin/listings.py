"""Directories pass from step to step unlisted, as CWL v1.2's default, `no_listing`, asks.

StreamFlow 0.2.0rc3 lists a directory that has no listing even where none is to be loaded, and asks for the size and the
SHA-1 of each file in it, at the place where the directory is: at a facility that reads the whole update once more, on
the login node, and one that leaves a sparse file of terabytes, or a million names, would hold the engine up for as long
as it likes (docs/streamflow-output-path-traversal.md, the second finding).
"""

from __future__ import annotations

from typing import Any

from streamflow.cwl.utils import LoadListing

PARAMETERS = ["context", "connector", "cwl_version", "location", "token_value", "load_contents", "load_listing"]
"""Parameters that `streamflow.cwl.utils.update_file_token` is known to have."""


def without_listing(original: Any) -> Any:
    """`update_file_token`: where no listing is to be loaded, none is, and one that is there is left out."""

    async def update_file_token(
        context: Any,
        connector: Any,
        cwl_version: str,
        location: Any,
        token_value: Any,
        load_contents: bool | None,
        load_listing: LoadListing | None = None,
    ) -> Any:
        if load_listing == LoadListing.no_listing:
            token_value = {key: value for key, value in token_value.items() if key != "listing"}
            load_listing = None
        return await original(context, connector, cwl_version, location, token_value, load_contents, load_listing)

    update_file_token.__wrapped__ = original  # type: ignore[attr-defined]
    return update_file_token
