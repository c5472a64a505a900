"""The demo's material: two unlike texts, one tokenizer, a loadable model, two datasets; the same bytes every time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import demo as demo_material
from coordinator.demo import Sizes, documents, make_demo, make_model, split_documents, train_tokenizer, write_texts
from facility.dataset import open_dataset
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.manifest import verify_manifest
from tests.forked_trainers import variables

pytestmark = pytest.mark.xdist_group("demo material")
"""One process makes what these tests share."""

SMALL = Sizes(characters=60_000, vocabulary=400, block_tokens=32, hidden=32, layers=2, intermediate=64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables().items():
            patch.setenv(name, value)  # both preparations are forks
        report, there = make_demo(out, seed=7, sizes=SMALL)
    assert not there and report["parameters"] == verify_manifest(out / "model").parameters
    return out


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_tests_of_a_group_run_in_one_process(request: pytest.FixtureRequest):
    """pytest 9.2 and pytest-xdist 3.8 together forget the groups without a word, and each process makes the fixture."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        assert request.node.nodeid.endswith("@demo material")
    else:
        pytest.skip("tests run in one process anyway")


def test_the_model_is_the_first_of_a_federation_and_loads(made: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest = verify_manifest(made / "model")
    assert (manifest.kind, manifest.round, set(manifest.dtypes)) == ("model", 0, {"BF16"})
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    assert model.dtype == torch.bfloat16
    ids = AutoTokenizer.from_pretrained(made / "model")("def f(x):", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=ids).logits).all()
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in (made / "model").iterdir())


def test_both_datasets_are_whole_and_of_the_shared_tokenizer(made: Path):
    one, two = (open_dataset(made / "datasets" / name) for name in ("stdlib", "manual"))
    for dataset in (one, two):
        dataset.verify()
        assert dataset.split("train").shape[1] == 32 and len(dataset.split("validation")) > 10
    assert one.manifest.tokenizer_sha256 == two.manifest.tokenizer_sha256


def test_the_two_texts_are_unlike(made: Path):
    """Their token frequencies differ: the total variation distance is far from 0."""
    shares = []
    for name in ("stdlib", "manual"):
        counts = numpy.bincount(open_dataset(made / "datasets" / name).split("train").reshape(-1), minlength=400)
        shares.append(counts / counts.sum())
    assert 0.5 * numpy.abs(shares[0] - shares[1]).sum() > 0.2


def test_validation_is_not_in_training(made: Path):
    for name in ("stdlib", "manual"):
        splits = [
            {json.loads(line)["text"] for line in (made / "text" / name / f"{split}.jsonl").read_text().splitlines()}
            for split in ("train", "validation")
        ]
        assert all(splits) and not splits[0] & splits[1]


def test_the_same_seed_makes_the_same_bytes_and_another_seed_other_weights(made: Path, tmp_path: Path):
    write_texts(tmp_path, SMALL)
    tokenizer = train_tokenizer(tmp_path, SMALL)
    make_model(tmp_path, tokenizer, SMALL, 7)
    for part in ("text", "tokenizer", "model"):
        assert contents(tmp_path / part) == contents(made / part)
    (tmp_path / "model").rename(tmp_path / "first")
    make_model(tmp_path, tokenizer, SMALL, 8)
    assert contents(tmp_path / "model")["model.safetensors"] != contents(made / "model")["model.safetensors"]


def test_complete_material_is_recognised_and_other_material_is_not_overwritten(made: Path):
    before = contents(made)
    assert make_demo(made, seed=7, sizes=SMALL)[1]
    with pytest.raises(InputError, match="made otherwise"):
        make_demo(made, seed=8, sizes=SMALL)
    assert contents(made) == before


def test_what_is_being_made_is_told_and_datasets_that_nobody_wants_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`crossfed demo` said nothing for a minute on a slow machine; half of the wait of `crossfed quickstart --model
    demo` went into datasets that nothing read."""
    monkeypatch.setattr(demo_material, "train_tokenizer", lambda out, _: (out / "tokenizer").mkdir())
    monkeypatch.setattr(demo_material, "make_model", lambda out, *_: (out / "model").mkdir())
    monkeypatch.setattr(demo_material, "prepare_datasets", lambda out, _: (out / "datasets").mkdir())
    told: list[str] = []
    for datasets in (False, True):
        out = tmp_path / str(datasets)
        assert not make_demo(out, sizes=SMALL, datasets=datasets, progress=told.append)[1]
        assert make_demo(out, sizes=SMALL, datasets=datasets, progress=told.append)[1]
        assert (out / "datasets").exists() == datasets
    assert len(told) == 5 and told[-1] == "preparing a dataset for each facility"


def test_an_interrupted_run_is_made_again_and_strangers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "demo"
    monkeypatch.setattr(demo_material, "train_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make_demo(out, sizes=SMALL)
    assert (out / "text").is_dir() and not (out / "material.json").exists()
    with pytest.raises(KeyboardInterrupt):  # gets as far again: nothing that is left stands in its way
        make_demo(out, sizes=SMALL)
    (tmp_path / "other" / "model").mkdir(parents=True)
    with pytest.raises(InputError, match="holds model but no material"):
        make_demo(tmp_path / "other", sizes=SMALL)


def test_documents_are_the_text_cut_at_empty_lines():
    text = "\n\n".join(f"paragraph {i} " + "x" * 40 for i in range(100))
    found = documents([text], Sizes(document_characters=300))
    assert "\n\n".join(found) == text and all(300 <= len(d) + 2 < 400 for d in found[:-1])
    assert sum(map(len, documents([text] * 50, Sizes(document_characters=300, characters=10_000)))) < 10_400


@given(st.lists(st.sampled_from("abcde"), max_size=40), st.integers(2, 12))
def test_what_is_held_out_is_not_trained_on_even_where_the_manual_repeats_itself(found: list[str], every: int):
    splits = split_documents(found, Sizes(validation_every=every))
    assert splits["validation"] == found[every - 1 :: every]
    assert not set(splits["train"]) & set(splits["validation"])
    assert set(splits["train"]) | set(splits["validation"]) == set(found)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_torch_does_not_take_is_an_error_before_anything_is_made(tmp_path: Path, seed: int):
    with pytest.raises(ConfigurationError, match=f"--seed is {seed}, expected 0 or more, at most"):
        demo_material.main(["--out", str(tmp_path / "demo"), "--seed", str(seed)])
    assert not (tmp_path / "demo").exists()
