"""Commands that set a federation and its facilities up."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.app import SET_UP, FacilityArgument, FederationOption, app
from coordinator.quickstart.command import quickstart
from facility.exchange.errors import InputError
from facility.exchange.files.bounded import real_path

app.command(rich_help_panel=SET_UP)(quickstart)


@app.command(rich_help_panel=SET_UP)
def init(
    folder: Annotated[Path, typer.Argument(help="Folder in which to write workflow/federation.yml.")],
    facility: Annotated[
        list[str], typer.Option(help="NAME=TEMPLATE, such as a=leonardo or b=slurm; or NAME=local. Repeat.")
    ],
    name: Annotated[str, typer.Option(help="Name of the federation.")] = "federation",
) -> None:
    """Write a first federation.yml to fill in, from the sites' templates."""
    from coordinator.config.scaffold import write_scaffold

    print(
        f"{write_scaffold(folder, name, facility)}: fill in what is in <angle brackets>, then: "
        f"cd {shlex.quote(str(folder))}; crossfed check"
    )


@app.command(rich_help_panel=SET_UP)
def share(
    federation: FederationOption,
    weights: Annotated[bool, typer.Option("--weights", help="Send the model's weights too.")] = False,
    facility: Annotated[list[str] | None, typer.Option(help="Only this facility. Repeat.")] = None,
) -> None:
    """Send the model's tokenizer to every facility, which verifies it; what a facility holds already is not sent."""
    from coordinator.config.federation import read_federation
    from coordinator.share import share_tokenizer as send

    for one in send(read_federation(federation), weights=weights, only=facility or []):
        print(f"{one.facility}: {'sent' if one.sent else 'there'}: {one.path}, digest {one.digest}")


@app.command(rich_help_panel=SET_UP)
def model(
    source: Annotated[
        str, typer.Argument(help="Model of the hub (ORG/NAME), or a Hugging Face checkpoint's directory.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    dtype: Annotated[str, typer.Option(help="Dtype that is sent: bfloat16, float16 or float32.")] = "bfloat16",
    revision: Annotated[str, typer.Option(help="Revision of a hub model.")] = "main",
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class", help="Make it a classifier of texts or images: a class, in the head's order. Repeat for each."
        ),
    ] = None,
) -> None:
    """Fetch or convert the model of round 0 and check it by loading it."""
    from coordinator.model import DTYPES, convert_model

    if dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    print(convert_model(source, real_path(out), dtype=dtype, revision=revision, classes=classes or []))


@app.command(rich_help_panel=SET_UP)
def setup(
    facility: FacilityArgument,
    federation: FederationOption,
    bundle: Annotated[
        Path | None, typer.Option(help="Send this bundle (crossfed bundle), for a site without internet.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: further arguments of facility/setup.sh, such as --no-self-check."),
    ] = None,
) -> None:
    """Set a facility up over ssh: send the code, run facility/setup.sh there, check itself through its queue."""
    from coordinator.config.federation import read_federation
    from coordinator.remote_setup import set_up

    set_up(read_federation(federation), facility, bundle=bundle, arguments=arguments or [])


@app.command(rich_help_panel=SET_UP)
def bundle(
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    python_version: Annotated[str, typer.Option(help="Python at the facility.")] = "3.11",
    platform: Annotated[str, typer.Option(help="Its platform's wheel tag.")] = "manylinux_2_28_x86_64",
    torch: Annotated[str, typer.Option(help="cuda, rocm or cpu.")] = "cuda",
    torch_index: Annotated[str, typer.Option(help="Extra package index for torch; default PyTorch's own.")] = "",
    sbom: Annotated[bool, typer.Option("--sbom", help="Also write sbom.json: the packages as CycloneDX.")] = False,
    eval: Annotated[str, typer.Option(help="Add lm-eval and the data of these tasks of it: names with commas.")] = "",
    eval_include: Annotated[
        Path | None, typer.Option(help="Folder with YAML files of further tasks (lm-eval's --include_path).")
    ] = None,
) -> None:
    """Download what a facility without internet needs to install; copy the folder there and run its setup.sh."""
    from coordinator.bundle import INDEX
    from coordinator.bundle import make_bundle as make

    if torch not in INDEX:
        raise InputError(f"--torch is {torch!r}, expected one of {', '.join(INDEX)}")
    tasks = [name for name in eval.split(",") if name]
    what = make(
        out,
        python=python_version,
        platform=platform,
        torch=torch,
        index=torch_index,
        sbom=sbom,
        tasks=tasks,
        include=eval_include,
    )
    print(
        f"{out}: {len(what['files'])} wheels; there: bash crossfed/facility/setup.sh --wheelhouse wheelhouse\n"  # type: ignore[arg-type]
        f"setup.sh verifies every file, and prints the sha256 of SHA256SUMS: {what['sha256sums']}"
    )


@app.command(rich_help_panel=SET_UP)
def schema(
    out: Annotated[Path | None, typer.Option(help="File to write; without it, the schema is printed.")] = None,
) -> None:
    """Print or write the JSON schema of federation.yml, by which editors complete and check the file."""
    from coordinator.config.schema import schema_text, write_schema

    print(schema_text(), end="") if out is None else write_schema(out)
