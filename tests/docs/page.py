"""A page of documentation that runs: each python block's output is the text block after it."""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FENCE = "```"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language and text; `line` counts the first line of the text from 1."""

    language: str
    text: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page in order; raises `ValueError` where a fence stays open."""
    found: list[Block] = []
    lines = page.splitlines(keepends=True)
    start: int | None = None
    for index, line in enumerate(lines):
        if not line.startswith(FENCE):
            continue
        if start is None:
            start = index
        else:
            language = lines[start].removeprefix(FENCE).strip()
            found.append(Block(language, "".join(lines[start + 1 : index]), start + 2))
            start = None
    if start is not None:
        raise ValueError(f"the fence of line {start + 1} is never closed")
    return found


def outputs_of(page: str, name: str) -> list[str]:
    """What every python block prints; the blocks run in order in one namespace."""
    namespace: dict[str, object] = {"__name__": "page"}
    outputs: list[str] = []
    for block in blocks_of(page):
        if block.language != "python":
            continue
        out = io.StringIO()
        # Empty lines in front, so that a traceback names the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, name, "exec")
        with redirect_stdout(out):
            exec(code, namespace)
        outputs.append(out.getvalue())
    return outputs


def updated(page: str, name: str) -> str:
    """The page with every output as it is now.

    Raises `ValueError` for a python block that prints and has no text block after it.
    """
    outputs = iter(outputs_of(page, name))
    lines = page.splitlines(keepends=True)
    pending: tuple[str, int] | None = None
    edits: list[tuple[Block, str]] = []
    for block in blocks_of(page):
        if block.language == "text" and pending is not None:
            edits.append((block, pending[0]))
            pending = None
            continue
        _refuse(pending, name)
        pending = (next(outputs), block.line) if block.language == "python" else None
    _refuse(pending, name)
    for block, text in reversed(edits):  # from the end, so that line numbers hold
        first = block.line - 1
        lines[first : first + block.text.count("\n")] = [text]
    return "".join(lines)


def _refuse(pending: tuple[str, int] | None, name: str) -> None:
    if pending is not None and pending[0]:
        raise ValueError(f"{name}:{pending[1]}: this block prints, and no text block follows it")


def check(name: str, update: bool) -> None:
    """Fail unless the page's outputs are what its code prints; with `update`, write them."""
    path = DOCS / name
    page = path.read_text(encoding="utf-8")
    now = updated(page, str(path))
    if update and now != page:
        path.write_text(now, encoding="utf-8")
    else:
        assert now == page, f"outputs of docs/{name} changed; pytest tests/docs --update-docs"
