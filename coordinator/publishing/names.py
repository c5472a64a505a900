"""What facilities are called in a publication: by name where they agree, else by a number."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from coordinator.config.federation import Federation


def public_names(federation: Federation, seen: Iterable[str]) -> dict[str, str]:
    """Published name by name, in the order of federation.yml, then of those that were `seen` and have left it: these
    are not named. No number makes the name of another facility."""
    named = {one.name: one.public.named for one in federation.facilities}
    named |= {name: False for name in seen if name not in named}
    taken = {name.lower() for name in named}
    numbers = (number for number in itertools.count(1) if slug(f"facility {number}") not in taken)
    return {
        name: name if agrees else f"facility {number}"
        for (name, agrees), number in zip(named.items(), numbers, strict=False)
    }


def slug(name: str) -> str:
    """The form of a published name in file names and identifiers."""
    return name.replace(" ", "-")


LONGEST_PART = 60
"""Characters of a name within an identifier."""


def identifier(kind: str, name: str, others: Mapping[str, str]) -> str:
    """`#KIND-NAME` for a name of any letters and length, in letters that a URI takes (RFC 3986, section 2.3).

    `others`: names by identifiers that are in use. A name that loses something, or whose identifier another one has,
    carries a part of its digest.
    """
    plain = re.sub(r"[^A-Za-z0-9._~-]+", "-", name).strip("-")[:LONGEST_PART]
    made = f"#{kind}-{plain}"
    if plain == slug(name) and others.get(made, name) == name:
        return made
    return f"{made}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def address(text: str) -> str:
    """A URI with whatever may not stand in one percent-encoded (RFC 3986, section 2.1)."""
    return quote(text, safe=":/?#[]@!$&'()*+,;=%~")


SHORT = 4
"""Characters of a name that many words contain: it is replaced where it stands alone, longer ones everywhere."""


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Text in which every facility has its published name: long names first, so that none is a part of another."""
    if not names:
        return text
    parts = [_pattern(name) for name in sorted(names, key=len, reverse=True)]
    return re.sub("|".join(parts), lambda found: names[found[0]], text)


def _pattern(name: str) -> str:
    literal = re.escape(name)
    return rf"(?<![A-Za-z0-9]){literal}(?![A-Za-z0-9])" if len(name) <= SHORT else literal
