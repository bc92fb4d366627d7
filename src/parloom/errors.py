"""The one exception tree: every class carries the exit code of the command line's contract.

Messages say what went wrong (with the values), where (the user's module path or file position),
why, and what to try next. Anything that is not a `ParloomError` is a bug and exits with 1.
"""

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from unicodedata import category

CONTROLS = frozenset({"Cc", "Cs", "Zl", "Zp"})  # Unicode's categories


def visible(text: str) -> str:
    """`text` with an escape for each character that does not print or changes how others do.

    Those are control characters, marks of direction and of no width, and lone surrogates; names of
    files, models and plans may hold any. Line breaks and tabs stay: see `has_controls`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def has_controls(text: str) -> bool:
    """Whether `text` has a character that moves the cursor, breaks a line, or is none at all."""
    return not text.isprintable() and any(category(c) in CONTROLS for c in text)


def one_line(error: object) -> str:
    """The text of an error as part of a note: spaces for line breaks."""
    return " ".join(visible(str(error)).split())


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class ParloomError(Exception):
    """Base of all errors that a user can cause or mend; its text is `visible`."""

    exit_code = 2

    def __str__(self) -> str:
        return visible(super().__str__())


class InputError(ParloomError):
    """Bad usage or a bad input file: unknown name, wrong shape, malformed document."""


class BudgetError(InputError):
    """The budget that was given ends before there is a plan."""


class NotYetError(ParloomError):
    """A documented feature that this version does not have."""


class InfeasibleError(ParloomError):
    """No plan fits the memory, or none holds all pins; `document` says why in JSON values."""

    exit_code = 3

    def __init__(self, message: str, document: Mapping[str, object] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.document = document


class InexpressibleError(ParloomError):
    """A framework cannot be told all decisions of a plan; `missing` are those, in words."""

    exit_code = 3

    def __init__(self, target: str, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        listed = "".join(f"\n{line}" for line in self.missing)
        super().__init__(f"nothing was written (--strict); not expressible in {target}:{listed}")


class CaptureError(ParloomError):
    """The model cannot be captured as a graph, or uses an operator without a rule."""

    exit_code = 4


class FingerprintError(ParloomError):
    """A plan was made for another model, batch or optimizer."""

    exit_code = 5


class GapError(ParloomError):
    """The quality asked for with --require-gap was not reached."""

    exit_code = 6


class StoppedError(ParloomError):
    """Ctrl-C ended a search that had found nothing yet."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted")


class EqualityError(ParloomError):
    """The parallel program does not equal the single-device one."""

    exit_code = 7


class LaunchError(ParloomError):
    """The environment cannot run the plan: world size, backend, a rank that died."""

    exit_code = 8


class SilentRankError(LaunchError):
    """One of `ranks` did not do in time what rank `waiting` needed of it, in an action if any."""

    def __init__(
        self,
        ranks: Iterable[int],
        waiting: int,
        timeout_s: float,
        action: str = "",
        named: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.ranks, self.waiting, self.timeout_s = tuple(ranks), waiting, timeout_s
        silent = " or ".join(named(rank) for rank in self.ranks)
        during = f" in {action}" if action else ""
        waited = f"{named(waiting)} waited for it{during}"
        super().__init__(f"{silent} did not answer within {timeout_s:g} s: {waited}")


class VerifyError(ParloomError):
    """An invariant of a graph, plan or parallel graph is broken (`ir.verify` names it)."""


class LayoutError(ParloomError):
    """A layout does not divide, names an unknown axis, or uses an axis twice."""


class CutError(LayoutError):
    """A model does not come apart into these stages, whatever their layouts."""


MOST_NAMES = 100
"""Names that a message lists at most."""


def shell_word(text: object) -> str:
    """A path or a name in a command that is printed to be typed: in quotes where a shell would read
    it otherwise. A number sign inside of a word is none of a comment.
    """
    word = str(text)
    return word if re.fullmatch(r"[\w@%+=:,./-][\w@%+=:,./#-]*", word) else shlex.quote(word)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint with the nearest known names, or when none is near all of them, if they are few."""
    names = list(known)
    lower = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(lower[n]) for n in near) + "?"
    if len(names) > MOST_NAMES:
        return f"; none of the {len(names)} known names is near"
    return f"; known: {', '.join(names)}"
