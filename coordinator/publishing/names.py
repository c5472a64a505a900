"""What facilities are called in a publication: by name where they agree, else by a number."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.config.federation import Federation


def public_names(federation: Federation) -> dict[str, str]:
    """Published name by name, in the order of federation.yml."""
    return {
        one.name: one.name if one.public.named else f"facility {number}"
        for number, one in enumerate(federation.facilities, start=1)
    }


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Text in which every facility has its published name: long names first, so that none is a part of another."""
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    return text
