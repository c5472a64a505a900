"""Whether a model and its settings may be trained here: as the gate approved them, as the coordinator signed them."""

from __future__ import annotations

import os
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.messages.manifest import NAME, sha256_of
from facility.exchange.messages.order import SIGNERS, verify_order
from facility.rounds.job import Job


def check_order(job: Job) -> None:
    """Raise `InputError` unless this model and these settings may be trained here, before any work is done."""
    model, settings = job.arguments.model, job.arguments.settings
    if job.arguments.approved and job.arguments.approved != [sha256_of(model / NAME), sha256_of(settings)]:
        raise InputError("model or settings are not those that this facility's gate approved: exchanged while waiting")
    if signers := os.environ.get(SIGNERS):
        verify_order(
            model,
            settings,
            federation=job.settings.federation,
            facility=job.settings.facility,
            round=job.round,
            rounds=job.settings.rounds,
            allowed_signers=Path(signers),
        )
