"""Conversations to token ids, and which of them bear loss.

What the template writes is read as the tokenizer reads it: special tokens become their ids. What stands in a message
stays text, also where it spells a special token, so that no message can end a turn or begin another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from facility.dataset import DatasetError
from facility.preparing.chat_template import ChatTemplate, Loss, Spans, chat_template_of
from facility.preparing.conversations import Conversation, from_json
from facility.preparing.pieces import encode_with_offsets

PLANES = (0xF0000, 0x100000)
"""First characters of the private planes: a special token spelled in a message is one of these while it is rendered."""


@dataclass(frozen=True, kw_only=True)
class ChatEncoding:
    """How conversations become ids."""

    template: ChatTemplate
    loss: Loss
    end: str
    """Text of the token that ends a plain completion."""


def chat_encoding(tokenizer: Any, directory: Path, given: str | None, loss: Loss) -> ChatEncoding:
    """How a tokenizer encodes conversations. Raises `DatasetError` where it cannot."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DatasetError(
            f"the tokenizer in {directory} has no tokenizer.json: where answers lie among the ids is known of fast "
            "tokenizers only; save it with a transformers that converts it"
        )
    template = chat_template_of(tokenizer, directory, given)
    if not template.source and tokenizer.eos_token is None:
        raise DatasetError(
            f"the tokenizer in {directory} has neither a chat template nor an eos token to end an answer: give "
            "--chat-template FILE, or set eos_token in tokenizer_config.json"
        )
    return ChatEncoding(template=template, loss=loss, end=tokenizer.eos_token or "")


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """One conversation."""

    ids: numpy.ndarray
    """int32."""
    loss: numpy.ndarray
    """uint8: 1 where the token is to be predicted."""


class ChatEncoder:
    """Encodes conversations with a fast tokenizer (`tokenizers`), given as its JSON."""

    def __init__(self, backend: str, encoding: ChatEncoding) -> None:
        from tokenizers import Tokenizer

        self.encoding = encoding
        self.reads, self.spells = Tokenizer.from_str(backend), Tokenizer.from_str(backend)
        for tokenizer in (self.reads, self.spells):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        tokens = self.reads.get_added_tokens_decoder()
        marks = encoding.template.marks_of_turns([one.content for one in tokens.values() if not one.special])
        self.special = {number: one.content for number, one in tokens.items() if one.special or one.content in marks}
        self.spellings = sorted(set(self.special.values()) - {""}, key=len, reverse=True)
        self.spells.add_special_tokens(marks)
        self.spells.add_tokens([self._behind(plane) for plane in PLANES])
        self.spells.encode_special_tokens = True  # what spells a special token stays text
        self.in_json = {form for one in self.spellings for form in (one, json.dumps(one, ensure_ascii=False)[1:-1])}

    def __call__(self, text: str) -> list[EncodedChat]:
        """Encode a conversation as `Conversation.to_json` wrote it; a pair of answers gives two.

        Raises `DatasetError`.
        """
        conversation = from_json(text)
        if not conversation.rejected:
            return [self._one(conversation, text)]
        return [self._one(side, text) for side in (conversation, conversation.other)]

    def _one(self, conversation: Conversation, text: str) -> EncodedChat:
        if not self.encoding.template.source:
            return self._plain(conversation)
        plane = self._plane(text)
        shielded = conversation if plane is None else _mapped(conversation, lambda t: self._shield(t, plane or 0))
        rendered, spans = self.encoding.template.with_answers(shielded, self.encoding.loss)
        return self._encode(rendered, spans, plane)

    def _plain(self, conversation: Conversation) -> EncodedChat:
        """Prompt and completion one after the other; the completion and the end token bear loss."""
        if conversation.texts is None:
            raise DatasetError(
                "the data hold messages, and there is no chat template to put them into words (the tokenizer has none, "
                "or --chat-template is none): give --chat-template FILE, or a tokenizer with chat_template.jinja"
            )
        if len(conversation.messages) > 2 or conversation.tools:
            what = "tools" if conversation.tools else f"the {conversation.messages[0]['role']} message"
            raise DatasetError(
                f"plain prompts and completions have no place for {what} of a record: "
                "give a chat template, or put it into the prompt"
            )
        prompt, completion = conversation.texts
        body = self.spells.encode(prompt + completion, add_special_tokens=True)
        begin = len(prompt)
        ids = list(body.ids)
        pairs = zip(body.offsets, body.special_tokens_mask, strict=True)
        loss = [not added and last > begin for (_, last), added in pairs]
        end = self.reads.token_to_id(self.encoding.end)
        assert end is not None, "a tokenizer knows its own eos token"
        if ids[-1:] != [end]:
            ids, loss = [*ids, end], [*loss, True]
        else:
            loss[-1] = True
        return _encoded(ids, loss)

    def _plane(self, text: str) -> int | None:
        """The private plane to use, where a message spells a special token; None where none does."""
        if not any(spelling in text for spelling in self.in_json):
            return None
        for plane in PLANES:
            if not any(plane <= ord(character) <= plane + len(self.spellings) for character in text):
                return plane
        raise DatasetError(
            "a conversation holds characters of both private planes of Unicode beside special tokens; leave it out"
        )

    def _behind(self, plane: int) -> str:
        """A token to stand before a part of a text that is not its beginning: some tokenizers put a space there."""
        return chr(plane + len(self.spellings))

    def _shield(self, text: str, plane: int) -> str:
        for number, spelling in enumerate(self.spellings):
            text = text.replace(spelling, chr(plane + number))
        return text

    def _encode(self, text: str, spans: Spans, plane: int | None) -> EncodedChat:
        found, offsets = encode_with_offsets(text, self.reads)
        bears = numpy.zeros(len(text), dtype=bool)
        for begin, end in spans:
            bears[begin:end] = True
        if plane is None:
            return _encoded(found, _touching(offsets, bears))
        ids: list[numpy.ndarray] = []
        loss: list[numpy.ndarray] = []
        begin = 0
        special = numpy.flatnonzero(numpy.isin(found, list(self.special)))
        ends = [(*offsets[place].tolist(), found[[place]]) for place in special]
        for first, last, number in [*ends, (len(text), len(text), found[:0])]:
            spelled, marked = self._spelled(text[begin:first], bears[begin:first], plane, behind=begin > 0)
            ids += [spelled, number]
            loss += [marked, numpy.full(len(number), bears[first:last].any())]
            begin = last
        return _encoded(numpy.concatenate(ids), numpy.concatenate(loss))

    def _spelled(
        self, part: str, bears: numpy.ndarray, plane: int, *, behind: bool
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Ids and loss of a part without special tokens, its shielded ones spelled out; `behind`: a token stands before
        it."""
        pieces = [self._behind(plane) * behind, *(self._spelling(character, plane) for character in part)]
        flags = numpy.repeat(numpy.concatenate([[False], bears]), [len(piece) for piece in pieces])
        ids, offsets = encode_with_offsets("".join(pieces), self.spells)
        return ids[behind:], _touching(offsets, flags)[behind:]

    def _spelling(self, character: str, plane: int) -> str:
        number = ord(character) - plane
        return self.spellings[number] if 0 <= number < len(self.spellings) else character


def _touching(offsets: numpy.ndarray, bears: numpy.ndarray) -> numpy.ndarray:
    """Which tokens hold a character that bears loss; white space that a tokenizer trims from its offsets counts."""
    begins, ends = offsets.T
    before = numpy.concatenate([[0], numpy.cumsum(bears)])
    return before[ends] > before[numpy.minimum(begins, numpy.concatenate([[0], ends])[:-1])]


def _encoded(ids: Any, loss: Any) -> EncodedChat:
    return EncodedChat(ids=numpy.asarray(ids, dtype=numpy.int32), loss=numpy.asarray(loss, dtype=numpy.uint8))


def _mapped(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    """The conversation with every text of its messages and tools changed, keys too."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [walk(one) for one in value]
        return {change(key): walk(one) for key, one in value.items()} if isinstance(value, dict) else value

    messages = [{"role": m["role"]} | {k: walk(v) for k, v in m.items() if k != "role"} for m in conversation.messages]
    return Conversation(
        messages=messages,
        answers=conversation.answers,
        tools=walk(conversation.tools),
        texts=conversation.texts,
        rejected=conversation.rejected,
    )
