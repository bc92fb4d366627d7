"""docs/architecture.md says what the code does: its blocks are executed."""

import pytest

from tests.docs.page import check, updated


def test_architecture(pytestconfig: pytest.Config) -> None:
    check("architecture.md", update=pytestconfig.getoption("--update-docs"))


def test_a_changed_output_is_seen() -> None:
    page = "```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n\n```python\nx += 1\n```\n"
    assert updated(page, "page") == page.replace("\n2\n", "\n1\n")


def test_a_block_that_prints_needs_its_output() -> None:
    with pytest.raises(ValueError, match="page:2: this block prints, and no text block follows"):
        updated("```python\nprint(1)\n```\n\n```sh\nls\n```\n", "page")
