"""What is said of a config that the Hub does not give."""

import pytest

from parloom.capture import hugging_face
from parloom.errors import InputError


class GatedRepoError(Exception):
    pass


class LocalEntryNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (GatedRepoError, "it is gated: .* `hf auth login`"),
        (LocalEntryNotFoundError, "config for a/b is not in .*: run once online, or name a local"),
        (ValueError, "could not be read: no such thing"),
    ],
)
def test_a_hub_id_without_a_config_says_what_to_do(
    kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such thing") from kind("no such thing")

    monkeypatch.setattr(hugging_face, "_without_code", fail)
    with pytest.raises(InputError, match=said):
        hugging_face.read_config("a/b")
