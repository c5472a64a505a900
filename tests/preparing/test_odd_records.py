"""Records that look like others and are not: nothing of them is asked twice, dropped, made up, or a traceback."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from facility.dataset import DatasetError
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.chat import ChatEncoder, chat_encoding
from facility.preparing.conversations import conversation_of, preference_of
from facility.preparing.rows import class_names
from facility.preparing.sources import Fields, find_sources, read_documents
from tests.preparing.chats import save_chat_tokenizer
from tests.preparing.corpora import save_tokenizer, sentences

CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def encoder_of(directory: Path, given: str | None = None) -> tuple[Any, ChatEncoder]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoding = chat_encoding(tokenizer, directory, given, "all-turns")
    return tokenizer, ChatEncoder(tokenizer.backend_tokenizer.to_str(), encoding)


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_prompt_beside_whole_conversations_is_asked_once():
    """UltraFeedback's shape, read as TRL's `maybe_extract_prompt` reads it."""
    ask, good, bad = said("user", "Q?"), said("assistant", "A"), said("assistant", "B")
    for prompt in ("Q?", [ask]):
        record: dict[str, Any] = {"prompt": prompt, "chosen": [ask, good], "rejected": [ask, bad]}
        found = preference_of(record, "here")
        assert (found.messages, found.rejected, found.answers) == ([ask, good], [ask, bad], [1])
    system = said("system", "S")
    apart = preference_of({"prompt": [system], "chosen": [ask, good], "rejected": [ask, bad]}, "here")
    assert apart.messages == [system, ask, good], "messages that come before both stay"
    alone = preference_of({"prompt": "Q?", "chosen": [good], "rejected": [bad]}, "here")
    assert alone.messages == [ask, good]
    with pytest.raises(DatasetError, match="none of their messages is the text in prompt"):
        preference_of({"prompt": "other", "chosen": [ask, good], "rejected": [ask, bad]}, "here")


def test_plain_texts_that_would_lose_a_system_message_or_tools_are_refused(tmp_path: Path):
    _, encode = encoder_of(save_chat_tokenizer(tmp_path / "tokenizer"), "none")
    plain = {"prompt": "uno", "completion": "due"}
    assert len(encode(conversation_of(plain, "here").to_json())) == 1
    for more, what in (({"system": "S"}, "the system message"), ({"tools": [{"name": "f"}]}, "tools")):
        with pytest.raises(DatasetError, match=f"have no place for {what} of a record: "):
            encode(conversation_of(plain | more, "here").to_json())


def test_names_of_arguments_and_quoted_tokens_stay_text(tmp_path: Path):
    tokenizer, _ = encoder_of(save_chat_tokenizer(tmp_path / "tokenizer", template=CALLS))
    tokenizer.add_special_tokens({"additional_special_tokens": ['<"q">']})
    tokenizer.save_pretrained(tmp_path / "more")
    tokenizer, encode = encoder_of(tmp_path / "more")
    end, quoted = (tokenizer.convert_tokens_to_ids(one) for one in ("<|im_end|>", '<"q">'))
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": "<|im_end|>"}}}
    messages = [said("user", 'x <"q"> <|im_end|>'), {"role": "assistant", "tool_calls": [call]}]
    (found,) = encode(conversation_of({"messages": messages}, "here").to_json())
    assert (np.count_nonzero(found.ids == end), np.count_nonzero(found.ids == quoted)) == (2, 0)
    (found,) = encode(conversation_of({"messages": [said("user", '<"q">'), said("assistant", "y")]}, "x").to_json())
    assert np.count_nonzero(found.ids == quoted) == 0


def test_a_template_that_asks_for_the_day_gets_the_same_one_always(tmp_path: Path):
    """As Llama 3.2's and gpt-oss's do: blocks depended on the day, and a second between two messages was an error."""
    dated = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}" + CALLS
    tokenizer, encode = encoder_of(save_chat_tokenizer(tmp_path / "tokenizer", template=dated))
    messages = [said("user", "x"), said("assistant", "y")] * 2
    (found,) = encode(conversation_of({"messages": messages}, "here").to_json())
    assert tokenizer.decode(found.ids).startswith("26 Jul 2024 00:00:00.000000<|im_start|>user")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def test_tools_of_any_depth_are_read_or_refused(tmp_path: Path):
    _, encode = encoder_of(save_chat_tokenizer(tmp_path / "tokenizer", template=CALLS))
    file = tmp_path / "a.jsonl"
    for depth in (80, 200, 900):
        call = {"function": {"name": "f", "arguments": nested(depth)}}
        messages = [said("user", "<|im_end|>"), {"role": "assistant", "tool_calls": [call]}]
        file.write_text(json.dumps({"messages": messages}))
        (source,) = find_sources([str(file)], split="train")
        if depth < 100:
            assert [len(encode(one.text)) for one in read_documents(source, Fields(chat=True))] == [1]
            continue
        with pytest.raises(DatasetError, match=r"a\.jsonl:1: tools or tool calls hold more than 100 objects"):
            list(read_documents(source, Fields(chat=True)))


def test_tables_give_no_arguments_that_a_row_never_had(tmp_path: Path):
    """Arrow fills the keys of other rows with null. As TRL's `remove_none_values`."""
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    def record(name: str, argument: str) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": {argument: "1"}}}
        tool = {"type": "function", "function": {"name": name, "parameters": {argument: {"type": "string"}}}}
        return {"messages": [said("user", "x"), {"role": "assistant", "tool_calls": [call]}], "tools": [tool]}

    records = [record("f", "a"), record("g", "b")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    Dataset(table).save_to_disk(str(tmp_path / "saved"))
    lines, *tables = (
        [one.text for one in read_documents(find_sources([str(tmp_path / name)], split="train")[0], Fields(chat=True))]
        for name in ("a.jsonl", "a.parquet", "saved")
    )
    assert tables == [lines, lines]


def test_a_saved_dataset_that_is_damaged_is_an_error_that_names_it(tmp_path: Path):
    from datasets import Dataset

    saved = tmp_path / "saved"
    Dataset.from_dict({"text": sentences(300)}).save_to_disk(str(saved))
    (file,) = saved.glob("*.arrow")
    held = bytearray(file.read_bytes())
    held[len(held) // 2 : len(held) // 2 + 200] = b"\xff" * 200
    file.write_bytes(held)
    request = Request(
        inputs=[str(saved)], tokenizer=save_tokenizer(tmp_path / "tokenizer"), out=tmp_path / "out", block_tokens=16
    )
    with pytest.raises(DatasetError, match="saved cannot be read: ArrowInvalid: .*Invalid UTF8"):
        prepare_dataset(request)
    with pytest.raises(DatasetError, match="no field 'body'"):
        prepare_dataset(dataclasses.replace(request, fields=Fields(text="body")))


@pytest.mark.parametrize("chat", [False, True])
def test_a_record_that_has_a_key_twice_is_refused_as_datasets_does(tmp_path: Path, chat: bool):
    """The last counted, and what the others held was lost in silence."""
    (file := tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}\n'
        if chat
        else '{"text": "a"}\n{"text": "b", "text": "c"}\n'
    )
    with pytest.raises(DatasetError, match=rf"a\.jsonl:{1 if chat else 2}: .*a key appears twice in one mapping"):
        list(read_documents(*find_sources([str(file)], split="train"), Fields(chat=chat)))


def test_labels_of_thousands_of_digits_are_names():
    long = "9" * 5000
    assert class_names([{"10": None, "9": None, "-1": None}]) == ["-1", "9", "10"]
    assert class_names([{"10": None, long: None}]) == ["10", long]
