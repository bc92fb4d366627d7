"""The notebooks in examples/ show what their cells give: each is executed."""

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks are read by nbformat")
from nbclient import NotebookClient  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
BOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MOST_BYTES = 40_000


@pytest.mark.slow
@pytest.mark.parametrize("name", BOOKS)
def test_outputs_are_what_the_cells_give(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    path = FOLDER / name
    book = nbformat.read(path, 4)
    stored = outputs(book)
    NotebookClient(book, timeout=240, resources={"metadata": {"path": tmp_path}}).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when it ran
    if pytestconfig.getoption("--update-docs"):
        nbformat.write(book, path)
        return
    assert outputs(book) == stored
    assert any("text/html" in data for data in stored)
    assert not any("source=ModelSource(" in text for data in stored for text in data.values())
    assert path.stat().st_size < MOST_BYTES, "outputs are light"


def outputs(book: Any) -> list[dict[str, str]]:
    return [
        dict(output.get("data") or {output.output_type: output.get("text", "")})
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
