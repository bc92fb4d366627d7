"""`parloom cluster`: look at clusters, check their files, and find out what this machine is."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from parloom.cli_options import AsJson, Verbose
from parloom.cli_output import result, say
from parloom.cost.clusters import resolve_cluster
from parloom.errors import InputError, shell_word
from parloom.report.output import show_json

cluster_app = typer.Typer(
    no_args_is_help=True, help="Look at a cluster spec, a file, or this machine."
)


def named_or_here(cluster: str | None) -> str:
    """The cluster that was named; else this machine, which is said."""
    if cluster is not None:
        return cluster
    from parloom.execute import detect

    here = detect.detect()
    say(detect.found_words(here))
    for line in detect.warnings_of(here):
        say(f"warning: {line}")
    return detect.cluster_here(here).spec


@cluster_app.command("init")
def cluster_init(
    out: Annotated[Path, typer.Option(metavar="F", help="The file to write.")] = Path(
        "cluster.yaml"
    ),
    verbose: Verbose = False,
) -> None:
    """Write what this machine is as a cluster file, each value with where it is from."""
    from parloom.execute import detect
    from parloom.execute.files import write_atomic

    if out.exists():
        raise InputError(f"{out} exists; choose another file with --out")
    path = write_atomic(out, detect.yaml_of(detect.detect()), "choose another file with --out")
    word = shell_word(path)
    result(f"{path}: next: parloom cluster check {word}, parloom plan MODEL --cluster {word}")


@cluster_app.command("show")
def cluster_show(
    cluster: Annotated[
        str | None,
        typer.Argument(metavar="C", help="A spec or a YAML file; default: this machine."),
    ] = None,
    known: Annotated[bool, typer.Option("--known", help="List the known devices.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Print a cluster's devices, levels, host and price, and what had to be assumed."""
    from parloom.report import clusters

    if known:
        show_json(clusters.devices_document()) if as_json else result(clusters.devices_screen())
        return
    if cluster is None:
        _show_here(as_json)
        return
    loaded = resolve_cluster(cluster)
    if as_json:
        show_json(clusters.cluster_document(loaded.cluster, loaded.assumptions))
    else:
        result(clusters.cluster_screen(loaded.cluster, loaded.assumptions))


@cluster_app.command("check")
def cluster_check(
    cluster: Annotated[str, typer.Argument(metavar="C", help="A spec or a YAML file.")],
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Read a cluster strictly: exit 0, or 2 with the line and column of the first fault."""
    loaded = resolve_cluster(cluster)
    found = loaded.cluster
    if as_json:
        document = {"ok": True, "name": found.name, "num_devices": found.num_devices}
        show_json(document | {"assumptions": list(loaded.assumptions)})
    elif found.parts:
        parts = ", ".join(f"{part.count} x {part.cluster.name}" for part in found.parts)
        result(f"{cluster}: fine: {found.name}, {parts}")
    else:
        result(f"{cluster}: fine: {found.name}, {found.num_devices} x {found.device.name}")


def _show_here(as_json: bool) -> None:
    """What this machine has; the cluster that it is where its devices are known."""
    from parloom.execute import detect
    from parloom.report import clusters

    here = detect.detect()
    warnings = detect.warnings_of(here)
    if as_json:
        show_json(asdict(here) | {"warnings": warnings})
        return
    result("\n".join([*detect.here_lines(here), *(f"warning: {line}" for line in warnings)]))
    loaded = detect.cluster_here(here)
    result("")
    result(clusters.cluster_screen(loaded.cluster, loaded.assumptions))
