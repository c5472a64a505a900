"""Laws of `facility.prepare --task image-classification`: nothing is lost, and no file does more than be decoded."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from facility.dataset import DatasetError, open_dataset
from facility.exchange.checkpoints.image_processor import image_processor_digest
from facility.prepare import main
from facility.preparing.images.build import ImageRequest, prepare_images
from facility.preparing.images.decode import Decoder, ImageLimits
from facility.preparing.images.sources import find_images
from facility.preparing.resuming import part_of
from facility.rounds.dataset_check import check_dataset
from tests.training.images import PROCESSOR, SIDE

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def noisy(number: int, colour: tuple[int, int, int], side: int = SIDE) -> Image.Image:
    draw = np.random.default_rng(number)
    return Image.fromarray((np.array(colour) // 2 + draw.integers(0, 100, (side, side, 3))).astype(np.uint8))


def folders(root: Path, *, each: int = 12, side: int = SIDE, first: int = 0) -> Path:
    """A folder of classes with so many images each."""
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(first, first + each):
            noisy(number, colour, side).save(root / name / f"{number}.png")
    return root


def asked(root: Path, processor: Path, out: Path, **changes: Any) -> ImageRequest:
    fields: dict[str, Any] = {"inputs": [str(root)], "processor": processor, "out": out, "validation_share": 0.25}
    return ImageRequest(**(fields | changes))


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    held = io.BytesIO()
    image.save(held, form)
    return held.getvalue()


def test_a_folder_of_classes_gives_every_image_once_with_its_class(tmp_path: Path, processor: Path):
    root = folders(tmp_path / "images")
    dataset = prepare_images(asked(root, processor, tmp_path / "out")).dataset
    dataset.verify()
    assert dataset.manifest.classes == sorted(COLOURS)
    assert [len(dataset.split(s)) for s in ("train", "validation")] == [27, 9]
    stored = {
        (one.tobytes(), sorted(COLOURS)[label])
        for split in ("train", "validation")
        for one, label in zip(dataset.split(split), dataset.labels(split), strict=True)
    }
    expected = {
        (np.asarray(Image.open(path)).transpose(2, 0, 1).tobytes(), path.parent.name) for path in root.glob("*/*.png")
    }
    assert stored == expected
    assert len(set(dataset.labels("train").tolist())) == 3, "a share of the images holds every class"


def test_images_are_resized_as_the_models_processor_does(tmp_path: Path, processor: Path):
    from transformers import AutoImageProcessor

    root = folders(tmp_path / "images", side=41)
    dataset = prepare_images(asked(root, processor, tmp_path / "out")).dataset
    pixels = dataset.manifest.pixels
    assert pixels is not None and pixels.shape == (3, SIDE, SIDE)
    own = AutoImageProcessor.from_pretrained(processor, backend="pil")
    expected = {own([Image.open(p)], return_tensors="np")["pixel_values"][0].tobytes() for p in root.glob("*/*.png")}
    scale = np.array([pixels.mean, pixels.std], dtype=np.float32)[:, :, None, None]
    for split in ("train", "validation"):
        for row in dataset.split(split):
            values = row.reshape(pixels.shape).astype(np.float32) * np.float32(pixels.rescale)
            close = ((values - scale[0]) / scale[1]).ravel()
            assert any(np.allclose(close, np.frombuffer(one, np.float32), atol=1e-5) for one in expected)


def test_the_same_request_is_recognised_and_another_is_refused(tmp_path: Path, processor: Path):
    root = folders(tmp_path / "images")
    request = asked(root, processor, tmp_path / "out", processes=2)
    assert not prepare_images(request).reused
    before = (tmp_path / "out/train.npy").read_bytes()
    assert prepare_images(asked(root, processor, tmp_path / "out")).reused
    noisy(99, (9, 9, 9)).save(root / "red/new.png")
    with pytest.raises(DatasetError, match="differing: sources"):
        prepare_images(request)
    assert (tmp_path / "out/train.npy").read_bytes() == before


def test_metadata_names_the_classes_and_leads_to_no_other_folder(tmp_path: Path, processor: Path):
    root = folders(tmp_path / "images")
    (tmp_path / "secret.png").write_bytes(encoded(noisy(1, (0, 0, 0))))
    lines = [f"{p.relative_to(root)},{'odd' if int(p.stem) % 2 else 'even'}" for p in sorted(root.glob("*/*.png"))]
    (root / "metadata.csv").write_text("file_name,label\n" + "\n".join(lines))
    dataset = prepare_images(asked(root, processor, tmp_path / "out")).dataset
    assert dataset.manifest.classes == ["even", "odd"]
    for name in ("../secret.png", str(tmp_path / "secret.png"), "red/../../secret.png"):
        (root / "metadata.csv").write_text(f"file_name,label\n{name},x\n")
        with pytest.raises(DatasetError, match="leads out of"):
            prepare_images(asked(root, processor, tmp_path / "other"))
    (root / "metadata.csv").unlink()
    (root / "metadata.jsonl").write_text('{"file_name": "red/0.png", "label": ["x"]}\n')
    with pytest.raises(DatasetError, match="metadata.jsonl:1: label"):
        prepare_images(asked(root, processor, tmp_path / "other"))


def write_table(path: Path, images: list[Any], labels: list[Any], names: list[str] | None = None) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"image": images, "label": labels})
    if names:
        told = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(told)})
    pyarrow.parquet.write_table(table, path)
    return path


def test_parquet_as_datasets_writes_it_is_read_and_no_path_in_it_is_opened(tmp_path: Path, processor: Path):
    images = [{"bytes": encoded(noisy(n, (n, 0, 0))), "path": f"{n}.png"} for n in range(20)]
    table = write_table(tmp_path / "a.parquet", images, [n % 2 for n in range(20)], ["cat", "dog"])
    dataset = prepare_images(asked(table, processor, tmp_path / "out")).dataset
    assert dataset.manifest.classes == ["cat", "dog"] and len(dataset.split("train")) == 15
    table_of = write_table(tmp_path / "none.parquet", images, [n % 2 - 1 for n in range(20)], ["cat", "dog"])
    with pytest.raises(DatasetError, match="row 1: the label is -1, expected 0 to 1"):
        prepare_images(asked(table_of, processor, tmp_path / "none"))
    (tmp_path / "there.png").write_bytes(images[0]["bytes"])
    bare = write_table(tmp_path / "b.parquet", [{"bytes": None, "path": str(tmp_path / "there.png")}] * 8, [0, 1] * 4)
    with pytest.raises(DatasetError, match="holds no bytes"):
        prepare_images(asked(bare, processor, tmp_path / "other"))
    with pytest.raises(DatasetError, match="no column 'picture'"):
        prepare_images(asked(table, processor, tmp_path / "other", image_field="picture"))


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that says it holds side x side pixels of one value."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\0" * (side // 8 + 1) * 64)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def postscript() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(touched) (w) file closefile\nshowpage\n"


def animated() -> bytes:
    held = io.BytesIO()
    frames = [noisy(n, (0, 0, 0)) for n in range(3)]
    frames[0].save(held, "GIF", save_all=True, append_images=frames[1:])
    return held.getvalue()


HOSTILE = {
    "bomb of pixels": (bomb(50_000), "more than 178,956,970 pixels, at most"),
    "smaller bomb": (bomb(9_000), "9000 x 9000 pixels, at most"),
    "cut in the middle": (encoded(noisy(1, (9, 9, 9), 64))[:900], "cannot be decoded"),
    "cut photograph": (encoded(noisy(1, (9, 9, 9), 64), "JPEG")[:700], "cannot be decoded"),
    "no image": (b"GIF89a but not really", "cannot be decoded"),
    "nothing": (b"", "cannot be decoded"),
    "PostScript by another name": (postscript(), "cannot be decoded"),
    "sixteen bits": (encoded(Image.fromarray(np.full((8, 8), 999, np.uint16))), "values of more than eight bits"),
    "several pictures": (animated(), "holds 3 pictures"),
    "more bytes than allowed": (b"\x89PNG" + b"\0" * 300_000, "at most 200,000 are read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_plain_image_is_refused_by_name_or_counted(
    tmp_path: Path, processor: Path, name: str, caplog
):
    data, sentence = HOSTILE[name]
    root = folders(tmp_path / "images", each=4)
    (root / "red/strange.png").write_bytes(data)
    limits = ImageLimits(bytes=200_000)
    with pytest.raises(DatasetError, match=sentence) as refused:
        prepare_images(asked(root, processor, tmp_path / "out", limits=limits))
    assert "red/strange.png" in str(refused.value) and not (tmp_path / "out").exists()
    request = asked(root, processor, tmp_path / "out", limits=limits, skip_unreadable=True)
    splits = prepare_images(request).dataset.manifest.splits
    assert sum(one.documents for one in splits.values()) == 12
    assert sum(one.dropped_documents for one in splits.values()) == 1
    assert "red/strange.png" in caplog.text


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK"])
def test_images_of_eight_bits_or_fewer_become_what_the_model_takes(tmp_path: Path, processor: Path, mode: str):
    root = folders(tmp_path / "images", each=4)
    image = noisy(5, (50, 60, 70)).convert(mode)
    suffix = "jpg" if mode == "CMYK" else "png"
    image.save(root / "red" / f"strange.{suffix}")
    expected = np.asarray(Image.open(root / "red" / f"strange.{suffix}").convert("RGB")).transpose(2, 0, 1).tobytes()
    dataset = prepare_images(asked(root, processor, tmp_path / "out")).dataset
    assert any(row.tobytes() == expected for split in ("train", "validation") for row in dataset.split(split))


def test_files_whose_names_are_no_text_are_read_and_folders_are_refused_by_name(tmp_path: Path, processor: Path):
    root, odd = folders(tmp_path / "images"), os.fsdecode(b"caf\xe9")
    (root / "red" / "0.png").rename(root / "red" / f"{odd}.png")
    dataset = prepare_images(asked(root, processor, tmp_path / "out")).dataset
    assert sum(split.documents for split in dataset.manifest.splits.values()) == 36
    (root / "red").rename(root / odd)
    with pytest.raises(DatasetError, match=r"caf\\xe9: the folder's name is a class, and is no UTF-8 text: rename it"):
        prepare_images(asked(root, processor, tmp_path / "other"))


def test_two_processes_do_not_make_one_dataset_of_images(tmp_path: Path, processor: Path):
    """The second replaced what the first had made, though it was not asked to."""
    request = asked(folders(tmp_path / "images"), processor, tmp_path / "out")
    with part_of(request.out, {}, known=False), pytest.raises(DatasetError, match="written by another process"):
        prepare_images(request)
    prepare_images(request)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["images", "out"]


CLASSES_OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "ViT": {},
    "Bit": {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
    "MobileViT": {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
    "EfficientNet": {"rescale_factor": 1 / 127.5, "rescale_offset": True},
}


@pytest.mark.parametrize("family", CLASSES_OF_THEIR_OWN)
def test_values_are_scaled_as_the_models_processor_does_whatever_its_file_says(tmp_path: Path, family: str):
    """A file may leave means to its class (Bit), know none (MobileViT), or divide twice (EfficientNet): values were
    scaled by means of 0.5, and EfficientNet's cut off at 255."""
    import torch
    from transformers import AutoImageProcessor

    from facility.exchange.messages.images import ImageSettings
    from facility.training.data.images import ImageClassification

    settings = {"image_processor_type": f"{family}ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | CLASSES_OF_THEIR_OWN[family]))
    image = noisy(1, (200, 100, 50), 23)
    decoder = Decoder(tmp_path, ImageLimits())
    values = torch.from_numpy(decoder.decode(encoded(image), "x"))[None]
    task = ImageClassification(decoder.pixels, ImageSettings())
    expected = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")([image], return_tensors="np")["pixel_values"]
    assert np.abs(task.on_device({"pixel_values": values})["pixel_values"].numpy() - expected).max() < 1e-5


def test_links_that_leave_the_folder_and_links_to_folders_are_refused(tmp_path: Path, processor: Path):
    (tmp_path / "secret.png").write_bytes(encoded(noisy(1, (0, 0, 0))))
    for number, (name, target, sentence) in enumerate(
        (
            ("red/out.png", tmp_path / "secret.png", "leads out of"),
            ("elsewhere", tmp_path, "a link to a folder"),
            ("red/gone.png", Path("missing.png"), "not a regular file"),
        )
    ):
        root = folders(tmp_path / f"images-{number}", each=3)
        (root / name).symlink_to(target)
        with pytest.raises(DatasetError, match=sentence):
            prepare_images(asked(root, processor, tmp_path / "out"))


def test_what_a_folder_of_images_holds_beside_them_is_not_left_out_in_silence(
    tmp_path: Path, processor: Path, caplog: pytest.LogCaptureFixture
):
    """Classes beside a Parquet file were not read, nor Parquet files in folders; a hidden one was."""
    root = folders(tmp_path / "images", each=3)
    (root / ".hidden.parquet").write_bytes(b"")
    assert len(find_images([str(root)], "label")[0].files) == 9
    (root / "data").mkdir()
    (root / "data" / "a.parquet").write_bytes(b"")
    with pytest.raises(
        DatasetError, match=r"holds Parquet files \(1, such as data/a.parquet\) and images \(9, such as"
    ):
        prepare_images(asked(root, processor, tmp_path / "out"))
    (root / "data" / "a.parquet").unlink()
    lines = [f"{name}/{number}.png,{name}" for name in COLOURS for number in range(3)]
    (root / "metadata.csv").write_text("\n".join(["file_name,label", *lines[1:]]))
    prepare_images(asked(root, processor, tmp_path / "out"))
    assert "1 images are not in metadata.csv and are left out, such as" in caplog.text
    (root / "metadata.csv").write_text("\n".join(["file_name,label", *lines, "blue/0.png,red"]))
    with pytest.raises(DatasetError, match="names 'blue/0.png' as 'blue' and as 'red'"):
        prepare_images(asked(root, processor, tmp_path / "twice"))


def test_classes_can_be_given_and_a_facility_may_lack_some(tmp_path: Path, processor: Path):
    root = folders(tmp_path / "images")
    names = ["red", "violet", "blue", "green"]
    dataset = prepare_images(asked(root, processor, tmp_path / "out", classes=names)).dataset
    assert dataset.manifest.classes == names and set(dataset.labels("train").tolist()) == {0, 2, 3}
    with pytest.raises(DatasetError, match="of the class 'red', which --classes does not name"):
        prepare_images(asked(root, processor, tmp_path / "other", classes=["blue", "green"], skip_unreadable=True))


def test_copies_of_training_images_in_the_validation_images_are_refused(tmp_path: Path, processor: Path):
    train, validation = folders(tmp_path / "train"), folders(tmp_path / "validation", each=11, first=100)
    Image.open(train / "red/0.png").save(validation / "red/copy.bmp")
    request = asked(train, processor, tmp_path / "out", validation=[str(validation)])
    with pytest.raises(DatasetError, match="1 of 34 documents are in training"):
        prepare_images(request)


def test_folders_that_are_splits_and_images_without_a_class_are_explained(tmp_path: Path, processor: Path):
    folders(tmp_path / "images/train")
    folders(tmp_path / "images/test", first=50)
    with pytest.raises(DatasetError, match="are test, train, which are splits and no classes: give --input"):
        prepare_images(asked(tmp_path / "images", processor, tmp_path / "out"))
    noisy(1, (1, 1, 1)).save(tmp_path / "images/train/alone.png")
    with pytest.raises(DatasetError, match="'alone.png' beside its folders"):
        prepare_images(asked(tmp_path / "images/train", processor, tmp_path / "out"))
    with pytest.raises(DatasetError, match="holds no preprocessor_config.json"):
        prepare_images(asked(tmp_path / "images/test", tmp_path, tmp_path / "out"))


def test_the_digest_of_an_image_processor_is_of_its_meaning(tmp_path: Path, processor: Path):
    from transformers import AutoImageProcessor

    AutoImageProcessor.from_pretrained(processor, backend="pil").save_pretrained(tmp_path / "again")
    assert image_processor_digest(tmp_path / "again") == image_processor_digest(processor)
    for key, value in (("image_mean", [0.5, 0.5, 0.5]), ("size", {"height": 8, "width": 8}), ("resample", 0)):
        (tmp_path / "again/preprocessor_config.json").write_text(json.dumps(PROCESSOR | {key: value}))
        assert image_processor_digest(tmp_path / "again") != image_processor_digest(processor), key


def test_altered_values_or_classes_are_found_before_a_round(tmp_path: Path, processor: Path):
    out = tmp_path / "out"
    prepare_images(asked(folders(tmp_path / "images"), processor, out))
    (tmp_path / "state").mkdir()
    assert check_dataset(out, tmp_path / "state") and not check_dataset(out, tmp_path / "state")
    labels = np.load(out / "train.rows.npy")
    np.save(out / "train.rows.npy", labels[::-1])
    with pytest.raises(DatasetError, match="train.rows.npy has sha256"):
        check_dataset(out, tmp_path / "state")
    np.save(out / "train.rows.npy", labels[1:])
    with pytest.raises(DatasetError, match="says int32 of shape"):
        open_dataset(out)


def test_the_command_prepares_and_names_options_of_the_other_kind(tmp_path: Path, processor: Path, capsys):
    root = folders(tmp_path / "images")
    command = ["--task", "image-classification", "--input", str(root), "--out", str(tmp_path / "out")]
    assert main([*command, "--model", str(processor)]) == 0
    shown = capsys.readouterr().out
    assert "train: 35 images of 3 x 16 x 16" in shown and "3 classes: blue, green, red" in shown
    for more, sentence in (
        ([], "--image-processor"),
        (["--model", str(processor), "--block-tokens", "8"], "--block-tokens is for text"),
    ):
        with pytest.raises(SystemExit):
            main([*command, *more])
        assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--input", str(root), "--out", str(tmp_path / "text"), "--tokenizer", str(processor)])
    assert "text needs --block-tokens" in capsys.readouterr().err
