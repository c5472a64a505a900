"""Conversations in the shapes of public data sets, brought to one: messages with roles, and which of them answer.

    {"messages": [{"role", "content", ...}], "tools": [...]}            OpenAI, TRL
    {"conversations": [{"from", "value"}], "system": "..."}             ShareGPT
    {"prompt": ..., "completion": ...}                                  texts, or lists of messages
    {"instruction": "...", "input": "...", "output": "..."}             Alpaca; "history": [[question, answer], ...]

A record of another shape is an error that names the shapes; nothing is guessed from the values.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from facility.dataset import DatasetError
from facility.exchange.json_text import parse_values
from facility.preparing.said_of_records import kind_of, name_of, names_in

Message = dict[str, Any]
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
    "ipython": "ipython",
}
"""What a role is called in data -> the name that chat templates know."""
FIELDS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "response",
    "chosen",
    "rejected",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "tools",
)
"""Fields that a conversation may be read from."""
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
"""Keys of a message that templates read, beside role and content."""
SURROGATE = re.compile("[\\ud800-\\udfff]")
MOST_NESTED = 100
"""Objects within each other, of a tool's schema or a call's arguments."""
SHAPES = (
    "`messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `completion`, or `instruction` and `output` (Alpaca)"
)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order, and those that the model is to learn."""

    messages: list[Message]
    answers: list[int]
    """Indices of the messages that bear loss."""
    tools: list[Any] | None = None
    """JSON schemas of the functions that may be called."""
    texts: tuple[str, str] | None = None
    """Prompt and completion as plain texts, where the record holds those and not messages."""
    rejected: list[Message] = field(default_factory=list)
    """Preferences only: the messages with the answer that was rejected."""
    rejected_texts: tuple[str, str] | None = None
    """Prompt and rejected completion as plain texts, where the record holds those and not messages."""

    @property
    def other(self) -> Conversation:
        """The conversation with the answer that was rejected."""
        answers = [n for n in self.answers if n < len(self.rejected)] or [len(self.rejected) - 1]
        return Conversation(messages=self.rejected, answers=answers, tools=self.tools, texts=self.rejected_texts)

    def to_json(self) -> str:
        """The same conversation gives the same text; empty where nothing is to be learnt.

        Keys of tools and of arguments keep their order: templates write them as they come.
        """
        if not self.answers:
            return ""
        return json.dumps(
            [self.messages, self.answers, self.tools, self.texts, self.rejected, self.rejected_texts],
            ensure_ascii=False,
        )


def from_json(text: str) -> Conversation:
    """The conversation that `Conversation.to_json` wrote."""
    messages, answers, tools, texts, rejected, rejected_texts = json.loads(text)
    return Conversation(
        messages=messages,
        answers=answers,
        tools=tools,
        texts=(texts[0], texts[1]) if texts else None,
        rejected=rejected,
        rejected_texts=(rejected_texts[0], rejected_texts[1]) if rejected_texts else None,
    )


def preference_of(record: Any, place: str) -> Conversation:
    """Read one pair of answers: `chosen` and `rejected`, with `prompt` or beginning alike. Raises `DatasetError`."""
    if not isinstance(record, dict) or record.get("chosen") is None or record.get("rejected") is None:
        raise DatasetError(f"{place}: found {kind_of(record)}, expected an object with chosen, rejected and prompt")
    prompt, sides = record.get("prompt"), [record["chosen"], record["rejected"]]
    if prompt is not None and all(isinstance(side, list) for side in sides):
        prompt, sides = _prompted(prompt, sides, place)
    if prompt is None:
        if not all(isinstance(side, list) for side in sides):
            raise DatasetError(f"{place}: no field 'prompt', and chosen and rejected are no lists of messages")
        alike = next((n for n, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
        prompt, sides = sides[0][:alike], [side[alike:] for side in sides]
    held = {name: record.get(name) for name in ("system", "tools")}
    chosen, rejected = (conversation_of(held | {"prompt": prompt, "completion": side}, place) for side in sides)
    if not chosen.answers or not rejected.answers:
        return dataclasses.replace(chosen, answers=[])
    return dataclasses.replace(chosen, rejected=rejected.messages, rejected_texts=rejected.texts)


def _prompted(prompt: Any, sides: list[Any], place: str) -> tuple[Any, list[Any]]:
    """Prompt and answers, where the answers are messages that may hold the prompt themselves.

    UltraFeedback and others have a `prompt` beside whole conversations: it would be asked twice. None as the prompt:
    the sides are whole. Raises `DatasetError` where it is not known what a text beside whole conversations is.
    """
    if isinstance(prompt, list):
        held = bool(prompt) and all(side[: len(prompt)] == prompt for side in sides)
        return (None if held else prompt), sides
    first = [side[0] if side and isinstance(side[0], dict) else {} for side in sides]
    if any(ROLES.get(str(one.get("role", one.get("from"))).lower()) == "assistant" for one in first):
        return prompt, sides
    asked = [one.get("content", one.get("value")) for side in sides for one in side if isinstance(one, dict)]
    if isinstance(prompt, str) and prompt.strip() and asked.count(prompt) < len(sides):
        raise DatasetError(
            f"{place}: chosen and rejected are whole conversations, and none of their messages is the text in "
            "prompt: leave it out, or give it as a list of messages that come before them"
        )
    return None, sides


def conversation_of(record: Any, place: str) -> Conversation:
    """Read one record; `place` says where it lies. Raises `DatasetError`."""
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: found {kind_of(record)}, expected an object with {SHAPES}")
    held = {name: value for name, value in record.items() if value is not None}
    tools = _tools(held.get("tools"), place)
    opening = _system(held, place)
    if "messages" in held or "conversations" in held:
        raw = held.get("messages", held.get("conversations"))
        messages, weights = _messages(raw, place)
        if opening and messages and messages[0]["role"] != "system":
            messages, weights = [*opening, *messages], [1, *weights]
        return Conversation(messages=messages, answers=_answers(messages, weights), tools=tools)
    if "prompt" in held and ("completion" in held or "response" in held):
        completion = held.get("completion", held.get("response"))
        return _completed(held["prompt"], completion, opening, tools, place)
    if "instruction" in held and "output" in held:
        asked = _text(held["instruction"], "instruction", place)
        if (more := _text(held.get("input", ""), "input", place)).strip():
            asked = f"{asked}\n\n{more}"
        if history := _history(held.get("history"), place):
            answer = {"role": "assistant", "content": _text(held["output"], "output", place)}
            messages = [*opening, *history, {"role": "user", "content": asked}, answer]
            return Conversation(messages=messages, answers=_answers(messages, [1] * len(messages)), tools=tools)
        return _completed(asked, held["output"], opening, tools, place)
    raise DatasetError(f"{place}: the record has {names_in(record)}; expected {SHAPES}")


def _history(history: Any, place: str) -> list[Message]:
    """The turns before an instruction: pairs of question and answer."""
    if isinstance(history, str):
        history = _parsed(history, "history", place) if history.strip() else None
    if history is None:
        return []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DatasetError(f"{place}: history is {kind_of(history)}, expected a list of pairs of question and answer")
    return [
        {"role": role, "content": _text(text, "history", place)}
        for turn in history
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _completed(
    prompt: Any, completion: Any, opening: list[Message], tools: list[Any] | None, place: str
) -> Conversation:
    """A prompt and its completion: texts of one turn each, or messages of which the completion's answers count."""
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt, completion = _text(prompt, "prompt", place), _text(completion, "completion", place)
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        messages = [*opening, *turns]
        answers = [len(messages) - 1] if completion.strip() else []
        return Conversation(messages=messages, answers=answers, tools=tools, texts=(prompt, completion))
    before, _ = _messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, place)
    raw = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    after, weights = _messages(raw, place)
    if opening and before and before[0]["role"] != "system":
        before = [*opening, *before]
    messages = [*before, *after]
    return Conversation(messages=messages, answers=_answers(messages, [0] * len(before) + weights), tools=tools)


def _answers(messages: list[Message], weights: list[int]) -> list[int]:
    return [
        number
        for number, (message, weight) in enumerate(zip(messages, weights, strict=True))
        if message["role"] == "assistant"
        and weight
        and ((message.get("content") or "").strip() or message.get("tool_calls"))
    ]


def _messages(raw: Any, place: str) -> tuple[list[Message], list[int]]:
    """Messages with the names that templates know, and the weight (0 or 1) of each."""
    if isinstance(raw, str):
        raw = _parsed(raw, "messages", place)
    if not isinstance(raw, list):
        raise DatasetError(f"{place}: messages are {kind_of(raw)}, expected a list of objects with role and content")
    messages, weights = [], []
    for number, one in enumerate(raw):
        where = f"{place}: message {number}"
        if not isinstance(one, dict):
            raise DatasetError(f"{where} is {kind_of(one)}, expected an object with role and content")
        role = one.get("role", one.get("from"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise DatasetError(f"{where} has the role {name_of(role)}, expected one of {', '.join(ROLES)}")
        message: Message = {"role": ROLES[role.lower()]}
        content = one.get("content", one.get("value"))
        if content is not None:
            message["content"] = _content(content, where)
        for key in KEPT:
            if one.get(key) is not None:
                message[key] = _calls(one[key], where) if key == "tool_calls" else _plain(one[key], key, where)
        if "content" not in message and "tool_calls" not in message:
            raise DatasetError(
                f"{where} ({message['role']}) has neither content nor tool_calls; leave it out of the record"
            )
        messages.append(message)
        weights.append(_weight(one.get("weight"), where))
    return messages, weights


def _weight(weight: Any, where: str) -> int:
    """Whether an answer bears loss. A share would be trained on whole, or a text of 0 be taken for a yes."""
    if weight is None:
        return 1
    if not isinstance(weight, bool | int | float) or weight not in (0, 1):
        raise DatasetError(f"{where}: weight is {name_of(weight)}, expected 0 or 1: an answer bears loss or does not")
    return int(weight)


def _content(content: Any, where: str) -> str:
    """A text, or the texts of a list of parts; parts of another kind are refused."""
    if isinstance(content, str):
        return _plain(content, "content", where)
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
            for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return _plain("".join(str(part) for part in parts), "content", where)
    raise DatasetError(f"{where}: content is {kind_of(content)}, expected text (images and audio are not trained on)")


def _calls(calls: Any, where: str) -> list[Any]:
    """Tool calls with their arguments as objects: OpenAI writes them as JSON text, templates read them as objects."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DatasetError(f"{where}: tool_calls are {kind_of(calls)}, expected a list of objects")
    if odd := [call for call in calls if not isinstance(call.get("function") or {}, dict)]:
        raise DatasetError(
            f"{where}: function is {name_of(odd[0]['function'])}, expected an object with name, arguments"
        )
    result = []
    for call in calls:
        call = {key: value for key, value in call.items() if value is not None}
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"], "arguments of a tool call", where)
        result.append(call | ({"function": function} if function else {}))
    return result


def check_depth(value: Any, place: str) -> None:
    """Raise `DatasetError` for objects and lists within each other beyond what can be written as text again."""
    level = [value]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise DatasetError(f"{place}: tools or tool calls hold more than {MOST_NESTED} objects within each other")


def without_absent(value: Any) -> Any:
    """A record of a table without the keys that have no value.

    A column of objects has the keys of all rows, those that a row lacks as null: its tools and calls would be given
    arguments that it never had. (TRL's `remove_none_values`.)
    """
    if isinstance(value, list):
        return [without_absent(one) for one in value]
    if isinstance(value, dict):
        return {key: without_absent(one) for key, one in value.items() if one is not None}
    return value


def _tools(tools: Any, place: str) -> list[Any] | None:
    if isinstance(tools, str):
        tools = _parsed(tools, "tools", place) if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DatasetError(f"{place}: tools are {kind_of(tools)}, expected a list of JSON schemas")
    return tools


def _system(held: dict[str, Any], place: str) -> list[Message]:
    text = _text(held.get("system", ""), "system", place)
    return [{"role": "system", "content": text}] if text.strip() else []


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"{place}: field {name!r} is {kind_of(value)}, expected text")
    return _plain(value, name, place)


def _plain(value: Any, name: str, place: str) -> Any:
    """The value as it is, unless it holds half of a surrogate pair."""
    if isinstance(value, str) and not value.isascii() and (found := SURROGATE.search(value)):
        raise DatasetError(
            f"{place}: {name!r} holds half of a surrogate pair ({found[0]!a} at character {found.start()}), which is "
            "not Unicode text; remove it, or write the whole pair"
        )
    return value


def _parsed(text: str, name: str, place: str) -> Any:
    try:
        return parse_values(text)
    except ValueError as error:
        raise DatasetError(f"{place}: {name} is {kind_of(text)} that is not valid JSON ({error})") from None


def columns_of(available: Iterable[str]) -> list[str]:
    """The columns of a table that a conversation may be read from."""
    return [name for name in available if name in FIELDS]
