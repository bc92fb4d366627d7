"""Tables on narrow terminals: nothing is cut, and no name is broken in two."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from parloom.report.explain_screen import table_of

PATH = "model.encoder.layers.11.self_attention.query_key_value.weight"


def table() -> Table:
    found = table_of(("term", "of", "bytes", "time"))
    found.add_row("  computing", "", "", "6.79 us")
    found.add_row("  reduce the gradient", PATH, "384 KiB", "10.8 us")
    return found


def printed(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table())
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_a_wide_terminal_has_columns() -> None:
    assert printed(120) == (
        "  term                 of" + " " * 63 + "bytes     time\n"
        "  computing" + " " * 84 + "6.79 us\n"
        f"  reduce the gradient  {PATH}  384 KiB  10.8 us"
    )


def test_a_terminal_of_80_columns_has_a_paragraph_for_each_row() -> None:
    assert printed(80) == (
        "  computing\n"
        "    time 6.79 us\n"
        "  reduce the gradient\n"
        f"    of {PATH}, bytes 384\n"
        "    KiB, time 10.8 us"
    )


@pytest.mark.parametrize("width", [20, 40, 80, 99, 100, 102, 104, 120, 200])
def test_nothing_is_cut(width: int) -> None:
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    together = "".join(text.split())
    for said in ("computing", "reduce", "the", "gradient", "384KiB", "10.8us", "6.79us"):
        assert said in together
    assert PATH in (text if width > len(PATH) + 4 else together)
