"""docs/reference/exports.md says what the code does: its blocks are executed."""

import pytest

from tests.docs.page import check


def test_page(pytestconfig: pytest.Config) -> None:
    check("reference/exports.md", update=pytestconfig.getoption("--update-docs"))
