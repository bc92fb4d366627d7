"""Names out of files, models and arguments reach no terminal as control characters or markup."""

import contextlib
import hashlib
import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from parloom.capture import capture
from parloom.cli import main
from parloom.errors import CaptureError, InputError, has_controls, one_line, visible
from parloom.ir.text import print_graph
from parloom.report.output import message, rendered, show, show_json
from tests.unit.graphs import perceptron
from tests.unit.test_plan_safety import Document, victim

FORGED = "PASS: forged"
# Terminals obey these: they end lines, move the cursor, color, set titles.
CONTROLS = (
    "\x1b[31m",
    f"\n{FORGED}",
    f"\r{FORGED}",
    "\x08",
    "\x7f",
    "\x9b31m",
    "\u2028",
    "\x1b]0;t\x07",
)
# These change how other characters are read, or are not seen.
HIDDEN = ("\u202e", "\u2066", "\u200b", "\u200f", "\ufeff", "\xad", "\U000e0041", "\u2060")
MARKUP = "[red]x[/red]"


def written(folder: Path, document: Document) -> str:
    whole = "\n\n".join("\n".join(document[n]) for n in ("graph", "evaluation_graph"))
    document["graphs_sha256"] = hashlib.sha256(whole.encode()).hexdigest()
    path = folder / "plan.json"
    path.write_text(json.dumps(document))
    return str(path)


def called(name: str) -> Document:
    """A plan whose modules, weights, sources, methods, notes and outputs are called `name`."""
    document = victim()
    plain = print_graph(perceptron()).rstrip("\n").split("\n")
    quoted = json.dumps(name)[1:-1].encode("ascii").decode()
    quoted = name.encode("unicode_escape").decode("ascii")

    def noted(found: re.Match[str]) -> str:
        return f'  # "{quoted}{found[1]}" @ "{quoted}.py:1"'

    plain = [text.replace('parameter("', f'parameter("{quoted}') for text in plain]
    document["graph"] = [re.sub(r"  # (\w+).*", noted, text) for text in plain]
    document["decisions"]["nodes"] = {f"{name}up:linear#0": {"d0": ["x"]}}
    for key in ("notes", "assumptions"):
        document[key] = [f"{name} {key}"]
    document["method"] = f"hand{name}"
    document["source"]["spec"] = f"zoo:{name}"
    document["alternatives"] = [{"name": name, "step_s": 1.0, "peak_bytes": 1, "fits": True}]
    return document


def said(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command, and all that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(arguments)
    return code, out.getvalue()


def assert_plain(text: str) -> None:
    odd = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert not odd, text
    assert not any(line.startswith(FORGED) for line in text.split("\n")), text


VERBS: tuple[list[str], ...] = (
    ["verify", "PLAN"], ["verify", "PLAN", "--shrink"], ["simulate", "PLAN"], ["explain", "PLAN"],
    ["explain", "PLAN", "up:linear#0"], ["simulate", "PLAN", "--json"],
    ["explain", "PLAN", "--json"],
    ["run", "PLAN", "--", "none.py"], ["run", "PLAN", "-v", "--", "none.py"],
    ["explain", "PLAN", "--versus", "data_parallel"],
    ["plan", "zoo:mlp", "--cluster", "2xcpu", "--method", "PLAN"], ["calibrate", "--plan", "PLAN"],
)  # fmt: skip


@pytest.mark.sample(7)
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_plans_with_control_characters_are_refused(tmp_path: Path, verb: list[str]) -> None:
    for control in CONTROLS[:3]:
        path = written(tmp_path, called(f"a{control}b"))
        code, text = said([path if part == "PLAN" else part for part in verb])
        assert code == 2
        assert "control characters" in text
        assert_plain(text)


@pytest.mark.parametrize("verb", VERBS[:-1], ids=" ".join)
def test_names_that_hide_are_shown(tmp_path: Path, verb: list[str]) -> None:
    """On every screen, with markup that is no markup."""
    path = written(tmp_path, called(MARKUP + "".join(HIDDEN)))
    code, text = said([path if part == "PLAN" else part for part in verb])
    assert code in (0, 2), text
    assert_plain(text)
    if verb in (["explain", "PLAN"], ["simulate", "PLAN"]):
        assert "[red]x[/red]" in text


@pytest.mark.parametrize("field", ["notes", "assumptions", "method", "cluster", "fingerprint"])
def test_each_text_of_a_plan_is_looked_at(tmp_path: Path, field: str) -> None:
    document = victim()
    found: Any = document[field]
    document[field] = ["a\x1bb"] if isinstance(found, list) else "a\x1bb"
    code, text = said(["simulate", written(tmp_path, document)])
    assert code == 2
    assert re.search(rf"plan.json:\d+:\d+: {field}.*control characters", text)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "x"], ["plan", "x", "--cluster", "2xcpu"], ["plan", "zoo:mlp", "--cluster", "x"],
        ["cluster", "show", "x"], ["cluster", "check", "x"], ["x"], ["plan", "--x"],
        ["plan", "zoo:mlp", "--cluster", "2xcpu", "--batch", "x"], ["explain", "x", "x"],
        ["plan", "zoo:mlp", "--cluster", "2xcpu", "--dtype", "x"], ["run", "x", "--", "y"],
        ["plan", "zoo:mlp", "--cluster", "2xcpu", "--pin", "x"], ["calibrate", "--out", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_arguments_are_quoted(arguments: list[str], control: str) -> None:
    """Those of usage errors too, which the library that parses arguments prints."""
    code, text = said([re.sub(r"^(--|)x$", rf"\1a{control}b", part) for part in arguments])
    assert code == 2
    assert_plain(text)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_arguments_that_hide_are_shown(hidden: str) -> None:
    for arguments in (["verify", f"a{hidden}b"], ["cluster", "show", f"a{hidden}b"]):
        code, text = said(arguments)
        assert code == 2
        assert_plain(text)


class Keyed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("control", CONTROLS)
def test_models_with_control_characters_are_refused(control: str) -> None:
    with pytest.raises(CaptureError, match="has control characters; rename") as refused:
        capture(Keyed(f"a{control}"), {"x": torch.ones(2, 4)})
    assert_plain(str(refused.value))
    with pytest.raises(CaptureError, match="has control characters"):
        capture(Keyed("a"), {f"x{control}": torch.ones(2, 4)})


def test_models_in_any_language_are_captured() -> None:
    for name in ("größe", "層", "слой", "\u0637\u0628\u0642\u0629"):
        assert name in print_graph(capture(Keyed(name), {"x": torch.ones(2, 4)})).encode(
            "ascii"
        ).decode("unicode_escape")


@pytest.mark.parametrize("bad", [*CONTROLS, *HIDDEN, "\ud800"])
def test_what_prints_is_visible(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"a{bad}b"
    assert_plain(message(text))
    assert_plain(one_line(text))
    assert_plain(str(InputError(text)).replace(f"\n{FORGED}", ""))
    table = Table()
    table.add_column(text)
    table.add_row(text, MARKUP)
    for screen in (Text(text), table):
        assert_plain(rendered(screen, 80).replace(f"\n{FORGED}", ""))
    show_json({text: [text]})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {text: [text]}
    assert_plain(printed)
    show("x\x1b[31m", "")
    assert capsys.readouterr().out == "x\\x1b[31m\n"


def test_plain_text_stays() -> None:
    for text in ("größe 層 ✓ — 3 \u00d7 4", "two\nlines\tand a tab", "[red]", ""):
        assert visible(text) == text
    assert message("first\nsecond") == "first\n  second"
    assert not has_controls("größe\u200d层")
    assert has_controls("a\nb")
