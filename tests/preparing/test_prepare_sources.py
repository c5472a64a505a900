"""The same documents from any kind of source give the same blocks."""

from __future__ import annotations

import bz2
import dataclasses
import errno
import gzip
import json
import lzma
import os
import zlib
from pathlib import Path

import numpy
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from facility.dataset import DatasetError, open_dataset
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.images.sources import find_images
from facility.preparing.sources import Fields, find_sources
from tests.preparing.corpora import save_bert_tokenizer, sentences, write_json_lines

TEXTS = sentences(60)


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path):
    def blocks(*inputs: Path | str, out: str = "out", **values) -> numpy.ndarray:
        request = Request(
            inputs=[str(i) for i in inputs],
            tokenizer=tokenizer,
            out=tmp_path / out,
            block_tokens=16,
            validation_share=0.1,
        )
        return numpy.array(prepare_dataset(dataclasses.replace(request, **values)).dataset.split("train"))

    return blocks


@pytest.fixture
def expected(make, tmp_path: Path) -> numpy.ndarray:
    return make(write_json_lines(tmp_path / "a.jsonl", [{"text": t, "other": 1} for t in TEXTS]), out="expected")


@pytest.mark.parametrize("kind", [".gz", ".bz2", ".xz", ".zst"])
def test_packed_json_lines(make, expected, tmp_path: Path, kind: str):
    packed = tmp_path / f"b.jsonl{kind}"
    parts = ["".join(json.dumps({"text": t}) + "\n" for t in some).encode() for some in (TEXTS[:30], TEXTS[30:])]
    packed.write_bytes(b"".join(compressed(part, kind) for part in parts))  # as pzstd and cat do
    assert (make(packed) == expected).all()
    packed.write_bytes(packed.read_bytes()[:-200])
    with pytest.raises(DatasetError, match=rf"b\.jsonl\{kind} cannot be read"):
        make(packed, out="cut")


def compressed(data: bytes, kind: str) -> bytes:
    if kind == ".zst":
        out = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(out, "zstd") as packed:
            packed.write(data)
        whole: bytes = out.getvalue().to_pybytes()
        return whole
    return {".gz": gzip, ".bz2": bz2, ".xz": lzma}[kind].compress(data)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("writer", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_arrow_files(make, expected, tmp_path: Path, writer):
    """As `datasets` keeps them, and as Feather does."""
    table = pyarrow.table({"other": [1] * len(TEXTS), "text": TEXTS})
    with writer(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=17)
    assert (make(tmp_path / "b.arrow") == expected).all()
    with pytest.raises(DatasetError, match=r"b\.arrow: no field 'words'; it has other, text"):
        make(tmp_path / "b.arrow", out="other", fields=Fields(text="words"))
    (tmp_path / "b.arrow").write_bytes(b"x" * 100)
    with pytest.raises(DatasetError, match=r"b\.arrow is not a readable Arrow file"):
        make(tmp_path / "b.arrow", out="damaged")


def test_what_a_data_set_says_of_itself_is_no_text_of_it(make, expected, tmp_path: Path, caplog):
    """Of a folder as the hub has it README.md was trained on; of a folder of texts it is a text."""
    (tmp_path / "set" / "data").mkdir(parents=True)
    (tmp_path / "a.jsonl").rename(tmp_path / "set" / "data" / "a.jsonl")
    (tmp_path / "set" / "README.md").write_text("Licence: none\n")
    assert (make(tmp_path / "set") == expected).all() and "1 files such as README.md are about them" in caplog.text
    (tmp_path / "set" / "data" / "a.jsonl").rename(tmp_path / "set" / "a.txt")
    assert [one.name for one in find_sources([str(tmp_path / "set")], split="train")] == ["README.md", "a.txt"]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch):
    """Makes folders of these names refuse to be listed, as those without a permission do (root may list any)."""
    scandir = os.scandir

    def close(name: str) -> None:
        def listed(path: str | Path = "."):
            if Path(path).name == name:
                raise PermissionError(errno.EACCES, "denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", listed)

    return close


def test_a_link_out_of_a_folder_of_texts_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A data set that was cloned can hold a link to a private key, which was then trained on without a word. Links
    within the folder, and those of a download in Hugging Face's cache, are as they are meant."""
    key, root = tmp_path / "id_ed25519", tmp_path / "datasets--o--n" / "snapshots" / "revision" / "data"
    root.mkdir(parents=True)
    (blob := tmp_path / "datasets--o--n" / "blobs" / "0f").parent.mkdir()
    for path in (key, blob, root / "a.txt"):
        path.write_text("PRIVATE KEY")
    (root / "b.txt").symlink_to("../../../blobs/0f")
    (root / "c.txt").symlink_to("a.txt")
    assert len(find_sources([str(root)], split="train")) == 3 and not caplog.messages
    for name in ("notes.txt", "d.txt"):
        (root / name).symlink_to(key)
    assert len(find_sources([str(root)], split="train")) == 5
    assert f"2 files are links that lead out of the folder, such as {root}/d.txt to {key}:" in caplog.text


def test_nothing_below_a_folder_is_left_out_in_silence(tmp_path: Path, closed):
    """Neither in a folder that may not be listed, nor behind a link to a folder or to nothing; hidden ones are."""
    root = tmp_path / "corpus"
    (root / "part" / "deep").mkdir(parents=True)
    (root / ".cache").mkdir()
    (root / "names.txt").mkdir()
    for name in ("b.txt", "part/a.txt", "part/deep/a.txt.gz", "names.txt/c.md", ".cache/x.txt", ".y.txt", "z.pdf"):
        (root / name).write_text("x")
    (root / "linked.txt").symlink_to(root / "z.pdf")
    names = ["b.txt", "linked.txt", "names.txt/c.md", "part/a.txt", "part/deep/a.txt.gz"]
    assert [one.name for one in find_sources([str(root)], split="train")] == names
    for target, words in ((tmp_path / "nowhere", "leads to none"), (root / "part", "link to a folder")):
        (root / "part" / "more.txt").symlink_to(target)
        with pytest.raises(DatasetError, match=words):
            find_sources([str(root)], split="train")
        (root / "part" / "more.txt").unlink()
    closed("deep")
    with pytest.raises(PermissionError, match="deep"):
        find_sources([str(root)], split="train")


def test_the_walks_of_texts_and_of_images_refuse_the_same(tmp_path: Path, closed):
    def text() -> list[str]:
        return [one.name for one in find_sources([str(tmp_path)], split="train")]

    def images() -> list[str]:
        return sorted(one.name for source in find_images([str(tmp_path)], "label") for one in source.files)

    for name in ("blue", "red", ".git"):
        (tmp_path / name).mkdir()
        for file in ("1.PNG", "1.txt", ".1.png", ".1.txt"):
            (tmp_path / name / file).write_bytes(b"")
    assert (text(), images()) == (["blue/1.txt", "red/1.txt"], ["blue/1.PNG", "red/1.PNG"])
    for ending, find in ((".txt", text), (".png", images)):
        for target, words in ((tmp_path / "nowhere", "leads to none"), (tmp_path / "red", "link to a folder")):
            (tmp_path / "blue" / f"more{ending}").symlink_to(target)
            with pytest.raises(DatasetError, match=words):
                find()
            (tmp_path / "blue" / f"more{ending}").unlink()
    closed("blue")
    for find in (text, images):
        with pytest.raises(PermissionError, match="blue"):
            find()


def test_files_of_other_kinds_in_a_folder_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("a.jsonl", "b.jsonl.lz4", "c.csv", ".d.csv"):
        (tmp_path / name).write_bytes(b"")
    assert [one.name for one in find_sources([str(tmp_path)], split="train")] == ["a.jsonl"]
    assert f"{tmp_path}: 2 files are left out, such as {tmp_path}/" in caplog.text


def test_sizes_in_rows_and_in_bytes_are_not_compared(make, expected, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from datasets import Dataset

    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DatasetError, match="saved is counted in rows and a.jsonl in bytes"):
        make(tmp_path / "saved", tmp_path / "a.jsonl", out="mixed", weights=[1.0, 1.0])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    make(tmp_path / "b.jsonl.gz", tmp_path / "a.jsonl", out="packed", temperature=2.0, allow_overlap=True)
    assert "b.jsonl.gz is packed and a.jsonl is not" in caplog.text


def test_a_name_that_begins_with_a_tilde_and_is_no_account_is_a_file(make, expected, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").rename(tmp_path / "~no-such-account.jsonl")
    assert (make("~no-such-account.jsonl") == expected).all()


def test_text_by_line_paragraph_and_file(make, expected, tmp_path: Path):
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS))
    assert (make(tmp_path / "lines.txt") == expected).all()
    (tmp_path / "crlf.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(TEXTS).encode())
    assert (make(tmp_path / "crlf.txt", out="crlf") == expected).all()
    (tmp_path / "utf-16.txt").write_text("\n".join(TEXTS), encoding="utf-16-le")  # no mark at its beginning
    (tmp_path / "lost.txt").write_bytes("\n".join(TEXTS).encode() + bytes(4096))
    for name, line in (("utf-16", 1), ("lost", len(TEXTS))):
        with pytest.raises(DatasetError, match=rf"{name}\.txt:{line}: found a NUL character, expected UTF-8 text"):
            make(tmp_path / f"{name}.txt", out=name)
    (tmp_path / "paragraphs.txt").write_text("\n\n \n".join(TEXTS) + "\n\n")
    assert (make(tmp_path / "paragraphs.txt", out="p", fields=Fields(unit="paragraph")) == expected).all()
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03d}.txt").write_text(text)
    (folder / ".hidden.txt").write_text("not read")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    assert (make(folder, out="files", fields=Fields(unit="file")) == expected).all()


def test_parquet(make, expected, tmp_path: Path):
    path = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": range(60), "body": TEXTS}), path, row_group_size=7)
    assert (make(path, fields=Fields(text="body")) == expected).all()
    with pytest.raises(DatasetError, match="no field 'text'; it has n, body"):
        make(path, out="wrong")
    with pytest.raises(DatasetError, match="row 1: field 'n' is a whole number, expected text"):
        make(path, out="wrong", fields=Fields(text="n"))
    (tmp_path / "broken.parquet").write_bytes(path.read_bytes()[:100])
    with pytest.raises(DatasetError, match="not a readable Parquet file"):
        make(tmp_path / "broken.parquet", out="broken")


def test_saved_datasets(make, expected, tmp_path: Path):
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_dict({"text": TEXTS, "n": list(range(60))})
    whole.save_to_disk(tmp_path / "saved")
    assert (make(tmp_path / "saved") == expected).all()
    DatasetDict(train=whole, test=whole.select(range(5))).save_to_disk(tmp_path / "dict")
    assert (make(tmp_path / "dict", out="from-dict") == expected).all()
    test = {"validation": [str(tmp_path / "dict")], "validation_split": "test", "allow_overlap": True}
    both = make(tmp_path / "dict", out="both", **test)
    assert len(both) > len(expected)
    with pytest.raises(DatasetError, match="has the splits train, test, not 'validation'"):
        make(tmp_path / "dict", out="none", validation=[str(tmp_path / "dict")])


def test_several_inputs_are_read_in_their_order(make, expected, tmp_path: Path):
    first = write_json_lines(tmp_path / "z.jsonl", [{"text": t} for t in TEXTS[:25]])
    second = write_json_lines(tmp_path / "b.jsonl", [{"text": t} for t in TEXTS[25:]])
    assert (make(first, second) == expected).all()


def test_hub_names_go_to_the_datasets_library_offline_and_without_code(make, monkeypatch: pytest.MonkeyPatch, expected):
    import datasets

    calls = []

    def load(*arguments, **settings):
        calls.append((arguments, settings))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert (make("hub:corpus:it") == expected).all()
    assert (make("someone/corpus", out="plain") == expected).all()
    assert calls == [
        (("corpus", "it"), {"split": "train", "streaming": False}),
        (("someone/corpus", None), {"split": "train", "streaming": False}),
    ]


def test_a_hub_name_that_is_not_in_the_cache_is_one_error_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match="'nobody/nothing' .* cannot be loaded"):
        find_sources(["hub:nobody/nothing"], split="train")


def test_kinds_that_are_unknown_are_refused(make, tmp_path: Path):
    (tmp_path / "a.docx").write_bytes(b"PK")
    with pytest.raises(DatasetError, match="is of no known kind; expected a name ending in .jsonl"):
        make(tmp_path / "a.docx")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DatasetError, match="holds no file that can be read"):
        make(tmp_path / "nothing")


def test_masked_language_models_get_their_tokenizers_special_tokens(make, tmp_path: Path):
    bert = save_bert_tokenizer(tmp_path / "bert")
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])
    ids = make(path, tokenizer=bert, task="masked-lm").reshape(-1)
    first = [i for i, token in enumerate(ids) if token == 2]
    ends = [i for i, token in enumerate(ids) if token == 3]
    assert first[0] == 0 and len(first) - 1 <= len(ends) <= len(first)
    assert all(end + 1 == begin for end, begin in zip(ends, first[1:], strict=False))
    assert make(path, out="eos", tokenizer=bert, task="masked-lm", template="{text}{eos}").reshape(-1)[0] != 2


def test_pairs_with_labels_become_padded_rows(tmp_path: Path):
    bert = save_bert_tokenizer(tmp_path / "bert")
    first, second = "il gatto", "dorme sul tetto"
    records = [{"a": first, "b": second, "y": "yes"}, {"a": first, "b": first + " " + second * 9, "y": "no"}] * 10
    train = write_json_lines(tmp_path / "train.jsonl", records)
    request = Request(
        inputs=[str(train)],
        tokenizer=bert,
        out=tmp_path / "out",
        block_tokens=10,
        task="classification",
        fields=Fields(text="a", pair="b", label="y"),
        validation=[str(write_json_lines(tmp_path / "validation.jsonl", records[:2]))],
        allow_overlap=True,
    )
    dataset = prepare_dataset(request).dataset
    dataset.verify()
    manifest = dataset.manifest
    assert manifest.classes == ["no", "yes"] and manifest.pad_token_id == 0
    assert manifest.splits["train"].truncated_documents == 10
    ids, rows = dataset.split("train"), dataset.rows("train")
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(bert)
    expected = reference(first, second).input_ids
    assert ids[0].tolist() == expected + [0] * (10 - len(expected))
    assert rows[0].tolist() == [1, len(expected), 4]  # [CLS] il gatto [SEP] | dorme
    assert rows[1].tolist()[:2] == [0, 10] and ids[1][-1] == 3
    write_json_lines(tmp_path / "validation.jsonl", [{"a": first, "b": second, "y": "maybe"}])
    with pytest.raises(DatasetError, match=r"validation holds the labels 'maybe'"):
        prepare_dataset(
            dataclasses.replace(request, validation=[str(tmp_path / "validation.jsonl")], out=tmp_path / "other")
        )
    with pytest.raises(DatasetError, match="it has no labels|was prepared for"):
        from facility.dataset import PreparedDataset

        PreparedDataset(directory=tmp_path, manifest=dataclasses.replace(manifest, task="causal-lm")).rows("train")
    assert manifest.splits["train"].blocks == 20


def test_half_a_surrogate_pair_is_named_with_its_line_and_a_whole_one_is_text(make, tmp_path: Path):
    file = tmp_path / "half.jsonl"
    pair, half = "\\ud83d\\ude00", "\\ud83d"
    file.write_text(f'{{"text": "whole {pair}"}}\n{{"text": "half {half}"}}\n')
    with pytest.raises(
        DatasetError, match=r"half\.jsonl:2: field 'text' holds half of a surrogate pair .* character 5"
    ):
        make(file)
    file.write_text(f'{{"text": "whole {pair} {" and more" * 20}"}}\n' * 20)
    assert len(make(file, allow_overlap=True))
    file.write_text(f'{{"text": "whole", "label": "half {half}"}}\n')
    with pytest.raises(DatasetError, match=r"half\.jsonl:1: label 'label' holds half of a surrogate pair"):
        make(file, out="labels", task="classification", fields=Fields(label="label"))


def test_a_packed_file_that_is_damaged_is_an_error_that_names_it(make, tmp_path: Path):
    packed = bytearray(gzip.compress(b"\n".join(b'{"text": "%d"}' % n for n in range(100)), mtime=0))
    packed[10] = 0xFF  # no kind of block that deflate knows
    with pytest.raises(zlib.error):
        gzip.decompress(packed)
    (tmp_path / "damaged.jsonl.gz").write_bytes(packed)
    with pytest.raises(DatasetError, match=r"damaged\.jsonl\.gz cannot be read: .*invalid block type"):
        make(tmp_path / "damaged.jsonl.gz")


def test_files_whose_names_are_no_text_are_read_and_named_by_escapes(make, expected, tmp_path: Path):
    folder = tmp_path / "old"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text(lines)
    assert (make(folder) == expected).all()
    assert [source.name for source in open_dataset(tmp_path / "out").manifest.sources] == ["caf\\xe9.jsonl"]
