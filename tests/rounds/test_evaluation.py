"""Scores of a round are those of lm-eval's own command, on tasks that need no network."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from facility.exchange.errors import CheckpointError, ConfigurationError, InputError, TransientError
from facility.exchange.files.durable import write_json
from facility.exchange.messages.comparison import FOLDERS, GLOBAL, INITIAL, MODELS, tasks_of, with_figures
from facility.exchange.messages.evaluation import SCORES, EvaluationSettings, FacilityEvaluation, Score, scores_of
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.rounds import evaluation
from facility.rounds.evaluation import OFFLINE, evaluate_model, scores_in, whole, write_scores_of_models
from tests.aggregation.test_adapter_export import logits, round_model
from tests.distributed import Started
from tests.pico import save_pico

TASK = """
task: count_up
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def write_task(folder: Path) -> Path:
    """A task of made-up questions over a local file."""
    folder.mkdir()
    rows = [{"question": f"after {n} comes", "choices": [f" {n + 1}", f" {n - 1}"], "answer": 0} for n in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "count_up.yaml").write_text(TASK % (folder / "data.jsonl"))
    return folder


def write_model(folder: Path, seed: int = 0) -> Path:
    """A pico model with a tokenizer that was trained on a line of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.pico import save_pico

    save_pico(folder, seed=seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(["after 0 1 2 3 4 5 6 7 8 9 comes"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.save_pretrained(folder)
    return folder


def by_command(model: Path, tasks: Path, out: Path) -> dict[str, tuple[float, float]]:
    """Scores of lm-eval's own command, with their errors, by metric."""
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}"]
    command += ["--device", "cpu", "--tasks", "count_up", "--include_path", str(tasks), "--output_path", str(out)]
    subprocess.run([*command, "--batch_size", "8"], check=True, env=os.environ | OFFLINE, capture_output=True)
    found = json.loads(next(out.rglob("results*.json")).read_text())["results"]["count_up"]
    return {name: (found[f"{name},none"], found[f"{name}_stderr,none"]) for name in ("acc", "acc_norm")}


@pytest.mark.slow
def test_scores_equal_those_of_the_command(tmp_path: Path):
    pytest.importorskip("lm_eval")
    tasks, model = write_task(tmp_path / "tasks"), write_model(tmp_path / "model")
    settings = EvaluationSettings(tasks=["count_up"], directory=str(tasks))
    ours = evaluate_model(model, settings, dataset=tmp_path, device="cpu")
    assert {one.metric: (one.value, one.stderr) for one in ours} == by_command(model, tasks, tmp_path / "out")


STAND_IN = """
import json, os, pathlib, sys
names = [name for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name]
offline = sorted(name for name in os.environ if name.endswith("OFFLINE"))
out = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1])
(out / "results.json").write_text(json.dumps({"results": {" ".join(names + offline): {"acc,none": 1.0}}}))
"""


def test_it_is_no_rank_of_a_job_and_asks_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Under torchrun it found LOCAL_RANK, and waited for ranks that did not come or ended for want of RANK."""
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("")
    (tmp_path / "lm_eval" / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    caplog.set_level("INFO")
    (score,) = evaluate_model(tmp_path, EvaluationSettings(tasks=["any"]), dataset=tmp_path)
    assert "lm-eval scores any, which may take up to" in caplog.text, "a job is not silent for as long as that takes"
    assert score.task.split() == [f"HF_{one}_OFFLINE" for one in ("DATASETS", "EVALUATE", "HUB")] + [
        "TRANSFORMERS_OFFLINE"
    ]


WITHOUT_END = """
import os, pathlib, time
pathlib.Path("started.tmp").write_text(str(os.getpid()))
os.rename("started.tmp", os.environ["MARK"])
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_process_that_started_it(number: signal.Signals, tmp_path: Path):
    """In a session of its own it heard no signal of its job's, and held the device without end."""
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("")
    (tmp_path / "lm_eval" / "__main__.py").write_text(WITHOUT_END)
    write_json(tmp_path / "settings.json", {"tasks": ["any"]})
    places = {"--model": save_pico(tmp_path / "model"), "--settings": tmp_path / "settings.json"}
    arguments = [str(word) for pair in (places | {"--out": tmp_path / "out.json"}).items() for word in pair]
    mark = tmp_path / "started"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MARK": str(mark), "TMPDIR": str(tmp_path)}
    started = Started("facility.evaluate", arguments, tmp_path / "said", environment)
    try:
        holds(mark.exists, started)
        watched = os.pidfd_open(int(mark.read_text()))
        started.signal(number)
        assert started.ended().returncode == -number
        assert select.select([watched], [], [], 60)[0], "lm-eval goes on"
    finally:
        started.kill()


def holds(condition: Callable[[], bool], started: Started) -> None:
    """Wait until the condition holds; fail where the process ends before."""
    deadline = time.monotonic() + 200
    while not condition():
        assert started.process.is_alive() and time.monotonic() < deadline, started.err.read_text()
        time.sleep(0.02)


def test_adapters_alone_are_evaluated_over_their_base_and_refused_without_one(tmp_path: Path):
    """transformers loads what lm-eval is given as base and adapters together, whatever the file of the adapters."""
    base, model, folder = save_pico(tmp_path / "base"), tmp_path / "model", tmp_path / "folder"
    wanted = round_model(model, base, "llama", whole=False)
    with pytest.raises(InputError, match=r"holds adapters alone.*evaluation\.facility"):
        whole(model, "", tmp_path)
    folder.mkdir()
    assert logits(AutoModelForCausalLM.from_pretrained(whole(model, str(base), folder))).equal(wanted)
    assert whole(base, str(base), folder) == base, "the model of the first round has no adapters yet"


@pytest.mark.nightly
@pytest.mark.slow
def test_scores_in_the_matrix_equal_those_of_the_command_model_by_model(tmp_path: Path):
    """A directory of models as a facility gets it after the last round; a model that lm-eval refuses has no scores."""
    pytest.importorskip("lm_eval")
    tasks, sent, out = write_task(tmp_path / "tasks"), tmp_path / "sent", tmp_path / "out"
    folders = [GLOBAL, INITIAL, "update.b"]
    for seed, folder in enumerate(folders[:2]):
        write_model(sent / folder, seed=seed)
    (sent / folders[2]).mkdir()
    (sent / folders[2] / "config.json").write_text("{}")
    write_manifest(sent, Manifest(kind=MODELS, federation="f", round=2, extra={FOLDERS: folders}))
    out.mkdir()
    write_manifest(out, Manifest(kind="update", federation="f", round=2, facility="a", base_sha256="0" * 64))
    with_figures(out, [])
    evaluation = FacilityEvaluation(tasks=["count_up"], directory=str(tasks))
    settings = FacilitySettings(
        federation="f", facility="a", rounds=2, seed=0, training=TrainingSettings(device="cpu"), evaluation=evaluation
    )
    write_scores_of_models({name: sent / name for name in folders}, out, settings, dataset=tmp_path)
    told = tasks_of(read_manifest(out), folders)
    expected = {folder: by_command(sent / folder, tasks, tmp_path / f"by-{folder}") for folder in folders[:2]}
    assert expected[GLOBAL] != expected[INITIAL]  # else one could stand for the other
    assert {
        folder: {one["metric"]: (one["value"], one["stderr"]) for one in told if one["model"] == folder}
        for folder in folders[:2]
    } == expected
    assert {one["model"] for one in told} == set(folders[:2])


@pytest.mark.nightly
@pytest.mark.slow
def test_an_evaluation_that_fails_says_why(tmp_path: Path):
    pytest.importorskip("lm_eval")
    with pytest.raises(TransientError, match="lm-eval ended with code"):
        evaluate_model(tmp_path, EvaluationSettings(tasks=["no_such_task"]), dataset=tmp_path, device="cpu")


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_attention_of_the_hub_is_not_fetched_by_lm_eval_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    named = {"attn_implementation": "kernels-community/flash-attn2"}
    (tmp_path / "config.json").write_text(json.dumps(named if place == "top" else {place: named}))
    monkeypatch.setattr(evaluation, "command", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(CheckpointError, match="may be fetched from the hub, and is code"):
        evaluate_model(tmp_path, EvaluationSettings(tasks=["a"]), dataset=tmp_path, device="cpu")


def test_nor_does_lm_eval_load_adapters_that_name_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """peft would import it; what it writes of plain adapters itself is loaded."""
    plain = {"peft_type": "LORA", "megatron_config": None, "megatron_core": "megatron.core"}
    monkeypatch.setattr(evaluation, "whole", lambda *_: pytest.fail("it was loaded"))
    for changes, expected in (({}, pytest.fail.Exception), ({"megatron_config": {"x": 1}}, InputError)):
        (tmp_path / "adapter_config.json").write_text(json.dumps(plain | changes))
        with pytest.raises(expected):
            evaluate_model(tmp_path, EvaluationSettings(tasks=["a"]), dataset=tmp_path, device="cpu")


@pytest.mark.parametrize("kept", [False, True])
def test_what_lm_eval_said_leaves_only_where_a_jobs_output_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
):
    """It may be a document of the site's own tasks."""
    monkeypatch.setenv("CROSSFED_JOB_OUTPUT", "0" if kept else "1")
    says = [sys.executable, "-c", "raise SystemExit('the patient of bed 7')"]
    monkeypatch.setattr(evaluation, "command", lambda *_, **__: says)
    with pytest.raises(TransientError, match="lm-eval ended with code 1") as error:
        evaluate_model(tmp_path, EvaluationSettings(tasks=["a"]), dataset=tmp_path, device="cpu")
    assert ("bed 7" in str(error.value)) is not kept
    assert ("bed 7" in caplog.text) is kept, "the site itself can read it in the job's log"


def test_figures_are_taken_with_their_errors_and_nothing_else():
    told = {"b": {"alias": "b", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 0.25, "f1_stderr,strict": "N/A"}}
    assert scores_in(told | {"a": {"perplexity,none": float("inf")}}) == [
        Score(task="b", metric="acc", value=0.5, stderr=0.1),
        Score(task="b", metric="f1 (strict)", value=0.25),
    ]


@pytest.mark.parametrize(
    "told",
    [
        [],
        {"results": {}},
        {"results": [1]},
        {"results": [{"task": "a", "metric": "m"}]},
        {"results": [{"task": "a\x1b", "metric": "m", "value": 1.0}]},
        {"results": [{"task": "a", "metric": "m", "value": 1e300}]},
        {"results": [{"task": "validation", "metric": "perplexity", "value": 1.01}]},
        {"results": [], "text": "x"},
    ],
)
def test_scores_that_cannot_be_are_not_recorded(told: object):
    assert scores_of(Manifest(kind="update", federation="f", round=0, extra={SCORES: told})) == {}


def test_when_an_evaluation_is_due():
    settings = EvaluationSettings(tasks=["a"], every=3)
    assert [number for number in range(9) if settings.due(number, 8)] == [0, 3, 6, 8]
    assert not EvaluationSettings().due(8, 8)
    with pytest.raises(ConfigurationError, match="tasks"):
        EvaluationSettings(tasks=["a --trust_remote_code"])
