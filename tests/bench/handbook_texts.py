"""Text in further languages for `federated_quality.py --data`: translations of the Debian Administrator's Handbook.

    apt-get install debian-handbook
    python tests/bench/handbook_texts.py --out DIR --copy ../shared/data/de ../shared/data/fr

Reads the HTML of Debian's package (Hertzog and Mas; GPL 2 or later, CC BY-SA 3.0), leaves out what was not translated,
and writes LANGUAGE/train.jsonl and validation.jsonl of about 500,000 characters for each language of 400,000 or more:
documents of whole paragraphs, one in twelve for validation. `--copy`: languages of another source in their place.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

HTML = Path("/usr/share/doc/debian-handbook/html")
ORIGINAL = "en-US"
LEAST, MOST = 400_000, 540_000
"""Characters of a language."""
DOCUMENT = 1500
"""Characters after which a document ends with its paragraph."""
SHORTEST = 80
"""Characters of a paragraph: not a heading, a caption or a menu."""
VALIDATION = 12


class Paragraphs(HTMLParser):
    """The paragraphs of a page, without markup."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        begins = tag == "p" or (tag == "div" and ("class", "para") in attrs)
        if begins or tag in ("div", "pre", "h2", "h3", "table", "ul"):
            self.end()
        if begins:
            self.open = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("div", "p"):
            self.end()

    def handle_data(self, data: str) -> None:
        if self.open is not None:
            self.open.append(data)

    def end(self) -> None:
        text = re.sub(r"\s+", " ", "".join(self.open or ())).strip()
        if len(text) > SHORTEST:
            self.found.append(text)
        self.open = None


def paragraphs_of(language: Path) -> list[str]:
    """Each paragraph once, in the order of the pages."""
    found: dict[str, None] = {}
    for file in sorted(language.glob("*.html")):
        page = Paragraphs()
        page.feed(file.read_text(errors="replace"))
        found.update(dict.fromkeys(page.found))
    return list(found)


def documents(paragraphs: list[str]) -> Iterator[str]:
    text = ""
    for one in paragraphs:
        text += one + "\n"
        if len(text) > DOCUMENT:
            yield text
            text = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", type=Path, default=HTML, help=f"pages by language (default {HTML})")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--copy", type=Path, nargs="*", default=[], metavar="LANGUAGE", help="such folders to copy")
    options = parser.parse_args()
    original = set(paragraphs_of(options.html / ORIGINAL))
    for language in sorted(options.html.iterdir()):
        translated = [one for one in paragraphs_of(language) if one not in original]
        if language.name == ORIGINAL or sum(map(len, translated)) < LEAST:
            continue
        found = list(documents(translated))
        random.Random(0).shuffle(found)
        taken, characters = [], 0
        while found and characters <= MOST:
            taken.append(found.pop(0))
            characters += len(taken[-1])
        out, cut = options.out / language.name[:2], len(taken) // VALIDATION
        out.mkdir(parents=True, exist_ok=True)
        for name, part in (("validation", taken[:cut]), ("train", taken[cut:])):
            lines = [json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in part]
            (out / f"{name}.jsonl").write_text("".join(lines))
        print(json.dumps({"language": language.name, "documents": len(taken), "characters": characters}))
    for language in options.copy:
        shutil.rmtree(options.out / language.name, ignore_errors=True)
        shutil.copytree(language, options.out / language.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
