"""Laws of the directory that `facility.prepare` makes: what is taken for the same, and what a killed run leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from facility.dataset import DatasetError, open_dataset
from facility.exchange.errors import TransientError
from facility.prepare import main
from facility.preparing import output, resuming, writing
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.shared_signatures import read_salt, read_signatures
from facility.preparing.sources import Fields
from facility.preparing.tokenizer import copy_tokenizer, load_tokenizer
from tests.preparing.corpora import save_bert_tokenizer, save_tokenizer, sentences, write_json_lines
from tests.preparing.test_prepare import tree


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def request_(tmp_path: Path, tokenizer: Path) -> Request:
    source = write_json_lines(tmp_path / "text.jsonl", ({"text": one} for one in sentences(200)))
    return Request(inputs=[str(source)], tokenizer=tokenizer, out=tmp_path / "out", block_tokens=16)


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def test_a_tokenizer_that_encodes_otherwise_is_another_one(request_: Request, tokenizer: Path):
    """Its digest covers what ids mean: with another end token the old blocks were taken for those asked for."""
    prepare_dataset(request_)
    (tokenizer / "tokenizer_config.json").write_text((tokenizer / "tokenizer_config.json").read_text() + "\n")
    assert prepare_dataset(request_).reused, "the same, written otherwise"
    rewrite(tokenizer / "tokenizer_config.json", lambda raw: raw.update(eos_token="!"))
    with pytest.raises(DatasetError, match="prepared otherwise .differing: tokenizer, its special tokens"):
        prepare_dataset(request_)
    made = prepare_dataset(dataclasses.replace(request_, replace=True)).dataset
    assert not prepare_dataset(dataclasses.replace(request_, block_tokens=8, replace=True)).reused
    rewrite(tokenizer / "tokenizer.json", lambda raw: raw["pre_tokenizer"].update(add_prefix_space=True))
    with pytest.raises(DatasetError, match="how it cuts text"):
        prepare_dataset(dataclasses.replace(request_, block_tokens=8))
    assert made.manifest.vocabulary_size == 300


def test_the_copy_of_a_tokenizer_is_of_its_class(request_: Request, tmp_path: Path):
    """BERT's tokenizer_config.json names none: config.json does, and without it the copy had no mask token."""
    bert = save_bert_tokenizer(tmp_path / "bert")
    rewrite(bert / "tokenizer_config.json", lambda raw: raw.clear())
    (bert / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    dataset = prepare_dataset(dataclasses.replace(request_, tokenizer=bert, task="masked-lm")).dataset
    first, second = (load_tokenizer(one) for one in (bert, dataset.tokenizer_directory))
    assert type(first) is type(second) and first.mask_token_id == second.mask_token_id == 4
    assert json.loads((dataset.tokenizer_directory / "config.json").read_text()) == {"model_type": "bert"}


def test_of_a_model_of_several_parts_the_whole_chooses_the_class_of_the_tokenizer(tmp_path: Path, tokenizer: Path):
    """transformers looks at the model_type of the model, never at that of the part that reads text."""
    source = shutil.copytree(tokenizer, tmp_path / "model")
    parts = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 512}}
    (source / "config.json").write_text(json.dumps(parts))
    copy_tokenizer(source, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == {"model_type": "gemma3"}


def test_ids_of_a_vocabulary_with_holes_are_below_its_size(request_: Request, tmp_path: Path):
    bert = save_bert_tokenizer(tmp_path / "bert")
    rewrite(bert / "tokenizer.json", lambda raw: raw["model"]["vocab"].update(casa=900))
    dataset = prepare_dataset(dataclasses.replace(request_, tokenizer=bert, task="masked-lm")).dataset
    dataset.verify()
    assert dataset.manifest.vocabulary_size == 901 == int(dataset.split("train").max()) + 1


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_run_killed_as_it_delivers_is_made_again(request_: Request, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resuming, "SAVE_SECONDS", 0.0)

    def killed(self: Any, directory: Path) -> None:
        deliver(self, directory)
        raise Killed

    deliver = resuming.Part.deliver
    monkeypatch.setattr(resuming.Part, "deliver", killed)
    with pytest.raises(Killed):
        prepare_dataset(request_)
    monkeypatch.setattr(resuming.Part, "deliver", deliver)
    prepare_dataset(request_).dataset.verify()


def test_a_worker_that_died_costs_only_what_was_not_written(request_: Request, monkeypatch: pytest.MonkeyPatch):
    encode_all = writing.encode_all

    def dying(*arguments: Any, **settings: Any) -> Iterator[Any]:
        yield from encode_all(*arguments, **settings)
        raise TransientError("killed for memory")

    monkeypatch.setattr(resuming, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(writing, "encode_all", dying)
    with pytest.raises(TransientError):
        prepare_dataset(request_)
    assert json.loads((request_.out.with_name(".out.part") / "state.json").read_text())["batches"] == 2
    monkeypatch.setattr(writing, "encode_all", encode_all)
    prepare_dataset(request_).dataset.verify()


@pytest.mark.parametrize("where", ["before the data set replaced goes", "before the folder goes"])
def test_what_a_run_left_that_was_killed_once_all_was_delivered_goes_with_the_next(
    request_: Request, monkeypatch: pytest.MonkeyPatch, where: str
):
    """The next recognised the data set and did nothing: a whole copy of the one before stayed for ever."""
    prepare_dataset(dataclasses.replace(request_, block_tokens=request_.block_tokens + 1))
    again, remove = dataclasses.replace(request_, replace=True), shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if Path(path).name == (".out.old" if "replaced" in where else ".out.part"):
            raise Killed
        remove(path, **options)

    with monkeypatch.context() as context:
        context.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            prepare_dataset(again)
    left = {one.name for one in request_.out.parent.iterdir() if one.name.startswith(".")}
    assert left == {".out.part", ".out.part.lock", *([".out.old"] if "replaced" in where else [])}
    with resuming.part_of(request_.out.with_name("other"), {}, known=True):
        assert prepare_dataset(again).reused
    assert [one.name for one in request_.out.parent.iterdir() if one.name.startswith(".")] == []


def test_what_another_process_is_at_work_on_stays_when_its_out_is_recognised(request_: Request):
    prepare_dataset(request_)
    with resuming.part_of(request_.out, {}, known=True) as part:
        assert prepare_dataset(request_).reused and part.directory.is_dir() and part.turn.holds()


def test_what_killed_replacements_left_is_removed(request_: Request, monkeypatch: pytest.MonkeyPatch):
    prepare_dataset(request_)
    left = [request_.out.with_name(name) for name in (".out.old", ".out.new", "..out.new.abc.tmp")]
    for folder in left:
        folder.mkdir()
        (folder / "train.npy").write_bytes(b"")
    prepare_dataset(dataclasses.replace(request_, block_tokens=8, replace=True)).dataset.verify()
    assert [one for one in left if one.exists()] == []


def test_a_kill_between_the_two_moves_leaves_the_new_dataset(request_: Request, monkeypatch: pytest.MonkeyPatch):
    """Its place was empty, both datasets lay hidden beside it, and the next run made it all again."""
    prepare_dataset(request_)
    changed, rename = dataclasses.replace(request_, block_tokens=8, replace=True), output.os.rename

    def killed(source: Path, target: Path) -> None:
        if Path(source).name == ".out.new":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(output.os, "rename", killed)
        prepare_dataset(changed)
    assert not request_.out.exists()
    found = prepare_dataset(changed)
    assert found.reused and found.dataset.manifest.block_tokens == 8
    assert not [one for one in request_.out.parent.iterdir() if one.name.startswith(".out.")]


def test_another_process_that_finished_first_is_not_overwritten(request_: Request, monkeypatch: pytest.MonkeyPatch):
    """One that looked before, and held the lock after."""
    from facility.preparing import build

    load, other = build.load_tokenizer, dataclasses.replace(request_, block_tokens=8)

    def meanwhile(directory: Path) -> Any:
        monkeypatch.setattr(build, "load_tokenizer", load)
        prepare_dataset(other)
        return load(directory)

    monkeypatch.setattr(build, "load_tokenizer", meanwhile)
    with pytest.raises(DatasetError, match="prepared otherwise .differing: block_tokens"):
        prepare_dataset(request_)
    assert open_dataset(request_.out).manifest.block_tokens == 8


def test_a_link_is_followed_to_where_the_dataset_is_to_lie(request_: Request, tmp_path: Path):
    (tmp_path / "scratch" / "it").mkdir(parents=True)
    request_.out.symlink_to(tmp_path / "scratch" / "it")
    prepare_dataset(request_)
    replaced = prepare_dataset(dataclasses.replace(request_, block_tokens=8, replace=True)).dataset
    assert request_.out.is_symlink() and replaced.manifest.block_tokens == 8
    assert [one.name for one in (tmp_path / "scratch").iterdir()] == ["it"]


def test_places_that_cannot_be_made_or_would_be_read_are_refused_at_once(request_: Request, tmp_path: Path):
    for name in (".", "..", "/", "a/.."):
        with pytest.raises(DatasetError, match="expected the name of a directory to make"):
            prepare_dataset(dataclasses.replace(request_, out=Path(name)))
    (tmp_path / "in").mkdir()
    write_json_lines(tmp_path / "in" / "a.jsonl", ({"text": one} for one in sentences(200)))
    inside = dataclasses.replace(request_, inputs=[str(tmp_path / "in")], out=tmp_path / "in" / "out")
    with pytest.raises(DatasetError, match="lies in the input"):
        prepare_dataset(inside)
    hidden = dataclasses.replace(inside, out=tmp_path / "in" / ".prepared" / "out")
    assert [prepare_dataset(hidden).reused for _ in range(2)] == [False, True]


def test_lengths_in_which_nothing_is_predicted_are_refused(request_: Request, tmp_path: Path):
    with pytest.raises(DatasetError, match="block_tokens is 1, expected 2 or more for causal-lm"):
        prepare_dataset(dataclasses.replace(request_, block_tokens=1))
    bert = save_bert_tokenizer(tmp_path / "bert")
    records = [{"text": one, "b": one, "label": n % 2} for n, one in enumerate(sentences(50))]
    labelled = dataclasses.replace(
        request_,
        inputs=[str(write_json_lines(tmp_path / "labelled.jsonl", records))],
        tokenizer=bert,
        task="classification",
        fields=Fields(label="label"),
    )
    for least, fields in ((3, labelled.fields), (4, Fields(label="label", pair="b"))):
        asked = dataclasses.replace(labelled, fields=fields, out=tmp_path / f"out-{least}")
        with pytest.raises(DatasetError, match=f"block_tokens is {least - 1}, expected {least} or more"):
            prepare_dataset(dataclasses.replace(asked, block_tokens=least - 1))
        rows = prepare_dataset(dataclasses.replace(asked, block_tokens=least)).dataset.split("train")
        assert (rows > 4).any(axis=1).all(), "each holds a word"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_cut_at_the_end_that_the_tokenizer_names(request_: Request, tmp_path: Path, side: str):
    bert = save_bert_tokenizer(tmp_path / "bert")
    rewrite(bert / "tokenizer_config.json", lambda raw: raw.update(truncation_side=side))
    records = [{"text": one, "label": n % 2} for n, one in enumerate(sentences(24, 9))]
    asked = dataclasses.replace(
        request_,
        inputs=[str(write_json_lines(tmp_path / "labelled.jsonl", records[:20]))],
        validation=[str(write_json_lines(tmp_path / "held out.jsonl", records[20:]))],
        tokenizer=bert,
        task="classification",
        fields=Fields(label="label"),
    )
    rows = prepare_dataset(dataclasses.replace(asked, block_tokens=6)).dataset.split("train")
    theirs = load_tokenizer(bert)(records[0]["text"], truncation=True, max_length=6)["input_ids"]
    assert len(records[0]["text"].split()) > 6 and rows[0].tolist() == theirs


def shared(request: Request, place: Path) -> Request:
    (place / "salt").write_text("x" * 32)
    return dataclasses.replace(request, near_duplicates=0.8, salt=place / "salt", share_signatures=place / "signatures")


def test_signatures_are_shared_of_documents_that_are_kept(request_: Request, tmp_path: Path):
    """Of those beyond a cap too, they made another facility leave out what nobody trained on."""
    asked = dataclasses.replace(shared(request_, tmp_path), train_samples=10, validation_samples=5)
    splits = prepare_dataset(asked).dataset.manifest.splits
    rows = read_signatures(tmp_path / "signatures", read_salt(tmp_path / "salt"))
    assert len(rows) == 15 == sum(split.documents for split in splits.values())


def test_signatures_of_another_salt_are_not_those_asked_for(request_: Request, tmp_path: Path):
    asked = shared(request_, tmp_path)
    with pytest.raises(DatasetError, match="expected a file, in a directory that is there"):
        dataclasses.replace(asked, share_signatures=tmp_path / "nowhere" / "signatures")
    prepare_dataset(asked)
    assert prepare_dataset(asked).reused
    (tmp_path / "salt").write_text("y" * 32)
    with pytest.raises(DatasetError, match="made with another salt.*--replace makes both again"):
        prepare_dataset(asked)


def test_empty_files_and_streams_are_not_the_same_content(request_: Request, tmp_path: Path):
    for name, first in (("train", 0), ("validation", 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "empty.txt").write_bytes(b"")
        (tmp_path / name / "full.txt").write_text("\n".join(sentences(100, first)))
    inputs = {"inputs": [str(tmp_path / "train")], "validation": [str(tmp_path / "validation")]}
    prepare_dataset(dataclasses.replace(request_, **inputs)).dataset.verify()
    hub = tmp_path / "hub"
    hub.mkdir()
    for name, first in (("train", 0), ("validation", 1000)):
        write_json_lines(hub / f"{name}.jsonl", ({"text": one} for one in sentences(100, first)))
    streams = {"inputs": [f"hub:{hub}"], "validation": [f"hub:{hub}"], "streaming": True, "out": tmp_path / "streamed"}
    streamed = prepare_dataset(dataclasses.replace(request_, **streams)).dataset
    assert [split.documents for split in streamed.manifest.splits.values()] == [100, 100]
    assert tree(streamed.directory)["train.npy"] == tree(request_.out)["train.npy"]


def test_a_folder_of_very_many_files_is_one_entry(request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A million entries took every rank half a minute and a gigabyte to open a dataset."""
    monkeypatch.setattr(output, "MOST_ENTRIES", 9)
    for name in ("many", "few"):
        (tmp_path / name).mkdir()
        for number, one in enumerate(sentences(10 if name == "many" else 9, 20 * len(name))):
            (tmp_path / name / f"{number}.txt").write_text(one)
    asked = dataclasses.replace(request_, inputs=[str(tmp_path / "many"), str(tmp_path / "few")], validation_share=0.5)
    sources = prepare_dataset(asked).dataset.manifest.sources
    assert [one.name for one in sources] == ["many (10 files)", *(f"{n}.txt" for n in range(9))]
    assert sources[0].size == sum(one.stat().st_size for one in (tmp_path / "many").iterdir())
    assert prepare_dataset(asked).reused
    (tmp_path / "many" / "3.txt").rename(tmp_path / "many" / "33.txt")
    with pytest.raises(DatasetError, match="differing: sources"):
        prepare_dataset(asked)


def test_a_name_that_is_no_text_is_printed_by_escapes(request_: Request, tmp_path: Path, capsys):
    out = tmp_path / os.fsdecode(b"caf\xe9")
    command = ["--input", *request_.inputs, "--tokenizer", str(request_.tokenizer), "--block-tokens", "16"]
    assert main([*command, "--out", str(out)]) == 0
    assert main([*command, "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr().out
    printed.encode()
    assert printed.startswith(f"{tmp_path}/caf\\xe9: prepared")


WORKERS = """
import os, sys, time
from facility.preparing import encoding
def encoder(asked):
    return lambda documents: os.getpid()
def batches():
    while True:
        yield encoding.Batch(split="train", documents=[])
if __name__ == "__main__":
    for _, worker in encoding.encode_all(batches(), None, processes=1 + 1):
        print(worker, flush=True)
        time.sleep(0.01)
else:
    encoding.encoder = encoder
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path):
    (tmp_path / "forever.py").write_text(WORKERS)
    started = subprocess.Popen([sys.executable, str(tmp_path / "forever.py")], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    worker = int(started.stdout.readline())
    started.send_signal(signal.SIGKILL)
    started.wait()
    for _ in range(4000):
        if not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker waits for work that nobody will give it")


def test_a_template_without_the_token_that_begins_texts_is_told(request_: Request, tmp_path: Path, caplog):
    """Llama's, Mistral's and Gemma's tokenizers put it there, and so does whoever asks the model."""
    from tokenizers import Tokenizer, processors

    prepare_dataset(request_)
    assert "begins a text" not in caplog.text
    shutil.copytree(request_.tokenizer, tmp_path / "begins")
    tokenizer = Tokenizer.from_file(str(tmp_path / "begins" / "tokenizer.json"))
    name = next(token.content for token in tokenizer.get_added_tokens_decoder().values())
    number = tokenizer.token_to_id(name)
    tokenizer.post_processor = processors.TemplateProcessing(f"{name} $A", special_tokens=[(name, number)])
    tokenizer.save(str(tmp_path / "begins" / "tokenizer.json"))
    configuration = tmp_path / "begins" / "tokenizer_config.json"
    configuration.write_text(json.dumps(json.loads(configuration.read_text()) | {"bos_token": name}))
    again = dataclasses.replace(request_, tokenizer=tmp_path / "begins", out=tmp_path / "again")
    prepare_dataset(again)
    assert "give --template '{bos}{text}{eos}' unless" in caplog.text
    caplog.clear()
    prepared = prepare_dataset(dataclasses.replace(again, template="{bos}{text}{eos}", out=tmp_path / "third")).dataset
    assert not caplog.text and number in prepared.split("train")


def test_folders_above_a_dataset_that_cannot_be_made_are_not_left_behind(request_: Request, tmp_path: Path):
    text = tmp_path / "odd.jsonl"
    text.write_text('{"body": "no field of that name"}\n')
    for above in (tmp_path / "new", tmp_path / "there" / "new"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with pytest.raises(DatasetError, match="no field 'text'"):
            prepare_dataset(dataclasses.replace(request_, inputs=[str(text)], out=above / "deep" / "out"))
        assert not above.exists() and (tmp_path / "there").is_dir()
