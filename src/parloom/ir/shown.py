"""Values that draw themselves where one looks at them: terminals (Rich), IPython and notebooks.

How a value is drawn, and answered about, is known in higher layers, which say it when they are
imported: by then there is such a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Looks:
    """A value as a screen for Rich, as plain text, and as static HTML without script or style."""

    screen: Callable[[Any], Any]
    text: Callable[[Any], str]
    html: Callable[[Any], str]


_LOOKS: dict[type, Looks] = {}
_VERBS: dict[tuple[type, str], Callable[..., Any]] = {}


class Shown:
    """A value with `Looks`."""

    __slots__ = ()

    def __rich__(self) -> Any:
        """What `rich.print` and Rich's consoles show."""
        looks = _LOOKS.get(type(self))
        return repr(self) if looks is None else looks.screen(self)

    def _repr_html_(self) -> str | None:
        """What a notebook shows below a cell; None lets it show text."""
        looks = _LOOKS.get(type(self))
        return None if looks is None else looks.html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What IPython shows: HTML in notebooks, text on a terminal in the place of the `repr`."""
        looks = _LOOKS.get(type(self))
        return (
            {} if looks is None else {"text/plain": looks.text(self), "text/html": looks.html(self)}
        )


def drawn(kind: type, looks: Looks) -> None:
    """Values of `kind` look so."""
    _LOOKS[kind] = looks


def verb(kind: type, name: str, function: Callable[..., Any]) -> None:
    """Values of `kind` do `name` by this function of theirs."""
    _VERBS[kind, name] = function


def asked(value: object, name: str, *given: Any) -> Any:
    """What the function of that name answers for a value."""
    return _VERBS[type(value), name](value, *given)
