"""The signed order under every model that leaves, where `sending.signing_key` names the coordinator's key."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from coordinator.archive.audit import log_entry, log_head
from coordinator.config.settings import CoordinatorSettings
from coordinator.events.event import emit
from facility.exchange.errors import CrossFedError
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.manifest import NAME, SIGNATURE, manifest_if_any, run_of, sha256_of
from facility.exchange.messages.order import sign_order

log = logging.getLogger(__name__)


def order(model: Path, settings: CoordinatorSettings) -> None:
    """Sign the model in `model`, if orders are signed. Raises `ConfigurationError` for a key that cannot sign."""
    sending, manifest = settings.sending, manifest_if_any(model)
    if manifest is None:
        return
    if not sending.signing_key:
        (model / SIGNATURE).unlink(missing_ok=True)
        return
    expires = time.time() + sending.valid_hours * 3600
    sign_order(
        model, resolve_path(sending.signing_key), settings=settings.settings_sha256, expires=expires, head=log_head()
    )
    log_entry(
        "ordered",
        round=manifest.round,
        facility=manifest.facility,
        run=run_of(manifest),
        model=manifest.content_sha256,
        manifest=sha256_of(model / NAME),
        expires=int(expires),
    )


def sign_order_or_warn(model: Path, settings: CoordinatorSettings) -> None:
    """Sign the order, in a step that must not fail: without a signature, facilities that want one refuse the round."""
    try:
        order(model, settings)
    except (CrossFedError, OSError) as error:
        log.error("the model cannot be signed: %s", error)
        emit("problem", text=f"the model cannot be signed: {error}")
