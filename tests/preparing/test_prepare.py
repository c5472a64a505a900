"""Laws of `facility.prepare`: nothing is lost, nothing depends on how it was batched, nothing is half-written."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from facility.dataset import DatasetError, open_dataset
from facility.exchange.errors import TransientError
from facility.prepare import main, progress_bar, progress_lines
from facility.preparing import build, encoding, reading, writing
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.sources import Fields
from tests.preparing.corpora import die, save_tokenizer, sentences, write_json_lines

TEMPLATE = "Scrivi un documento: {text}{eos}"


@pytest.fixture(scope="module")
def loaded(tokenizer: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer)


@pytest.fixture
def request_(tmp_path: Path, tokenizer: Path) -> Request:
    train = write_json_lines(tmp_path / "train.jsonl", [{"text": s} for s in sentences(120)])
    validation = write_json_lines(tmp_path / "validation.jsonl", [{"text": s} for s in sentences(20, 500)])
    return Request(
        inputs=[str(train)],
        validation=[str(validation)],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        block_tokens=32,
        template=TEMPLATE,
    )


def change(request: Request, **values) -> Request:
    return dataclasses.replace(request, **values)


def stream(loaded, texts: list[str], template: str = TEMPLATE) -> list[int]:
    """The oracle: every document through the template, encoded on its own, one after the other."""
    ids: list[int] = []
    for text in texts:
        before, after = template.removesuffix("{eos}").split("{text}")
        ids += [*loaded(before + text + after, add_special_tokens=False).input_ids, loaded.eos_token_id]
    return ids


def tree(directory: Path) -> dict[str, str]:
    return {
        p.relative_to(directory).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def test_blocks_are_the_token_stream_and_the_tail_is_reported(request_: Request, loaded):
    dataset = prepare_dataset(request_).dataset
    expected = stream(loaded, sentences(120))
    blocks, entry = dataset.split("train"), dataset.manifest.splits["train"]
    assert blocks.dtype == numpy.int32 and blocks.shape == (len(expected) // 32, 32)
    assert blocks.reshape(-1).tolist() == expected[: blocks.size]
    assert entry.tokens == len(expected) and entry.tail_tokens == len(expected) % 32 > 0
    assert entry.documents == 120 and dataset.manifest.splits["validation"].documents == 20
    assert dataset.manifest.template == TEMPLATE and dataset.manifest.vocabulary_size == len(loaded)
    dataset.verify()


@pytest.mark.parametrize("documents", [1, 7, 10_000])
def test_the_result_does_not_depend_on_the_batches(request_: Request, monkeypatch: pytest.MonkeyPatch, documents: int):
    whole = tree(prepare_dataset(request_).dataset.directory)
    monkeypatch.setattr(reading, "BATCH_DOCUMENTS", documents)
    assert tree(prepare_dataset(change(request_, out=request_.out.with_name("again"))).dataset.directory) == whole


def test_the_result_does_not_depend_on_the_number_of_processes(request_: Request, monkeypatch: pytest.MonkeyPatch):
    whole = tree(prepare_dataset(request_).dataset.directory)
    monkeypatch.setattr(reading, "BATCH_DOCUMENTS", 5)
    assert (
        tree(prepare_dataset(change(request_, out=request_.out.with_name("again"), processes=2)).dataset.directory)
        == whole
    )


def test_the_same_request_is_recognised_and_writes_nothing(request_: Request, monkeypatch: pytest.MonkeyPatch):
    prepare_dataset(request_)
    before = {p: p.stat().st_mtime_ns for p in request_.out.rglob("*")}
    monkeypatch.setattr(build, "load_tokenizer", lambda *_: pytest.fail("loaded the tokenizer for nothing"))
    again = prepare_dataset(change(request_, processes=2))
    assert again.reused and {p: p.stat().st_mtime_ns for p in request_.out.rglob("*")} == before


def test_another_request_does_not_touch_what_is_there_unless_told_to(request_: Request):
    old = tree(prepare_dataset(request_).dataset.directory)
    with pytest.raises(DatasetError, match=r"prepared otherwise \(differing: block_tokens\); --replace"):
        prepare_dataset(change(request_, block_tokens=16))
    assert tree(request_.out) == old
    assert prepare_dataset(change(request_, block_tokens=16, replace=True)).dataset.split("train").shape[1] == 16
    assert sorted(p.name for p in request_.out.parent.iterdir()) == ["out", "train.jsonl", "validation.jsonl"]


def test_a_changed_input_is_noticed(request_: Request):
    prepare_dataset(request_)
    write_json_lines(Path(request_.inputs[0]), [{"text": s} for s in sentences(121)])
    with pytest.raises(DatasetError, match="differing: sources"):
        prepare_dataset(request_)


def test_a_folder_that_is_no_dataset_is_left_alone(request_: Request):
    request_.out.mkdir()
    (request_.out / "thesis.tex").write_text("years of work")
    with pytest.raises(DatasetError, match="is not a prepared dataset"):
        prepare_dataset(change(request_, replace=True))
    assert (request_.out / "thesis.tex").read_text() == "years of work"


def test_the_share_for_validation_is_exact_spread_evenly_and_disjoint(request_: Request, loaded):
    texts = sentences(120)
    dataset = prepare_dataset(change(request_, validation=[], validation_share=0.1)).dataset
    held_out = [t for i, t in enumerate(texts) if i % 10 == 9]
    rest = [t for i, t in enumerate(texts) if i % 10 != 9]
    for name, chosen in (("train", rest), ("validation", held_out)):
        assert dataset.manifest.splits[name].documents == len(chosen)
        blocks = dataset.split(name)
        assert blocks.reshape(-1).tolist() == stream(loaded, chosen)[: blocks.size]


@pytest.mark.parametrize("share", [None, 0.25])
def test_caps_take_the_first_documents(request_: Request, loaded, share: float | None):
    capped = change(request_, train_samples=30, validation_samples=6)
    if share:
        capped = change(capped, validation=[], validation_share=share)
    dataset = prepare_dataset(capped).dataset
    assert {n: s.documents for n, s in dataset.manifest.splits.items()} == {"train": 30, "validation": 6}
    texts = [t for i, t in enumerate(sentences(120)) if not share or i % 4 != 3]
    blocks = dataset.split("train")
    assert blocks.reshape(-1).tolist() == stream(loaded, texts[:30])[: blocks.size]


def test_the_manifest_names_no_folder_of_this_machine(request_: Request):
    prepare_dataset(request_)
    assert str(request_.out.parent) not in (request_.out / "dataset.json").read_text()


def test_text_that_spells_a_special_token_stays_text(request_: Request, loaded):
    write_json_lines(Path(request_.inputs[0]), [{"text": "un <|end|> finto"}] * 20)
    blocks = prepare_dataset(change(request_, template="{text}{eos}")).dataset.split("train")
    ids = blocks.reshape(-1).tolist()
    document = loaded("un <|end|> finto", split_special_tokens=True).input_ids
    assert loaded.eos_token_id not in document
    assert ids[: len(document) + 1] == [*document, loaded.eos_token_id]


def test_empty_documents_are_counted(request_: Request, loaded):
    write_json_lines(Path(request_.inputs[0]), [{"text": t} for s in sentences(40) for t in (s, "", " \n")])
    entry = prepare_dataset(request_).dataset.manifest.splits["train"]
    assert (entry.documents, entry.empty_documents) == (40, 80)
    assert entry.tokens == len(stream(loaded, sentences(40)))


def test_a_failure_in_the_middle_leaves_nothing(request_: Request):
    with open(request_.inputs[0], "a") as file:
        file.write("{not json}\n")
    with pytest.raises(DatasetError, match=r"train\.jsonl:121: not valid JSON"):
        prepare_dataset(request_)
    assert sorted(p.name for p in request_.out.parent.iterdir()) == ["train.jsonl", "validation.jsonl"]


@pytest.mark.slow
def test_a_killed_run_leaves_no_dataset_and_the_next_one_succeeds(request_: Request, tmp_path: Path):
    write_json_lines(Path(request_.inputs[0]), ({"text": s} for s in sentences(8_000)))
    write_json_lines(Path(request_.validation[0]), ({"text": f"altro {s}"} for s in sentences(20)))
    command = [
        sys.executable,
        "-m",
        "facility.prepare",
        "--input",
        *request_.inputs,
        "--validation",
        *request_.validation,
        "--tokenizer",
        str(request_.tokenizer),
        "--out",
        str(request_.out),
        "--block-tokens",
        "32",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob(".out.*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not request_.out.exists()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["splits"]["train"]["documents"] == 8_000 and not report["reused"]
    assert report["splits"]["validation"]["documents"] == 20
    open_dataset(request_.out).verify()


def test_the_output_keeps_no_more_in_memory_than_batches(request_: Request, monkeypatch: pytest.MonkeyPatch):
    """Documents arrive batch by batch: at no time are more than a batch of each split held."""
    alive: list[int] = []
    real = writing.encode_all

    def counting(batches, encoding, **settings):
        for batch, encoded in real(batches, encoding, **settings):
            alive.append(len(batch.documents))
            yield batch, encoded

    monkeypatch.setattr(reading, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(writing, "encode_all", counting)
    prepare_dataset(request_)
    assert max(alive) == 10 and sum(alive) == 140


def test_the_command_speaks_plainly(request_: Request, capsys: pytest.CaptureFixture[str]):
    arguments = [
        "--input",
        *request_.inputs,
        "--validation",
        *request_.validation,
        "--tokenizer",
        str(request_.tokenizer),
        "--out",
        str(request_.out),
        "--block-tokens",
        "32",
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "train: 120 documents" in shown and "tail of" in shown
    assert main(arguments) == 0
    assert "prepared before by the same command" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "default 0.05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"template": "no place"}, r"holds \{text\} 0 times"),
        ({"template": "{text}{text}"}, r"holds \{text\} 2 times"),
        ({"template": "{text}{name}"}, r"uses \{name\}"),
        ({"template": "{text"}, "expected '}'"),
        ({"template": "{bos}{text}"}, "has no bos token"),
        ({"inputs": ["missing.jsonl"]}, "no such file or directory"),
        ({"fields": Fields(text="body")}, r"train\.jsonl:1: no field 'body'; the record has text"),
        ({"block_tokens": 100_000}, "not one block of 100000"),
        ({"tokenizer": Path("nowhere")}, "expected a tokenizer"),
    ],
)
def test_bad_requests_are_one_clear_error(request_: Request, values: dict, message: str):
    with pytest.raises(DatasetError, match=message):
        prepare_dataset(change(request_, **values))
    assert not request_.out.exists()


@pytest.mark.parametrize(
    "values",
    [
        {"block_tokens": 0},
        {"processes": 0},
        {"train_samples": -1},
        {"validation_share": 1.0},
        {"task": "classification"},
        {"fields": Fields(pair="b")},
        {"task": "classification", "fields": Fields(label="label"), "template": "x {text}"},
    ],
)
def test_requests_are_checked_when_they_are_made(request_: Request, values: dict):
    with pytest.raises(DatasetError, match="expected|classification"):
        change(request_, **values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": 3}\n', r":1: field 'text' is a whole number, expected text"),
        (b'{"text": "a"}\n[1]\n', r":2: found a list of 1, expected an object"),
        (b'{"text": "a"}\n\n{"text": "b"\n', r":3: not valid JSON"),
        (b'{"text": "\xff"}\n', r":1: not UTF-8"),
        (b"", "0 documents gave 0 tokens"),
    ],
)
def test_bad_lines_are_named(request_: Request, content: bytes, message: str):
    Path(request_.inputs[0]).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        prepare_dataset(request_)
    assert not request_.out.exists()


def test_a_tokenizer_without_an_end_is_an_error_where_the_template_uses_it(request_: Request, tmp_path: Path):
    plain = save_tokenizer(tmp_path / "plain", eos=None)
    with pytest.raises(DatasetError, match="has no eos token"):
        prepare_dataset(change(request_, tokenizer=plain))
    assert prepare_dataset(change(request_, tokenizer=plain, template="{text}")).dataset.split("train").shape[1] == 32


def test_blocks_longer_than_the_tokenizer_or_model_allows_are_refused(request_: Request, tmp_path: Path):
    short = save_tokenizer(tmp_path / "short", model_max_length=24)
    with pytest.raises(DatasetError, match="longer than the limit of 24"):
        prepare_dataset(change(request_, tokenizer=short))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 16, "vocab_size": 512}))
    with pytest.raises(DatasetError, match="limit of 16"):
        prepare_dataset(change(request_, model=model))
    roberta = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 33, "vocab_size": 512}
    (model / "config.json").write_text(json.dumps(roberta))
    with pytest.raises(DatasetError, match="limit of 31"):
        prepare_dataset(change(request_, model=model))
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 100}))
    with pytest.raises(DatasetError, match="do not belong together"):
        prepare_dataset(change(request_, model=model))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"max_position_embeddings": 16, "vocab_size": 512}, "limit of 16"),
        ({"max_position_embeddings": 64, "vocab_size": 100}, "do not belong together"),
    ],
)
def test_of_a_model_of_several_parts_the_one_that_reads_text_counts(
    request_: Request, tmp_path: Path, part: dict[str, int], why: str
):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vision_config": {"vocab_size": 999}, "text_config": part}))
    with pytest.raises(DatasetError, match=why):
        prepare_dataset(change(request_, model=model))


def test_the_same_text_for_training_and_validation_is_refused(request_: Request):
    with pytest.raises(DatasetError, match="for training and for validation"):
        prepare_dataset(change(request_, validation=request_.inputs))


def test_the_same_documents_in_other_files_are_counted_and_refused_above_a_small_share(request_: Request):
    held = [{"text": f"  {s}\n", "id": i} for i, s in enumerate(sentences(3))] + [
        {"text": s} for s in sentences(97, 500)
    ]
    write_json_lines(Path(request_.validation[0]), held)
    with pytest.raises(DatasetError, match="3 of 100 documents are in training too.*--allow-overlap"):
        prepare_dataset(request_)
    assert not request_.out.exists()
    made = prepare_dataset(change(request_, allow_overlap=True)).dataset
    assert made.manifest.splits["validation"].overlapping_documents == 3
    with pytest.raises(DatasetError, match="3 of 100"):
        prepare_dataset(request_)  # the dataset that is there was made with the option
    write_json_lines(Path(request_.validation[0]), [*held[2:], {"text": "un testo"}, {"text": "un altro"}])
    made = prepare_dataset(change(request_, replace=True)).dataset
    assert made.manifest.splits["validation"].overlapping_documents == 1  # of 100


def test_a_dead_worker_is_an_error_not_a_hang(request_: Request, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "_work", die)
    with pytest.raises(TransientError, match="one of 2 tokenising processes died"):
        prepare_dataset(change(request_, processes=2))
    assert not request_.out.exists()


def test_a_log_gets_a_line_every_half_minute_and_no_carriage_return(capsys: pytest.CaptureFixture[str]):
    out, now = io.StringIO(), {"now": 0.0}
    progress = progress_lines(out, clock=lambda: now["now"])
    for second in range(100):
        now["now"] = float(second)
        progress("law.jsonl", second / 100, 1000 * second)
    assert out.getvalue().splitlines() == [f"{n}% read, {n},000 documents (law.jsonl)" for n in (30, 60, 90)]
    with progress_bar() as told:  # pytest's stderr is not a terminal
        told("law.jsonl", 0.5, 10)
    assert capsys.readouterr().err == ""
