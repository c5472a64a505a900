"""Chat templates: which one is used, its digest, and a conversation as text with the places that bear loss.

Templates are Jinja and come with a tokenizer, that is from elsewhere: transformers renders them in its immutable
sandbox (no attribute that begins with an underscore, no file, no import; ranges are bounded).

Where the answers lie in the text is known in one of two ways:

- the template marks them itself (`{% generation %} ... {% endgeneration %}`, transformers' own notation), or
- the conversation up to the answer, with the generation prompt, is a prefix of the whole, and what follows up to the
  end of that turn is the answer. Templates that rewrite earlier turns (those that drop the reasoning of all but the
  last answer) are refused for `all-turns`; `last-turn` still works with them. An end-of-text token that a template
  writes after the last message only (Phi-3) is not part of an earlier turn.

What templates expect differs in two points, each found by trying: the content of a message is a text or a list of parts
(templates of models that see images), and arguments of a tool call are an object or JSON text (DeepSeek).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from facility.dataset import DatasetError
from facility.exchange.errors import InputError, first_line
from facility.exchange.files.bounded import read_bounded
from facility.preparing.bounded_call import TooMuch, bounded_resources
from facility.preparing.conversations import Conversation, Message

Loss = Literal["all-turns", "last-turn"]
Spans = list[tuple[int, int]]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY = re.compile(r"""\bstrftime_now\(\s*(['"])([^'"\\]*)\1\s*\)""")
DAY = datetime.date(2024, 7, 26)
"""Llama's own, for those who know no date."""
PROBE = "qvzxq"
"""What no message says."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What the thought before an answer is called in data; a template knows one or two of the names."""
MOST_CHANCE = 20
"""Characters of a text that may stand in another by chance."""
MOST_TEMPLATE = 1 << 20
"""Bytes of a file with a chat template."""
PLAIN = "none"
"""`--chat-template none`: prompt and completion as plain texts, whatever the tokenizer's template."""


class EndlessTemplate(InputError):
    """A template that is not tried again with another form of the conversation: each trial takes a minute."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and what it is rendered with; picklable, so that worker processes can have it."""

    source: str
    """Jinja; empty: prompts and completions are plain texts."""
    origin: str
    """Where it comes from, for messages."""
    variables: dict[str, str]
    """bos_token and so on."""
    with_tools: str = ""
    """Jinja of conversations with tools, where the tokenizer has one of its own for them (`tool_use`)."""
    in_parts: bool = False
    """True if the content of a message is a list of parts."""

    @property
    def sha256(self) -> str:
        """Digest of the template; empty where there is none."""
        if self.with_tools:
            return hashlib.sha256(json.dumps([self.source, self.with_tools]).encode()).hexdigest()
        return hashlib.sha256(self.source.encode()).hexdigest() if self.source else ""

    def source_for(self, tools: list[Any] | None) -> str:
        """The template of a conversation, as transformers chooses it."""
        return self.with_tools if self.with_tools and tools is not None else self.source

    def render(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """The text of these messages; `prompt`: with the beginning of the next answer. Raises `DatasetError`."""
        return self._render(messages, tools, prompt=prompt, spans=False)[0]

    def with_answers(self, conversation: Conversation, loss: Loss) -> tuple[str, Spans]:
        """The text of a conversation up to its last answer that bears loss, and the places of those that do.

        Raises `DatasetError`.
        """
        wanted = conversation.answers if loss == "all-turns" else conversation.answers[-1:]
        messages, tools = conversation.messages[: wanted[-1] + 1], conversation.tools
        text = self.render(messages, tools)
        self._check_said(messages, tools, wanted, text)
        if MARKED.search(self.source_for(tools)) and self._marks_just(messages, wanted):
            text, spans = self._render(messages, tools, prompt=False, spans=True)
        else:
            spans = [self._answer(text, messages, tools, number) for number in wanted]
        self._check_calls([messages[number] for number in wanted], "".join(text[begin:end] for begin, end in spans))
        return text, spans

    def marks_of_turns(self, tokens: list[str]) -> list[str]:
        """The `tokens`, none of them special, by which the template begins or ends a turn (as DeepSeek's does)."""
        if not (self.source and tokens):
            return []
        question: list[Message] = [{"role": "user", "content": PROBE}]
        try:
            asked, prompted = (self.render(question, None, prompt=prompt) for prompt in (False, True))
        except DatasetError:
            return []
        prompt = prompted.removeprefix(asked)
        return [one for one in tokens if len(one.strip()) > 2 and (one in asked or prompt.startswith(one))]

    def _check_said(self, messages: list[Message], tools: list[Any] | None, wanted: list[int], text: str) -> None:
        """Refuse a template that leaves out tools, or what a message says; of answers, those that bear loss.

        Thoughts are asked of the last answer: a template may drop those of earlier turns.
        """

        def lost(number: int, key: str) -> bool:
            said = messages[number].get(key)
            if not isinstance(said, str) or not said.strip() or (len(said) > MOST_CHANCE and said.strip() in text):
                return False
            changed = [*messages[:number], messages[number] | {key: PROBE}, *messages[number + 1 :]]
            return self._gives(changed, tools, text)

        asked = [n for n, message in enumerate(messages) if message["role"] != "assistant" or n in wanted]
        found = [(n, "content") for n in asked if lost(n, "content")]
        thoughts = [(len(messages) - 1, key) for key in THOUGHTS if messages[-1].get(key)]
        found += thoughts * all(lost(*thought) for thought in thoughts)
        for number, key in found:
            raise DatasetError(
                f"the chat template of {self.origin} leaves out the {key} of message {number} "
                f"({messages[number]['role']}): give a --chat-template that writes it, take it out of the records, or "
                "leave these conversations out"
            )
        if tools is not None and self._gives(messages, None, text):
            raise DatasetError(
                f"the chat template of {self.origin} leaves out the tools of a conversation: give a --chat-template "
                "that writes them, or records without `tools`"
            )

    def _gives(self, messages: list[Message], tools: list[Any] | None, text: str) -> bool:
        """True if these messages are rendered as this text."""
        try:
            return self.render(messages, tools) == text
        except DatasetError:
            return False

    def _check_calls(self, answers: list[Message], written: str) -> None:
        """Refuse a template that leaves calls out: such an answer would teach to say nothing."""
        for answer in answers:
            for call in answer.get("tool_calls") or ():
                name = (call.get("function") or call).get("name")
                if isinstance(name, str) and name not in written:
                    raise DatasetError(
                        f"the chat template of {self.origin} leaves out the call of the tool {name!r}: give a "
                        "--chat-template that writes tool calls, or leave these conversations out"
                    )

    def _marks_just(self, messages: list[Message], wanted: list[int]) -> bool:
        """True if all answers are wanted; a template's marks are not attributed to messages."""
        return wanted == [n for n, message in enumerate(messages) if message["role"] == "assistant"]

    def _answer(self, text: str, messages: list[Message], tools: list[Any] | None, number: int) -> tuple[int, int]:
        """Where the answer `number` lies in the text of all messages."""
        before = self._prompt(messages[:number], tools)
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
            upto = self._without_closing(upto, history, before, self.render(messages[: number + 1], tools, prompt=True))
        if not upto or not text.startswith(upto):
            raise DatasetError(
                f"the chat template of {self.origin} renders the answer in message {number} otherwise when others "
                "follow: give a --chat-template that marks answers with {% generation %}, or train on the last answer "
                "only (--loss last-turn)"
            )
        return begin, len(upto)

    def _prompt(self, messages: list[Message], tools: list[Any] | None) -> str:
        """What stands before the next answer; of no messages nothing, where a template cannot begin with an answer."""
        try:
            return self.render(messages, tools, prompt=True)
        except DatasetError:
            if messages:
                raise
            return ""

    def _without_closing(self, upto: str, history: str, before: str, prompted: str) -> str:
        """A turn's text without the end-of-text token that closes the whole; empty where it closes the turn.

        It closes the whole where a generation prompt takes its place, the same behind a question and behind an answer.
        `before`, `prompted`: the texts `history` and `upto` with a generation prompt.
        """
        closing = self.variables.get("eos_token", "")
        asked, turn = history.removesuffix(closing), upto.removesuffix(closing)
        prompt = before[len(asked) :]
        return turn if closing and prompt and before.startswith(asked) and prompted == turn + prompt else ""

    def _render(
        self, messages: list[Message], tools: list[Any] | None, *, prompt: bool, spans: bool
    ) -> tuple[str, Spans]:
        """Render; where that fails with the arguments of tool calls as objects, with them as JSON text."""
        if self.in_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            return self._rendered(messages, tools, prompt=prompt, spans=spans)
        except DatasetError:
            written = [_with_written_arguments(message) for message in messages]
            if written == messages:
                raise
            return self._rendered(written, tools, prompt=prompt, spans=spans)

    def _rendered(
        self, messages: list[Message], tools: list[Any] | None, *, prompt: bool, spans: bool
    ) -> tuple[str, Spans]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            values: dict[str, Any] = dict(self.variables)
            with bounded_resources():
                rendered: Any = render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=dated(self.source_for(tools)),
                    return_assistant_tokens_mask=spans,
                    add_generation_prompt=prompt,
                    **values,
                )
        except TooMuch as error:
            raise EndlessTemplate(
                f"the chat template of {self.origin} cannot be used: {error} for a conversation with the roles "
                f"{', '.join(message['role'] for message in messages)}; give --chat-template FILE"
            ) from None
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
                f"{', '.join(message['role'] for message in messages)}: {first_line(error):.200}"
            ) from None
        texts, found = rendered
        return texts[0], [(begin, end) for begin, end in found[0]] if spans else []


def dated(source: str) -> str:
    """The template with a fixed day where it asks for today's (Llama 3.2, gpt-oss): blocks depend neither on when a
    facility prepares them nor on an interruption."""
    return TODAY.sub(lambda found: json.dumps(DAY.strftime(found[2])), source)


def _common(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    return next(i for i, (a, b) in enumerate(zip(one + "\0", other + "\1", strict=False)) if a != b)


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_written_arguments(message: Message) -> Message:
    """The message with objects among the arguments of its tool calls as JSON text, which is how OpenAI writes them."""

    def written(call: Any) -> Any:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return call
        return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    calls = message.get("tool_calls")
    return message | {"tool_calls": [written(call) for call in calls]} if isinstance(calls, list) else message


def chat_template_of(tokenizer: Any, directory: Path, given: str | None) -> ChatTemplate:
    """The tokenizer's own template, the file `given`, or none at all. Raises `DatasetError`."""
    variables = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    if given == PLAIN:
        return ChatTemplate(source="", origin="no template", variables={})
    if given is not None:
        try:
            source, origin, with_tools = read_bounded(given, MOST_TEMPLATE).decode(), given, ""
        except (OSError, UnicodeDecodeError) as error:
            raise DatasetError(f"--chat-template {given} cannot be read: {error}") from None
    else:
        own = tokenizer.chat_template or ""
        named = own if isinstance(own, dict) else {"default": own}
        source, origin = named.get("default", ""), f"the tokenizer in {directory}"
        with_tools = named.get("tool_use", "")
        if named and not source and any(named.values()):
            raise DatasetError(
                f"{origin} has chat templates named {', '.join(sorted(named))} and none named default: give "
                "--chat-template FILE"
            )
    template = ChatTemplate(source=source, origin=origin, variables=variables, with_tools=with_tools)
    return _that_writes_contents(template) if source else template


def _that_writes_contents(template: ChatTemplate) -> ChatTemplate:
    """The template, given contents as it writes them. Raises `DatasetError` where it writes neither form.

    A template that goes through the parts of a content finds none in a text, and leaves the message empty.
    """
    asked, answered = PROBE, PROBE[::-1]
    probe: list[Message] = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    tried = (template, replace(template, in_parts=True))
    silent = 0
    for one in tried:
        try:
            text = one.render(probe, None)
        except DatasetError:
            continue  # it may ask for other roles, or refuse this form
        if asked in text and answered in text:
            return one
        silent += 1
    if silent:
        raise DatasetError(
            f"the chat template of {template.origin} leaves out what messages say, as text and as a list of parts: "
            "give another --chat-template"
        )
    return template
