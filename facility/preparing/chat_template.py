"""Chat templates: which one is used, its digest, and a conversation as text with the places that bear loss.

Templates are Jinja and come with a tokenizer, that is from elsewhere: transformers renders them in its immutable
sandbox (no attribute that begins with an underscore, no file, no import; ranges are bounded).

Where the answers lie in the text is known in one of two ways:

- the template marks them itself (`{% generation %} ... {% endgeneration %}`, transformers' own notation), or
- the conversation up to the answer, with the generation prompt, is a prefix of the whole, and what follows up to the
  end of that turn is the answer. Templates that rewrite earlier turns (those that drop the reasoning of all but the
  last answer) are refused for `all-turns`; `last-turn` still works with them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from facility.dataset import DatasetError
from facility.preparing.conversations import Conversation, Message

Loss = Literal["all-turns", "last-turn"]
Spans = list[tuple[int, int]]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLAIN = "none"
"""`--chat-template none`: prompt and completion as plain texts, whatever the tokenizer's template."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and what it is rendered with; picklable, so that worker processes can have it."""

    source: str
    """Jinja; empty: prompts and completions are plain texts."""
    origin: str
    """Where it comes from, for messages."""
    variables: dict[str, str]
    """bos_token and so on."""

    @property
    def sha256(self) -> str:
        """Digest of the template; empty where there is none."""
        return hashlib.sha256(self.source.encode()).hexdigest() if self.source else ""

    @property
    def marked(self) -> bool:
        """Does the template itself say where answers are?"""
        return MARKED.search(self.source) is not None

    def render(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """The text of these messages; `prompt`: with the beginning of the next answer. Raises `DatasetError`."""
        return self._render(messages, tools, prompt=prompt, spans=False)[0]

    def with_answers(self, conversation: Conversation, loss: Loss) -> tuple[str, Spans]:
        """The text of a conversation and the places of the answers that bear loss. Raises `DatasetError`."""
        wanted = conversation.answers if loss == "all-turns" else conversation.answers[-1:]
        messages, tools = conversation.messages, conversation.tools
        if self.marked and self._marks_just(conversation, wanted):
            return self._render(messages, tools, prompt=False, spans=True)
        text = self.render(messages, tools)
        return text, [self._answer(text, messages, tools, number) for number in wanted]

    def _marks_just(self, conversation: Conversation, wanted: list[int]) -> bool:
        """Are all answers wanted? A template's marks are not attributed to messages."""
        return wanted == [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]

    def _answer(self, text: str, messages: list[Message], tools: list[Any] | None, number: int) -> tuple[int, int]:
        """Where the answer `number` lies in the text of all messages."""
        before = self.render(messages[:number], tools, prompt=True) if number else ""
        history = self.render(messages[:number], tools) if number else ""
        begin = _common(before, text)
        # A generation prompt may end in what this answer does not repeat (an empty thought): the answer begins there.
        if begin < _common(before, history):
            raise DatasetError(
                f"the chat template of {self.origin} renders message {number} otherwise when others follow, so its "
                "place in the text is not known: give a --chat-template that marks answers with {% generation %}, or "
                "train on the last answer only (--loss last-turn)"
            )
        if number == len(messages) - 1:
            return begin, len(text)
        upto = self.render(messages[: number + 1], tools)
        if not text.startswith(upto):
            raise DatasetError(
                f"the chat template of {self.origin} renders the answer in message {number} otherwise when others "
                "follow: give a --chat-template that marks answers with {% generation %}, or train on the last answer "
                "only (--loss last-turn)"
            )
        return begin, len(upto)

    def _render(
        self, messages: list[Message], tools: list[Any] | None, *, prompt: bool, spans: bool
    ) -> tuple[str, Spans]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            values: dict[str, Any] = dict(self.variables)
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=spans,
                add_generation_prompt=prompt,
                **values,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise DatasetError(
                f"the chat template of {self.origin} refuses a conversation with the roles "
                f"{', '.join(message['role'] for message in messages)}: {str(error).splitlines()[0]:.200}"
            ) from None
        texts, found = rendered
        return texts[0], [(begin, end) for begin, end in found[0]] if spans else []


def _common(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    return next(i for i, (a, b) in enumerate(zip(one + "\0", other + "\1", strict=False)) if a != b)


def chat_template_of(tokenizer: Any, directory: Path, given: str | None) -> ChatTemplate:
    """The tokenizer's own template, the file `given`, or none at all. Raises `DatasetError`."""
    variables = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    if given == PLAIN:
        return ChatTemplate(source="", origin="no template", variables={})
    if given is not None:
        try:
            return ChatTemplate(source=Path(given).read_text(encoding="utf-8"), origin=given, variables=variables)
        except (OSError, UnicodeDecodeError) as error:
            raise DatasetError(f"--chat-template {given} cannot be read: {error}") from None
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    return ChatTemplate(source=own or "", origin=f"the tokenizer in {directory}", variables=variables)
