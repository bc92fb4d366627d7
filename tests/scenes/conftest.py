"""Scenes happen on a laptop, as pages of documentation do."""

from tests.docs.conftest import captured, reader

__all__ = ["captured", "reader"]
