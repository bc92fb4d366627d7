"""docs/add-an-op.md says what the entries say: its blocks are executed."""

import pytest

from tests.docs.page import check


def test_add_an_op(pytestconfig: pytest.Config) -> None:
    check("add-an-op.md", update=pytestconfig.getoption("--update-docs"))
