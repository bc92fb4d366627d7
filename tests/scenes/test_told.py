"""Scenes can fail: by an exit code, by words that are not there, and by a traceback."""

import pytest

from tests.scenes.told import Told, told


def test_another_exit_code_is_seen() -> None:
    with pytest.raises(AssertionError, match="exit code 0 of parloom cluster show 2xcpu"):
        told("parloom cluster show 2xcpu", code=3)


def test_missing_words_are_seen() -> None:
    told("parloom cluster show 2xcpu").says("2 x cpu")
    with pytest.raises(AssertionError, match="no such words"):
        told("parloom cluster show 2xcpu").says("2 x cpu", "no such words")


def test_a_traceback_is_seen() -> None:
    with pytest.raises(AssertionError):
        Told(1, "", "Traceback (most recent call last)").says()
