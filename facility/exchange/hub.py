"""The Hugging Face hub, asked once whether it answers before its libraries ask for one file after the other.

Without a network huggingface_hub asks for each file six times over 25 s, and `transformers` for several files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from facility.exchange.addresses import hidden_login
from facility.exchange.errors import first_line


def why_hub_is_silent() -> str:
    """Why the hub does not answer; empty where it does, whatever it says, or where it is not to be asked (offline).

    One request, over the proxy that the environment names; it waits HF_HUB_ETAG_TIMEOUT seconds (10) at most.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    data = sys.modules.get("datasets.config")
    if constants.HF_HUB_OFFLINE or getattr(data, "HF_HUB_OFFLINE", False):
        return ""
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of whichever HTTP client huggingface_hub uses: a name, a connection, a proxy
        return hidden_login(f"{constants.ENDPOINT} does not answer ({first_line(error)})")
    return ""


@contextmanager
def offline_if_silent() -> Iterator[str]:
    """Within it, libraries that are imported before do not ask a hub that is silent: they read their caches alone.

    Yields why the hub does not answer; empty where it does.
    """
    from huggingface_hub import constants

    reason = why_hub_is_silent()
    modules: list[Any] = [constants, sys.modules.get("datasets.config")] if reason else []
    before = [(module, module.HF_HUB_OFFLINE) for module in modules if module is not None]
    try:
        for module, _ in before:
            module.HF_HUB_OFFLINE = True
        yield reason
    finally:
        for module, value in before:
            module.HF_HUB_OFFLINE = value
