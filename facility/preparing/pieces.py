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

from facility.exchange.errors import InputError

Ids = numpy.ndarray
"""Token ids, int32."""

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


def encode_texts(texts: list[str], tokenizer: Any, *, wrapped: bool) -> list[Ids]:
    """The int32 ids of each text; `wrapped`, between those that the tokenizer adds by itself."""
    parts = [split_text(text, tokenizer) for text in texts]
    encoded = _encode(((part, wrapped and len(of_text) == 1) for of_text in parts for part in of_text), tokenizer)
    before, _, after = special_tokens(tokenizer, pair=False) if wrapped else ([], [], [])
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


def cut_pair(first: Ids, second: Ids, tokens: int, side: str) -> tuple[Ids, Ids]:
    """The ids of two texts, cut to `tokens` together from the end at `side`; a single text has an empty second one.

    As tokenizers and transformers cut with the strategy `longest_first`: the longer text to the length of the other,
    then both to half. An odd token is left to the longer one, and to the second where both are as long.
    """
    if len(first) + len(second) <= tokens:
        return first, second
    shorter = min(len(first), len(second), tokens // 2)
    kept = (tokens - shorter, shorter) if len(first) > len(second) else (shorter, tokens - shorter)
    if side == "left":
        return first[len(first) - kept[0] :], second[len(second) - kept[1] :]
    return first[: kept[0]], second[: kept[1]]


def special_tokens(tokenizer: Any, *, pair: bool) -> tuple[list[int], list[int], list[int]]:
    """Ids that the tokenizer adds before a text, between the two of a pair, and after."""
    text = next((t for t in ("a", *tokenizer.get_vocab()) if tokenizer.encode(t, add_special_tokens=False).ids), "a")
    alone = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.encode(text, text if pair else None, add_special_tokens=True)
    ids, places = whole.ids, [place for place, sequence in enumerate(whole.sequence_ids) if sequence is not None]
    begin, end = (places[0], places[-1] + 1) if places else (0, 0)
    between = ids[begin + len(alone) : end - len(alone)] if pair else []
    before, after = ids[:begin], ids[end:]
    if ids != [*before, *alone, *between, *(alone if pair else []), *after]:
        raise InputError(
            "the tokenizer does not keep the ids of texts as they are between its special tokens: "
            f"{text!r} has the ids {alone}, and {'twice, as a pair' if pair else 'with special tokens'}, {ids}"
        )
    return before, between, after


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
