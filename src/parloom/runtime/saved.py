"""What autograd saves through hooks, so that it can go before the graph does."""

from typing import Any

from parloom.errors import VerifyError


class Saved:
    """A tensor that is saved, as `packed`; nothing asks for it once it was let go of."""

    __slots__ = ("__weakref__", "gone", "packed")

    def __init__(self, packed: Any = None) -> None:
        self.packed, self.gone = packed, False

    def let_go(self) -> None:
        """Free it."""
        self.packed, self.gone = None, True

    def check(self) -> None:
        """Raise `VerifyError` where it was let go of."""
        if self.gone:
            refuse()


def refuse(packed: object = None) -> Any:
    """What a hook does that is asked for a tensor which was let go of."""
    raise VerifyError("a backward pass asks for a tensor that was let go of before")
