"""Pages of documentation that run: files are written, code and commands executed, outputs compared.

A block with a title (```python title="train.py") is a file, or its next part; other `python` blocks
run in order in one namespace, and what one prints is the `text` block after it. Of a `console`
block each command runs, and the lines below it are what it prints. All other blocks are only read.
"""

import io
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = "```"
TITLE = re.compile(r'title="([\w./-]+)"')

Rerun = Callable[[str], str]  # a console block as it would be written now


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language and text; `line` counts the first line of the text from 1."""

    language: str
    text: str
    line: int
    title: str = ""


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
            info = lines[start].removeprefix(FENCE).strip()
            title = TITLE.search(info)
            text = "".join(lines[start + 1 : index])
            language = info.partition(" ")[0]
            found.append(Block(language, text, start + 2, title[1] if title else ""))
            start = None
    if start is not None:
        raise ValueError(f"the fence of line {start + 1} is never closed")
    return found


def updated(page: str, name: str, rerun: Rerun | None = None) -> str:
    """The page with every output as it is now; without `rerun` commands and files are left alone.

    Raises `ValueError` for a python block that prints and has no text block after it.
    """
    namespace: dict[str, object] = {"__name__": "page"}
    lines = page.splitlines(keepends=True)
    pending: tuple[str, int] | None = None
    edits: list[tuple[Block, str]] = []
    files: set[str] = set()
    for block in blocks_of(page):
        if block.language == "text" and pending is not None:
            edits.append((block, pending[0]))
            pending = None
            continue
        _refuse(pending, name)
        pending = None
        if block.title and rerun is not None:
            _write(block, files)
        elif block.language == "python" and not block.title:
            pending = (_printed(block, name, namespace), block.line)
        elif block.language == "console" and rerun is not None:
            edits.append((block, rerun(block.text)))
    _refuse(pending, name)
    for block, text in reversed(edits):  # from the end, so that line numbers hold
        first = block.line - 1
        lines[first : first + block.text.count("\n")] = [text]
    return "".join(lines)


def _write(block: Block, files: set[str]) -> None:
    """A file of the page in the folder of its commands: anew, or one more part."""
    goes_on = block.title in files
    with open(block.title, "a" if goes_on else "w", encoding="utf-8") as file:
        file.write(f"\n{block.text}" if goes_on else block.text)
    sys.modules.pop(Path(block.title).stem, None)  # of another page, or of another test
    files.add(block.title)


def _printed(block: Block, name: str, namespace: dict[str, object]) -> str:
    out = io.StringIO()
    # Empty lines in front, so that a traceback names the line of the page.
    code = compile("\n" * (block.line - 1) + block.text, name, "exec")
    with redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue()


def _refuse(pending: tuple[str, int] | None, name: str) -> None:
    if pending is not None and pending[0]:
        raise ValueError(f"{name}:{pending[1]}: this block prints, and no text block follows it")


def check(name: str, update: bool, rerun: Rerun | None = None) -> None:
    """Fail unless the page's outputs are what it prints; with `update`, write them.

    `name` is a page in `docs`, or one of the repository with `../` before it.
    """
    path = DOCS / name
    page = path.read_text(encoding="utf-8")
    now = updated(page, str(path), rerun)
    if update and now != page:
        path.write_text(now, encoding="utf-8")
    else:
        assert now == page, f"outputs of docs/{name} changed; pytest tests/docs --update-docs"
