"""Deployments as a federation file describes them, without the file."""

from __future__ import annotations

from typing import Any

from coordinator.config.deployments import Deployment
from facility.exchange.validation import parse_dataclass


def read_deployment(raw: dict[str, Any], where: str) -> Deployment:
    """Raises `ConfigurationError` with the key below `where`."""
    return parse_dataclass(Deployment, raw, where=where)
