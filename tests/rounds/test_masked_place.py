"""With masks, training leaves its update where the coordinator cannot read; progress stays in the job's directory."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from facility import round as command
from facility.exchange.messages.evaluation import FacilityEvaluation
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.exchange.messages.masking import MaskingSettings
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.messages.trainer import BUILT_IN, TrainerSettings
from facility.launching.supervise import Ending
from facility.rounds import job as jobs

ROUNDS = 3


@pytest.mark.parametrize("whole", ["", "its own model is evaluated", "personal tensors", "another trainer"])
@pytest.mark.parametrize(("masked", "number"), [(True, 0), (True, ROUNDS), (False, 0)])
def test_a_plain_update_that_is_to_be_masked_never_lies_in_the_jobs_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool, number: int, whole: str
):
    """The final evaluation has no weights, and no masks. `whole`: why the trainer must not mask from memory."""
    job_directory, state = tmp_path / "job", tmp_path / "state"
    model = job_directory / "m"
    model.mkdir(parents=True)
    write_manifest(model, Manifest(kind="model", federation="f", round=number))
    monkeypatch.chdir(job_directory)
    masking = MaskingSettings(bits=16, threshold=2, facilities=["a", "b", "c"], peer_signers="/peers")
    settings = FacilitySettings(
        federation="f",
        facility="a",
        rounds=ROUNDS,
        seed=0,
        training=TrainingSettings(),
        masking=masking if masked else None,
        evaluation=FacilityEvaluation(own_models=masked and whole == "its own model is evaluated"),
        exclude=["*.head"] if whole == "personal tensors" else [],
        trainer=TrainerSettings(module="site.trainer" if whole == "another trainer" else BUILT_IN),
    )
    arguments = command.parser().parse_args(
        [
            "--model",
            "m",
            "--dataset",
            "d",
            "--settings",
            "s",
            "--round",
            str(number),
            "--out",
            "update",
            "--roster",
            "r",
        ]
    )
    job = jobs.Job(
        arguments=arguments,
        settings=settings,
        tasks=Namespace(),  # type: ignore[arg-type]
        notes=Namespace(),  # type: ignore[arg-type]
        meter=Namespace(),  # type: ignore[arg-type]
        state=state,
        dataset=tmp_path / "dataset",
    )
    started: list[list[str]] = []
    monkeypatch.setattr(jobs, "limits_from", lambda *_: None)

    def launch(words: list[str], **_: object) -> Ending:
        started.append(words)
        return Ending(code=0, reason="")

    monkeypatch.setattr(jobs, "launch_ranks", launch)
    jobs.start_ranks(job, jobs.work_of_round(job))
    out = job_directory / started[0][started[0].index("--out") + 1]
    hidden = masked and number < ROUNDS
    assert out.is_relative_to(state if hidden else job_directory)
    assert ("--job-directory" in started[0]) == hidden
    assert ("--roster" in started[0]) == (hidden and not whole)
    if hidden:
        assert started[0][started[0].index("--job-directory") + 1] == str(job_directory)
