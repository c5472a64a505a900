"""Planner, checks before a run and trainer state the same memory for the same layout."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from coordinator import plan as planner
from coordinator.config.federation import read_federation
from coordinator.memory.figures import model_figures
from coordinator.memory.need import needed_by_plan, needed_bytes
from coordinator.memory.weights import weights_of
from coordinator.planning.for_training import trained_at, with_memory
from coordinator.preflight.check import memory_row
from coordinator.problem.read import problem_from_json
from coordinator.simulation.pipelines.plans import simulate
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.plan import read_plan
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.validation import parse_dataclass
from tests.examples import THOROUGH
from tests.federations import write_federation
from tests.pico import pico_config, save_pico

WIDE = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
TOKENS = 16
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "adafactor": {"optimizer": "adafactor", "layout": {"activation_checkpointing": "full"}},
    "apart": {"sync": {"policy": "local", "optimizer_state": "average"}, "proximal": 0.1},
    "lora": {"lora": {"rank": 4}},
    "half": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "compute_dtype": "bfloat16"},
    "recomputed": {
        "lora": {"rank": 4},
        "compute_dtype": "bfloat16",
        "layout": {"activation_checkpointing": "selective"},
    },
    "dora": {"lora": {"rank": 4, "dora": True}, "compute_dtype": "bfloat16"},
    "head": {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}, "compute_dtype": "bfloat16"},
    "qlora": {"lora": {"rank": 4, "quantize_base": "nf4"}},
    "qlora16": {"lora": {"rank": 4, "quantize_base": "fp4"}, "compute_dtype": "bfloat16"},
}


def test_figures_that_differ_by_block_or_stage_count_at_their_largest(tmp_path: Path):
    """As Gemma 3n's widths and SegFormer's heads."""
    path = save_pico(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    plain = model_figures(path)
    lists = {"intermediate_size": [config["intermediate_size"], 8], "num_attention_heads": [1, 2, plain.heads]}
    (path / "config.json").write_text(json.dumps(config | lists))
    assert model_figures(path) == plain
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": {"text": 64}}))
    with pytest.raises(ValueError, match="hidden_size is"):
        model_figures(path)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gpt_neo", "distilbert", "mpt", "ctrl", "xglm", "xlm", "t5", "opt"]
)
def test_figures_have_a_familys_own_names(tmp_path: Path, family: str):
    """The library gives them one name each (`attribute_map`); in the file they have their own."""
    config = AutoConfig.for_model(family)
    path = save_pico(tmp_path / "model")
    config.save_pretrained(path)
    found = model_figures(path)
    assert found.hidden == config.hidden_size and found.layers == config.num_hidden_layers
    assert found.heads == config.num_attention_heads


def settings(kind: str, **more: Any) -> TrainingSettings:
    chosen = TRAININGS[kind] | {"batch_sequences": 8} | more
    chosen["layout"] = TRAININGS[kind].get("layout", {}) | more.get("layout", {})
    found: TrainingSettings = parse_dataclass(TrainingSettings, chosen)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico(tmp_path_factory.mktemp("base"), dtype="bfloat16", **WIDE)


@pytest.fixture
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is quantised here, only counted: the package is not needed."""
    from facility.training import quantized_base

    monkeypatch.setattr(quantized_base, "QUANTIZES", "packaging")


@functools.cache
def inspected() -> Any:
    """The units of the one model that all trainings here have."""
    from facility.training.data.tasks import CausalLM
    from facility.training.parallel.split import inspect_model

    return inspect_model(pico_config(**WIDE), CausalLM().factory, "sdpa", TOKENS)


@pytest.mark.usefixtures("without_the_package")
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("kind", ["full", "bfloat16", "lora", "half", "qlora16"])
def test_with_differential_privacy_as_the_trainer_finds(base: Path, kind: str, rows: int):
    """Rows of a pass come from the size of their gradients, not from the batch: 256 documents counted at once."""
    import torch

    from facility.training.data.tasks import CausalLM
    from facility.training.memory import predicted_bytes, rank_layout
    from facility.training.model import Attention
    from facility.training.parallel.arrange import layout_of_settings
    from facility.training.parallel.assemble import build_meta_model
    from facility.training.privacy.micro_batches import layout_of_records
    from facility.training.processes.ranks import Ranks

    training = settings(kind, batch_sequences=256, micro_batch_sequences=rows)
    config = pico_config(**WIDE)
    skeleton = build_meta_model(config, CausalLM(), Attention(name="sdpa", reason=""), training)
    here = Ranks(rank=0, world=1, local_rank=0, local_world=1, device=torch.device("cpu"))
    layout = layout_of_settings(here, training, blocks=config.num_hidden_layers, block_tokens=TOKENS)
    rank = layout_of_records(rank_layout(layout, here, 0, training), skeleton, training, ranks=1)
    found = predicted_bytes(skeleton, None, rank, training, config)
    assert sum(found.values()) == needed_bytes(model_figures(base), training, TOKENS, 1, device="cpu", private=True)
    plain = needed_bytes(model_figures(base), training, TOKENS, 1, device="cpu")
    assert rows or 1.5 * sum(found.values()) < plain, "what a batch of 256 would need without"


@pytest.mark.usefixtures("without_the_package")
@pytest.mark.parametrize("ranks", [{}, {"stages": 2}, {"shards": 2}], ids=["one", "stages", "shards"])
@pytest.mark.parametrize("kind", list(TRAININGS))
def test_from_shapes_as_from_the_model_itself(base: Path, kind: str, ranks: dict[str, int]):
    import torch

    from facility.exchange.checkpoints.checkpoint import open_checkpoint
    from facility.training.data.tasks import CausalLM
    from facility.training.half_base import hold_in_half
    from facility.training.memory import predicted_bytes, rank_layout
    from facility.training.model import Attention
    from facility.training.parallel.arrange import layout_of_settings
    from facility.training.parallel.assemble import build_meta_model
    from facility.training.processes.ranks import Ranks

    training = settings(kind, layout={"stages": ranks.get("stages", 1)})
    world = 2 if ranks else 1
    config = pico_config(**WIDE)
    skeleton = build_meta_model(config, CausalLM(), Attention(name="sdpa", reason=""), training)
    hold_in_half(skeleton, open_checkpoint(base), training)
    found = []
    for rank in range(world):
        here = Ranks(rank=rank, world=world, local_rank=rank, local_world=world, device=torch.device("cpu"))
        layout = layout_of_settings(here, training, blocks=config.num_hidden_layers, block_tokens=TOKENS)
        structure = inspected() if layout.units else None
        held = rank_layout(layout, here, 0, training)
        found.append(sum(predicted_bytes(skeleton, structure, held, training, config).values()))
    assert max(found) == needed_bytes(model_figures(base), training, TOKENS, world, device="cpu")


@pytest.mark.parametrize("kind", list(TRAININGS))
def test_what_is_trained_is_what_travels(base: Path, kind: str):
    model, training = model_figures(base), settings(kind)
    held = weights_of(model, training, chunked=False)
    assert sum(one.count for one in held if one.trained) == model.trained(training)
    added = sum(one.count for one in held if "lora_" in one.name)
    assert sum(one.count for one in held) == model.parameters + added
    assert (added > 0) == (training.lora.rank > 0)


def profile(blocks: int, memory_megabytes: float = 64.0, devices: int = 2) -> dict[str, Any]:
    """Equal devices, as `facility.measure` writes them; sizes of units of another training."""
    itself = np.eye(devices, dtype=bool)
    rows, latency = np.where(itself, 1.0, 1e3).tolist(), np.where(itself, 0.0, 0.1).tolist()
    unit = {"parameter_bytes": 1e3, "activation_bytes": 10.0, "stored_bytes": 10.0, "forward_ms": 1, "backward_ms": 2}
    return {
        "format": 1,
        "devices": [{"id": f"here:cpu{n}", "memory_bytes": memory_megabytes * 1e6} for n in range(devices)],
        "links": {"latency_ms": latency, "bandwidth_megabytes_per_second": rows},
        "units": [
            {"kind": "embedding", **unit},
            {"kind": "block", "count": blocks, **unit},
            {"kind": "head", **unit},
        ],
        "profile": {"tokens": TOKENS},
    }


@pytest.fixture(scope="module")
def federations(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A federation of one facility for each kind of training."""

    @functools.cache
    def of(kind: str) -> Path:
        training = TRAININGS[kind] | {"batch_sequences": 8, "ranks": 2, "micro_batch_sequences": 2}
        return write_federation(tmp_path_factory.mktemp(kind), [kind], training=training, size=WIDE)

    return of


@pytest.fixture(scope="module")
def federation(federations: Callable[[str], Path]) -> Path:
    return federations("full")


@pytest.mark.parametrize("kind", list(TRAININGS))
@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_states_what_check_states(tmp_path: Path, federations: Callable[[str], Path], kind: str, stages: int):
    federation = federations(kind)
    (tmp_path / "profile.json").write_text(json.dumps(profile(blocks=4)))
    command = ["--problem", tmp_path / "profile.json", "--out", tmp_path / "plan.json", "--iterations", 1]
    command += ["--federation", federation, "--facility", kind, "--stages", stages, "--replicas", 1]
    assert planner.main([str(word) for word in command]) == 0
    plan, read = read_plan(tmp_path / "plan.json"), read_federation(federation)
    facility = next(one for one in read.facilities if one.name == kind)
    training, model = facility.training, model_figures(read.path(read.model))
    used = {device for row in plan.grid for device in row}
    largest = max(load.memory_bytes for load in plan.loads if load.device in used)
    layout = {"stages": stages, "schedule": plan.schedule} | (
        {"units": [list(pair) for pair in plan.stage_units]} if stages > 1 else {}
    )
    same = settings(kind, layout=layout, micro_batch_sequences=plan.micro_batch_samples, ranks=stages)
    assert largest == needed_bytes(model, same, TOKENS, stages, device="cpu")
    planned = SimpleNamespace(
        name=kind,
        deployment=facility.deployment,
        training=parse_dataclass(
            TrainingSettings,
            TRAININGS[kind]
            | {"layout": {"plan": str(tmp_path / "plan.json")}, "ranks": stages}
            | {"batch_sequences": plan.replica_micro_batches[0] * plan.micro_batch_samples},
        ),
    )
    row = memory_row(read, planned, model, TOKENS, "")  # type: ignore[arg-type]
    assert row.verdict == "ok" and "as its plan says" in row.found
    assert max(needed_by_plan(model, training, plan, TOKENS, device="cpu").values()) == largest


@pytest.mark.parametrize("kind", list(TRAININGS))
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("drift", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shards", [0, 2, 8] if THOROUGH else [0, 8])
def test_the_search_never_takes_a_plan_for_smaller_than_it_is(
    federations: Callable[[str], Path], kind: str, replicas: int, drift: bool, shards: int
):
    """What the planner's sums say of a layout, with what leaves the devices beforehand, covers what is stated."""
    raw = profile(blocks=4, devices=4)
    trained = trained_at(read_federation(federations(kind)), kind, raw)
    layout = replace(trained.training.layout, shards=shards)
    drift = drift and trained.training.sync.policy == "allreduce"  # other policies exclude it
    trained = replace(trained, training=replace(trained.training, drift_correction=drift, layout=layout))
    measured = problem_from_json(raw | {"batch_samples": 8})
    problem = with_memory(measured, trained)  # type: ignore[arg-type]
    set_aside = raw["devices"][0]["memory_bytes"] - problem.memory[0]
    for cut in (1, 2, 4):
        for schedule in ("gpipe", "1f1b"):
            plan = planner.Plan(
                stages=2,
                replicas=replicas,
                grid=((0, 1), (2, 3)) if replicas == 2 else ((0,), (1,)),
                stage_units=((0, cut), (cut, 6)),
                micro_batches=4 // replicas,
                micro_batch_samples=2,
                schedule=schedule,
            )
            summed = simulate(problem, plan).memory_bytes
            for device, need in needed_by_plan(trained.model, trained.training, plan, TOKENS, device="cpu").items():
                assert need <= summed[device] + set_aside + 1


def shared_devices(root: Path, **training: Any) -> Path:
    """A federation whose facility trains everything, each device of its plan being ranks that share it."""
    return write_federation(root, ["here"], training={"micro_batch_sequences": 1, "ranks": 8} | training, size=WIDE)


@pytest.mark.parametrize("offload", [False, True])
def test_devices_that_ranks_share_hold_a_shard_each(tmp_path: Path, offload: bool):
    """Weights, gradients and state of all counted against one rank's memory: what fits eight was refused."""
    federation = shared_devices(tmp_path / "8", batch_sequences=8, layout={"shards": 8, "offload": offload})
    read = read_federation(federation)
    training, model = read.facilities[0].training, model_figures(read.path(read.model))
    raw = profile(blocks=4, devices=1)
    if offload:
        raw["devices"][0]["id"] = "here:cuda0"
    command = ["--problem", tmp_path / "profile.json", "--out", tmp_path / "plan.json", "--iterations", 1]
    command += ["--federation", federation, "--facility", "here", "--stages", 1, "--replicas", 1]
    needs = []
    for factor in (None, 1.5):
        if factor is not None:
            raw["devices"][0]["memory_bytes"] = factor * needs[0]
        (tmp_path / "profile.json").write_text(json.dumps(raw))
        assert planner.main([str(word) for word in command]) == 0
        plan = read_plan(tmp_path / "plan.json")
        needs.append(plan.loads[0].memory_bytes)
        assert "each device is 8 ranks that share it (layout.shards)" in plan.reasons
    assert needs[0] == needs[1] < needed_bytes(model, settings("full"), TOKENS, 1, device="cpu") / 2
    assert training.batch_sequences == 8 * sum(plan.replica_micro_batches) * plan.micro_batch_samples


def test_a_plan_for_devices_that_ranks_share_is_one_that_the_trainer_takes(tmp_path: Path):
    """It cut up the whole batch for each of the ranks: the trainer found twice as many sequences, and refused."""
    import torch

    from facility.training.parallel.arrange import layout_of_plan
    from facility.training.processes.ranks import Ranks

    federation = shared_devices(tmp_path / "2", batch_sequences=8, layout={"shards": 2})
    training = read_federation(federation).facilities[0].training
    (tmp_path / "profile.json").write_text(json.dumps(profile(blocks=4)))
    command = ["--problem", tmp_path / "profile.json", "--out", tmp_path / "plan.json", "--iterations", 1]
    command += ["--federation", federation, "--facility", "here", "--stages", 2, "--replicas", 1]
    assert planner.main([str(word) for word in command]) == 0
    here = Ranks(rank=0, world=4, local_rank=0, local_world=4, device=torch.device("cpu"))
    layout = layout_of_plan(read_plan(tmp_path / "plan.json"), here, training, blocks=4, block_tokens=TOKENS)
    assert layout.shape.batch_sequences == 8 and layout.grid.shards == 2
    uneven = shared_devices(tmp_path / "3", batch_sequences=8, layout={"shards": 3})
    with pytest.raises(ConfigurationError, match="batch_sequences is 8, expected a multiple of layout.shards 3"):
        planner.main([str(word) for word in [*command, "--federation", uneven]])


def test_too_little_memory_for_the_whole_model_may_do_for_adapters_on_4_bits(
    tmp_path: Path, federations: Callable[[str], Path]
):
    """The same devices, one federation's training or another's."""
    from coordinator.planning.chain import Infeasible

    read = read_federation(federations("qlora"))
    model, few = model_figures(read.path(read.model)), read.facilities[0].training
    enough = 1.2 * needed_bytes(model, few, TOKENS, 1, device="cpu") / 1e6
    (tmp_path / "profile.json").write_text(json.dumps(profile(blocks=4, memory_megabytes=enough)))
    command = ["--problem", tmp_path / "profile.json", "--out", tmp_path / "plan.json", "--iterations", 1]
    command += ["--stages", 1, "--replicas", 1]

    def planned(kind: str) -> int:
        return planner.main([str(word) for word in [*command, "--federation", federations(kind), "--facility", kind]])

    assert planned("qlora") == 0
    with pytest.raises(Infeasible):
        planned("full")


@pytest.mark.parametrize(
    ("change", "words", "why"),
    [
        ({}, ["--federation"], "go together"),
        ({}, ["--federation", "--facility", "nowhere"], "--facility names 'nowhere'; the facilities are full"),
        ({"profile": {}}, ["--federation", "--facility", "full"], "neither profile.tokens nor sample_tokens"),
        ({"units": []}, ["--federation", "--facility", "full"], "no units"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, federation: Path, change: dict[str, Any], words: list[str], why: str
):
    (tmp_path / "profile.json").write_text(json.dumps(profile(blocks=4) | change))
    command = ["--problem", str(tmp_path / "profile.json"), "--out", str(tmp_path / "plan.json"), words[0]]
    with pytest.raises(ConfigurationError, match=why):
        planner.main([*command, str(federation), *words[1:]])


def test_a_profile_of_another_model_is_refused(tmp_path: Path, federation: Path):
    (tmp_path / "profile.json").write_text(json.dumps(profile(blocks=3)))
    command = ["--problem", tmp_path / "profile.json", "--out", tmp_path / "plan.json", "--federation", federation]
    with pytest.raises(ConfigurationError, match="5 units, the initial model 6"):
        planner.main([str(word) for word in [*command, "--facility", "full"]])
