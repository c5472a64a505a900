"""Long texts in pieces, so that memory does not grow with the longest document; the ids stay the same.

A fast tokenizer keeps some 200 bytes for each character while it encodes a text. A text is therefore cut where the
tokenizer itself ends a word: there the ids of the whole are the ids of the left part followed by those of the right.
Every cut is verified on the characters around it: at white space, else at punctuation, for Chinese or Japanese text has
no white space. A tokenizer without a pre-tokenizer merges across words, so its texts stay whole, and so does text that
has neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

PIECE_CHARACTERS = 100_000
"""Texts up to this length are encoded whole."""
BATCH_CHARACTERS = 4 * PIECE_CHARACTERS
"""Characters that are given to the tokenizer at once, unless one piece is longer."""
WINDOW_CHARACTERS = 1_000
"""Characters on each side of a cut that are encoded to verify it."""
CANDIDATES = 20
"""Word ends that are tried before a piece is allowed to grow."""
WORD_ENDS = (re.compile(r"\S(?=\s)"), re.compile(r"\w(?=[^\w\s])|[^\w\s](?=\w)"))
"""Where a cut is looked for, first and second."""


def split_text(text: str, tokenizer: Any) -> list[str]:
    """Parts of the text whose ids, one part after the other, are the ids of the text."""
    if len(text) <= PIECE_CHARACTERS or tokenizer.pre_tokenizer is None:
        return [text]
    parts, start, target = [], 0, PIECE_CHARACTERS
    while target < len(text):
        cut = _last_cut(text, max(start, target - PIECE_CHARACTERS // 2), target, tokenizer)
        if cut is None:
            target += PIECE_CHARACTERS // 2
            continue
        parts.append(text[start:cut])
        start, target = cut, cut + PIECE_CHARACTERS
    return [*parts, text[start:]]


def encode_texts(texts: list[str], tokenizer: Any, *, special_tokens: bool) -> list[numpy.ndarray]:
    """The int32 ids of each text; with `special_tokens`, between those that the tokenizer adds by itself."""
    parts = [split_text(text, tokenizer) for text in texts]
    encoded = _encode(
        ((part, special_tokens and len(of_text) == 1) for of_text in parts for part in of_text), tokenizer
    )
    before, after = _special_tokens(tokenizer) if special_tokens else ([], [])
    rows = []
    for of_text in parts:
        ids = [next(encoded) for _ in of_text]
        if len(ids) > 1:
            ids = [numpy.array(before, numpy.int32), *ids, numpy.array(after, numpy.int32)]
        rows.append(numpy.concatenate(ids) if len(ids) > 1 else ids[0])
    return rows


def encode_with_offsets(text: str, tokenizer: Any) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The int32 ids of a text without special tokens around it, and where each begins and ends: a row of two."""
    ids, offsets, begin = [], [numpy.empty((0, 2), numpy.int64)], 0
    for part in split_text(text, tokenizer):
        found = tokenizer.encode(part, add_special_tokens=False)
        ids.append(numpy.array(found.ids, dtype=numpy.int32))
        offsets.append(numpy.array(found.offsets, dtype=numpy.int64).reshape(-1, 2) + begin)
        begin += len(part)
    return numpy.concatenate(ids), numpy.concatenate(offsets)


def enough_to_cut(texts: tuple[str, str], tokenizer: Any, tokens: int, side: str) -> tuple[str, str]:
    """A text, or a pair, of which a long one lacks what goes when both are cut to `tokens` from the end at `side`.

    Of a pair the longer text is cut first, so it stays the longer one; where both are long they stay whole.
    """
    first, second = texts
    if len(second) > PIECE_CHARACTERS:
        return (first, _enough(second, first, tokenizer, tokens, side)) if len(first) <= PIECE_CHARACTERS else texts
    return _enough(first, second, tokenizer, tokens, side), second


def _enough(text: str, other: str, tokenizer: Any, tokens: int, side: str) -> str:
    """Parts of a text that together have more than `tokens` tokens, and more than the other text."""
    parts = split_text(text, tokenizer)
    if len(parts) == 1:
        return text
    left = max(tokens, len(tokenizer.encode(other, add_special_tokens=False).ids))
    kept: list[str] = []
    while parts and left >= 0:
        kept.append(parts.pop() if side == "left" else parts.pop(0))
        left -= len(tokenizer.encode(kept[-1], add_special_tokens=False).ids)
    return "".join(reversed(kept) if side == "left" else kept)


def _encode(parts: Iterable[tuple[str, bool]], tokenizer: Any) -> Iterator[numpy.ndarray]:
    """Ids of each part, in order; True beside a part: with the special tokens around it."""
    for special_tokens, texts in _batches(parts):
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens):
            yield numpy.array(encoding.ids, dtype=numpy.int32)


def _batches(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[bool, list[str]]]:
    held: list[str] = []
    characters, kind = 0, False
    for text, special_tokens in parts:
        if held and (special_tokens != kind or characters + len(text) > BATCH_CHARACTERS):
            yield kind, held
            held, characters = [], 0
        kind = special_tokens
        held.append(text)
        characters += len(text)
    if held:
        yield kind, held


def _last_cut(text: str, low: int, high: int, tokenizer: Any) -> int | None:
    """The last verified cut in text[low:high]; None where none of the last word ends is one."""
    for word_end in WORD_ENDS:
        ends = [match.end() for match in word_end.finditer(text, low, high)]
        for end in reversed(ends[-CANDIDATES:]):
            if _separates(text, end, tokenizer):
                return end
    return None


def _separates(text: str, cut: int, tokenizer: Any) -> bool:
    """Whether the tokenizer ends a word at `cut`, and encodes both sides on their own as it does together."""
    left, right = text[max(0, cut - WINDOW_CHARACTERS) : cut], text[cut : cut + WINDOW_CHARACTERS]
    whole, first, second = (tokenizer.encode(t, add_special_tokens=False) for t in (left + right, left, right))
    if not first.ids or not second.ids or whole.ids != first.ids + second.ids:
        return False
    words = whole.word_ids
    return words[len(first.ids) - 1] != words[len(first.ids)]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer adds before and after a text."""
    alone = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    at = next(i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
    return whole[:at], whole[at + len(alone) :]
