"""What a site answers becomes a survey; whatever else it prints is passed over, and nothing of it is run or written."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.config.deployments import WORKDIR, Deployment
from coordinator.quickstart.begin import _describe_survey
from coordinator.quickstart.choice import choose, template_for
from coordinator.quickstart.command import quickstart
from coordinator.quickstart.describe import RoundTraining, federation_text, scalar
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.equip import torch_for
from coordinator.quickstart.propose import account, install, partition, site_template, workdir
from coordinator.quickstart.survey import ANSWERED, SECTION, Python, Survey, read_survey, script
from coordinator.schedulers.partition import WORD, Partition, Wish
from coordinator.schedulers.registry import scheduler_named
from facility.exchange.errors import InputError
from facility.exchange.messages.job_template import Environment, fill_template
from facility.exchange.messages.template_inheritance import read_template
from tests.schedulers.recordings import recorded

SLURM = (Path(__file__).parent / "surveyed" / "slurm-testbed.txt").read_text()
"""Answer of a Slurm 22.05 facility of the testbed, word for word but for the name of its home."""


def test_a_slurm_site_is_read_as_it_answered():
    survey = read_survey(SLURM)
    assert survey.scheduler is scheduler_named("slurm")
    assert survey.partitions == (Partition(name="main", default=True, nodes=2, cores=4, gpus=4),)
    assert survey.accounts == () and survey.data == "text" and survey.machine == "x86_64" and not survey.internet
    assert survey.home == "/home/alice" and survey.places[0].free > 10**9
    assert survey.pythons[0].recent and not survey.pythons[0].lacks
    assert install(survey).arguments == ("--as-is", "--python", "python3")


def test_queues_of_pbs_are_read_as_a_real_server_answered():
    names = ("pbs-pbsnodes-a", "pbs-qstat-Q", "pbs-qstat-B", "pbs-qstat-Qf-closed")
    found = scheduler_named("pbs").read_partitions("".join(recorded(name).out for name in names))  # type: ignore[attr-defined]
    assert [(one.name, one.default, one.open) for one in found] == [
        ("workq", True, True),
        ("closedq", False, False),
        ("stopq", False, False),
    ]
    assert {(one.nodes, one.cores, one.gpus) for one in found} == {(1, 2, 0)}
    assert partition(found, []).value == "workq"


def test_queues_of_flux_are_read_as_a_real_instance_answered():
    names = ("flux-queue-list", "flux-queue-status", "flux-resource-list")
    found = scheduler_named("flux").read_partitions("".join(recorded(name).out for name in names))  # type: ignore[attr-defined]
    assert found == [
        Partition(name="batch", default=True, open=False, nodes=2, cores=2),
        Partition(name="debug", open=False, nodes=2, cores=2),
    ]
    assert partition(found, []).value == "", "both queues are stopped"


SOUND = {"places": "HOME|/home/alice|5", "scheduler-slurm": "partition|gpu|up|1:00:00|999999999|4|gpu:4\naccount|ours"}
"""A place, a partition of impossibly many nodes and an account."""
HOSTILE = st.text(max_size=30) | st.sampled_from(["/a b", "/x;rm -rf ~", "--uid=0", "$(x)", "../x", "9" * 30])


@given(st.text(max_size=400), st.sampled_from(["python", "data", "modules", "machine", *SOUND]), HOSTILE)
@settings(max_examples=60, deadline=None)
def test_a_hostile_answer_gives_words_and_paths_only(text: str, section: str, word: str):
    sound = SOUND.get(section, "")
    odd = [
        f"HOME|{word}|5",
        f"partition|{word}|up|1:00:00|2|4|gpu:4",
        f"partition|a|up|1|{word}|4|0",
        f"account|{word}",
    ]
    lines = "\n".join(["", f"{SECTION} {section}", sound, *odd, text, ANSWERED, f"{SECTION} end", ""])
    survey = read_survey(lines)
    assert bool(sound) == bool(survey.places or (survey.partitions and survey.accounts))
    assert all(_is_path(place.path) for place in survey.places)
    assert all(WORD.fullmatch(one.name) for one in survey.partitions) and all(map(WORD.fullmatch, survey.accounts))
    assert all(one.nodes <= 10_000_000 for one in survey.partitions)


def _is_path(path: str) -> bool:
    return WORKDIR.fullmatch(path) is not None


def test_directives_cannot_be_smuggled_in_by_a_partition_or_account():
    evil = "partition|gpu\\n#SBATCH --uid=0|up|1:00:00|2|4|gpu:4\npartition|a b|up|1:00:00|2|4|(null)\n"
    evil += "account|x;rm -rf ~\naccount|--uid=0\n"
    slurm = scheduler_named("slurm")
    assert slurm.read_partitions(evil) == [] and slurm.read_accounts(evil) == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("limit", "hours"), [("infinite", 0.0), ("1-00:00:00", 24.0), ("30:00", 0.5), ("2:30:00", 2.5), ("n/a", 0.0)]
)
def test_time_limits_of_slurm_are_hours(limit: str, hours: float):
    line = f"partition|p|up|{limit}|1|8|gpu:a100:4(S:0-1),nvme:1\n"
    (one,) = scheduler_named("slurm").read_partitions(line)  # type: ignore[attr-defined]
    assert (one.hours, one.gpus) == (hours, 4)


def test_the_partition_for_training_has_gpus_and_is_not_for_debugging():
    offered = [
        Partition(name="cpu", default=True, nodes=900, cores=128),
        Partition(name="gpu-debug", nodes=60, cores=32, gpus=4),
        Partition(name="gpu", nodes=50, cores=32, gpus=4),
        Partition(name="gpu-closed", nodes=99, cores=32, gpus=4, open=False),
        Partition(name="gpu-others", nodes=99, cores=32, gpus=4, allowed=frozenset({"theirs"})),
    ]
    assert partition(offered, ["mine"]).value == "gpu"
    assert set(partition(offered, ["mine"]).others) == {"cpu", "gpu-debug"}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"a.partition": "gpu", "a.account": "mine"}, []),
        ({"a.partition": "gpu,cpu"}, []),
        ({"a.partition": "gpuq"}, ["a.partition: the site does not list gpuq, but cpu, gpu"]),
        ({"a.account": "theirs"}, ["a.account: the site does not list theirs, but mine, ours"]),
    ],
)
def test_a_partition_or_account_that_the_site_does_not_list_is_said_before_a_site_is_set_up(
    answers: dict[str, str], said: list[str], caplog: pytest.LogCaptureFixture
):
    """It is used all the same, for a site may hide some."""
    whole = Python(command="python3", version=(3, 12), lacks=())
    offered = tuple(Partition(name=name, default=name == "cpu", nodes=9) for name in ("cpu", "gpu"))
    queue = scheduler_named("slurm")
    survey = Survey(
        pythons=(whole,),
        scheduler=queue,
        partitions=offered,
        accounts=("mine", "ours"),
        data="text",  # type: ignore[arg-type]
    )
    given = {"a.home": "/home/a/crossfed", "a.workdir": "/scratch/a"} | answers
    login = Deployment(type="ssh", host="h", user="u", workdir="/tmp")
    made = choose(Dialog(given=given, yes=True, say=lambda _: None), "a", login, survey, "text.txt")
    assert [record.getMessage() for record in caplog.records] == said
    assert answers.get("a.partition", "cpu") in made.template_text


def test_packages_come_from_where_the_site_has_them():
    whole = Python(command="python3", version=(3, 12), lacks=())
    bare, old = (
        Python(command="python3.11", version=(3, 11), lacks=("torch",)),
        Python(command="python3", version=(3, 6), lacks=("torch",)),
    )
    assert install(Survey(pythons=(old, whole))).arguments[0] == "--as-is"
    assert install(Survey(pythons=(old, bare), internet=True)).arguments == ("--python", "python3.11")
    assert install(Survey(pythons=(old, bare))).bundle
    newest = install(Survey(pythons=(old,), modules=("python/3.9.1", "python/3.11.6", "python/3.10.2"), internet=True))
    assert newest.modules == ("python/3.11.6",) and not newest.bundle
    assert install(Survey(pythons=(old,))).arguments == ()


def test_scratch_comes_before_home():
    survey = read_survey(f"{SECTION} places\nHOME|/home/a|99\nSCRATCH|/scratch/a|5\nWORK|/w x|77\n{SECTION} end\n")
    assert workdir(survey).value == "/scratch/a/crossfed-work"
    assert workdir(survey).others == ("/home/a/crossfed-work",), "a path with a blank is not a proposal"


def test_a_known_site_is_known_by_its_login_node():
    assert site_template("login.leonardo.cineca.it") == "leonardo"
    assert site_template("alogin1.mn5.bsc.es") == "marenostrum5"
    assert site_template("10.0.0.1") == "" == site_template("slurm.example.org")


@pytest.mark.parametrize("name", ["slurm", "pbs", "flux"])
def test_a_template_made_for_a_site_renders_and_asks_for_what_was_chosen(name: str, tmp_path: Path):
    wish = Wish(partition="boost", account="proj42", cores=32, gpus=4, hours=1.5)
    file = tmp_path / "a.sh"
    file.write_text(template_for(scheduler_named(name), "a", wish))  # type: ignore[arg-type]
    text = fill_template(read_template(file), fill={}, environment=Environment(), workdir="/w", name="a.sh")
    directives = [line for line in text.splitlines() if line.startswith(("#SBATCH", "#PBS", "#flux:"))]
    assert any("proj42" in line for line in directives) and any("boost" in line for line in directives)
    assert any("01:30:00" in line or "1.5h" in line for line in directives)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    bare = fill_template(
        _written(tmp_path, template_for(scheduler_named(name), "a", Wish(partition="p"))),  # type: ignore[arg-type]
        fill={},
        environment=Environment(),
        workdir="/w",
        name="a.sh",
    )
    assert "<account>" not in bare and "<bank>" not in bare


def _written(folder: Path, text: str) -> str:
    (folder / "b.sh").write_text(text)
    return read_template(folder / "b.sh")


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_every_text_is_read_back_from_the_file_as_it_was(text: str):
    assert yaml.safe_load(f"key: {scalar(text)}") == {"key": text}


def test_every_short_text_of_signs_that_yaml_knows_is_read_back():
    signs = [*"~/-?:,[]{}#&*!|>'\"%@` .=<aN0yE_", "null", "yes", "1e5"]
    texts = [one + other for one in signs for other in ["", *signs]]
    assert [yaml.safe_load(f"key: {scalar(text)}")["key"] for text in texts] == texts


def test_the_file_holds_what_was_chosen_and_says_why(tmp_path: Path):
    dialog = Dialog(given={"a.gpus": "0"}, yes=True, say=lambda line: None)
    login = Deployment(type="ssh", host="login.example.org", user="alice", workdir="/tmp")
    choice = choose(dialog, "a", login, read_survey(SLURM), "text.txt")
    text = federation_text("f", "../model", RoundTraining(), [choice])
    (described,) = yaml.safe_load(text)["facilities"]
    assert described["deployment"] == {
        "type": "slurm",
        "host": "login.example.org",
        "user": "alice",
        "workdir": "/home/alice/crossfed-work",
        "template": "a.sh",
        "environment": {"home": "/home/alice/crossfed"},
    }
    assert "Slurm answers there" in text and "gpus" not in choice.template_text


def test_with_yes_a_question_without_a_proposal_names_the_option_that_answers_it():
    with pytest.raises(InputError, match="--answer a.workdir=VALUE"):
        Dialog(given={}, yes=True, say=lambda line: None).ask("a.workdir", workdir(Survey()))
    typed = iter(["", "proj7"])
    dialog = Dialog(given={}, yes=False, say=lambda line: None, ask_line=lambda prompt: next(typed))
    assert dialog.ask("a.account", account(["proj42"])) == "proj42" and dialog.ask("a.account", account([])) == "proj7"
    with pytest.raises(InputError, match="answers no question"):
        Dialog(given={"b.acount": "x"}, yes=True, asked=["a.account"]).check_given()


def test_odd_answers_on_the_command_line_are_errors_before_anything_is_asked(tmp_path: Path):
    with pytest.raises(InputError, match='--prepare is "\'x", expected arguments as in a shell: No closing quotation'):
        quickstart(tmp_path, prepare="'x", facility=["a=local"], yes=True)
    with pytest.raises(InputError, match="--name 'my federation': expected 1-63 letters"):
        quickstart(tmp_path, name="my federation", facility=["a=local"], yes=True)
    assert list(tmp_path.iterdir()) == []


def test_the_script_changes_nothing_and_quotes_the_path(tmp_path: Path):
    hostile = "te xt'; touch pwned; '.txt"
    done = subprocess.run(
        ["bash", "-s"],
        input=script(hostile),
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert f"{SECTION} end" in done.stdout and not list(tmp_path.iterdir())
    assert read_survey(done.stdout).data == "missing"


def test_packages_that_jobs_do_not_see_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A job's environment leaves out what an account has installed for itself, and what its shell names."""
    monkeypatch.setattr("coordinator.quickstart.survey.NEEDED", ("of_the_account",))
    (tmp_path / "of_the_account.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = script("data").partition("section modules")[0]
    told = subprocess.run(["bash", "-s"], input=asked, capture_output=True, text=True)
    (found,) = (one for one in read_survey(told.stdout).pythons if one.command == "python3")
    assert found.lacks == ("of_the_account",)


@pytest.mark.parametrize(("count", "said"), [(0, "0 partitions"), (1, "1 partition,"), (1200, "1,200 partitions")])
def test_what_a_site_has_is_counted_in_words_that_agree(count: int, said: str):
    survey = Survey(partitions=tuple(Partition(name=f"p{n}") for n in range(count)), accounts=("chem",))
    assert said in _describe_survey(survey) and "1 account," in _describe_survey(survey)


@pytest.mark.parametrize("name", ["slurm", "pbs", "flux"])
@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("own", [True, False])
def test_torch_is_that_of_the_job_that_was_answered_for(name: str, gpus: int, own: bool, tmp_path: Path):
    """Gigabytes for CUDA were sent to a site with GPUs whose jobs ask for none."""
    wish = Wish(partition="p", account="a", cores=1, gpus=gpus, hours=1, environment="")
    template = "a.sh" if own else "site.sh"
    (tmp_path / template).write_text(template_for(scheduler_named(name), "a", wish))
    login = Deployment(type=name, host="a.example.org", workdir="/w", template=template)
    facility = SimpleNamespace(name="a", deployment=login)
    survey = Survey(partitions=(Partition(name="p", gpus=4),))
    found = torch_for(SimpleNamespace(file=tmp_path / "federation.yml"), facility, survey)  # type: ignore[arg-type]
    assert found == ("cpu" if own and gpus == 0 and name != "flux" else "cuda")
