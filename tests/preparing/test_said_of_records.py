"""A message of `facility.prepare` shows no text of a record: it goes into logs, and to others with `crossfed setup`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from facility import prepare
from facility.exchange.errors import CrossFedError
from facility.preparing.said_of_records import kind_of, name_of, names_in
from tests.preparing.chats import save_chat_tokenizer

SECRET = "la paziente Rossi ha il diabete"
PAIR = {"prompt": "Q?", "chosen": "A", "rejected": "B"}
LONG = f"{SECRET}, {SECRET}"
USER, ANSWER = {"role": "user", "content": SECRET}, {"role": "assistant", "content": SECRET}
TASKS: dict[str, list[Any]] = {
    "causal-lm": [SECRET, [SECRET], {"text": [SECRET]}, {"text": {"a": SECRET}}, {LONG: 1}],
    "chat": [
        SECRET,
        [SECRET],
        {LONG: SECRET},
        {"messages": {"a": SECRET}},
        {"messages": SECRET},
        {"messages": [SECRET]},
        {"messages": [{"role": LONG, "content": "x"}]},
        {"messages": [{"role": [SECRET], "content": "x"}]},
        {"messages": [{"role": "user", "content": {"a": SECRET}}]},
        {"messages": [ANSWER | {"weight": LONG}]},
        {"messages": [ANSWER | {"tool_calls": SECRET}]},
        {"messages": [ANSWER | {"tool_calls": [{"function": LONG}]}]},
        {"messages": [ANSWER | {"tool_calls": [{"function": {"arguments": SECRET}}]}]},
        {"messages": [USER, ANSWER], "tools": SECRET},
        {"messages": [USER, ANSWER], "tools": {"a": SECRET}},
        {"prompt": [SECRET], "completion": SECRET},
        {"prompt": SECRET, "completion": 3, "system": [SECRET]},
        {"instruction": [SECRET], "output": "x"},
        {"instruction": "x", "output": "y", "history": SECRET},
        {"instruction": "x", "output": "y", "history": [[SECRET]]},
    ],
    "preference": [
        {"prompt": SECRET, "chosen": SECRET},
        PAIR | {"chosen": [SECRET]},
        {"chosen": SECRET, "rejected": SECRET},
        {"prompt": SECRET, "chosen": [USER | {"content": "x"}, ANSWER], "rejected": [USER, ANSWER]},
    ],
    "classification": [{"text": SECRET}, {"text": SECRET, "label": [SECRET]}, {"text": "x", "label": LONG}],
}


@pytest.mark.parametrize(("task", "record"), [(task, one) for task, records in TASKS.items() for one in records])
def test_no_refusal_shows_text_of_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, record: Any):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(record) + "\n")
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    where = ["--input", str(file), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    with pytest.raises(CrossFedError) as refused:
        prepare.main([*where, "--task", task, "--block-tokens", "16"])
    shown = str(refused.value) + "".join(capsys.readouterr())
    assert "Rossi" not in shown and len(shown) < 500


def test_a_label_field_that_holds_documents_is_not_listed(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number} {LONG}"}) + "\n" for number in range(40)))
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    where = ["--input", str(file), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    with pytest.raises(CrossFedError, match="validation holds the labels a text of") as refused:
        prepare.main(
            [
                *where,
                "--task",
                "classification",
                "--label-field",
                "text",
                "--block-tokens",
                "16",
                "--validation-share=0.3",
            ]
        )
    assert "Rossi" not in str(refused.value)


def test_what_is_said_tells_kinds_apart():
    values: list[Any] = [None, "", "a", 3, 0.5, True, [1, 2], {"a": 1, "b": 2}, {}]
    assert [kind_of(value) for value in values] == [
        "null",
        "a text of 0 characters",
        "a text of 1 character",
        "a whole number",
        "a number",
        "true or false",
        "a list of 2",
        "an object with a, b",
        "an object with no field",
    ]
    assert (name_of("x"), name_of(0.5), name_of("x" * 41)) == ("'x'", "0.5", "a text of 41 characters")
    assert names_in(map(str, range(22))).endswith("19, 2 more")
