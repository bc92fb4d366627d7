"""Plans, clusters and comparisons where they are looked at: drawn by Rich and in notebooks, with
the page of `parloom report` inside one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor, nn

from parloom.cost.clusters import LoadedCluster, resolve_cluster
from parloom.errors import InputError
from parloom.explain import Answer, case_of, explain
from parloom.ir.expected import Prediction
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Plan
from parloom.ir.shown import Looks, Shown, drawn, verb
from parloom.report.clusters import cluster_screen
from parloom.report.output import rendered
from parloom.report.page.html import page
from parloom.report.sharding import Drawing, drawings, sharding_screen
from parloom.report.static_html import static_html
from parloom.report.terminal import plan_screen, prediction_screen
from parloom.reporting import report, write_page

HEIGHT = 820  # pixels of the page in a notebook
SAVED = "report.html"
WIDTH = 100  # of text, where a terminal shows it


@dataclass(frozen=True, slots=True)
class Report(Shown):
    """A report of plans: a page inside a notebook, or a file."""

    document: dict[str, Any]

    def save(self, path: str | Path = SAVED) -> Path:
        """Write the page, one HTML file that needs no network."""
        return write_page(self.document, Path(path))


@dataclass(frozen=True, slots=True)
class Sharding(Shown):
    """Which device holds which part of tensors."""

    drawings: tuple[Drawing, ...]


def report_of(plan: Plan, run: str | Path | None = None) -> Report:
    """The page of `parloom report`; `run` is the log of a run of the plan."""
    return Report(report([plan], run=run))


def show_sharding(what: str | Tensor, plan: Plan, model: nn.Module | None = None) -> Sharding:
    """Which device holds which part of a tensor of `plan`: a name of it, as `parloom explain`
    takes one, or a parameter or buffer of `model`.

    Raises `InputError` for an unknown name, and for a tensor that is none of the model's.
    """
    return Sharding(drawings(case_of(plan), what if isinstance(what, str) else _name(what, model)))


def _name(tensor: object, model: nn.Module | None) -> str:
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise InputError(f"show_sharding: give a name or a tensor of the model, no {kind}")
    if model is None:
        raise InputError("show_sharding: which tensor of the plan this is, `model` says; or a name")
    named = (*model.named_parameters(), *model.named_buffers())
    for name, own in named:
        if own is tensor:
            return name
    shape = list(tensor.shape)
    raise InputError(f"show_sharding: no parameter or buffer of the model is this tensor {shape}")


def _framed(shown: Report) -> str:
    text = files("parloom.report").joinpath("frame.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    title = shown.document["plans"][0]["title"]
    return environment.from_string(text).render(
        page=page(shown.document), title=title, height=HEIGHT
    )


def _report_screen(shown: Report) -> RenderableType:
    titles = [Text(plan["title"], "bold") for plan in shown.document["plans"]]
    return Group(*titles, Text(f"a page: in a notebook, or .save({SAVED!r})"))


def _plan_screen(plan: Plan) -> RenderableType:
    return plan_screen(plan, resolve_cluster(plan.cluster).cluster, {}, None)


SCREENS: dict[type, Callable[[Any], RenderableType]] = {
    Plan: _plan_screen,
    Prediction: prediction_screen,
    Cluster: lambda cluster: cluster_screen(cluster, ()),
    LoadedCluster: lambda found: cluster_screen(found.cluster, found.assumptions),
    Answer: lambda answer: answer.screen,
    Sharding: lambda shown: sharding_screen(shown.drawings),
    Report: _report_screen,
}


def _text(screen: Callable[[Any], RenderableType], value: object) -> str:
    return rendered(screen(value), WIDTH)


def _html(screen: Callable[[Any], RenderableType], value: object) -> str:
    return static_html(screen(value))


for _kind, _screen in SCREENS.items():
    _page = _framed if _kind is Report else partial(_html, _screen)
    drawn(_kind, Looks(_screen, partial(_text, _screen), _page))
verb(Plan, "report", report_of)
verb(Plan, "explain", lambda plan, name, versus: explain(plan, name=name, versus=versus))
verb(Plan, "show_sharding", lambda plan, what, model=None: show_sharding(what, plan, model))
