"""What a search could not lower or play, counted with the reasons, so that its answer says so."""

from collections import Counter
from collections.abc import Callable
from traceback import walk_tb
from types import CodeType
from typing import TypeVar

from parloom.errors import CutError, InputError, LayoutError, one_line

T = TypeVar("T")


class Refusals:
    """The layouts, stages and splits of one question that were left out because of an error; cuts
    that the model does not have (`CutError`) are none that anything could have.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        # By the place that raises them: texts of one differ in names and numbers only.
        self._texts: dict[tuple[CodeType, int], str] = {}

    def tried(self, make: Callable[[], T]) -> T | None:
        """What `make` returns; None where it is refused, which counts."""
        try:
            return make()
        except CutError:
            return None
        except (LayoutError, InputError) as error:
            *_, (frame, line) = walk_tb(error.__traceback__)
            # What comes behind a semicolon is advice to those who made a plan by hand.
            text, _, _ = one_line(error).partition(";")
            self.counts[self._texts.setdefault((frame.f_code, line), text)] += 1
            return None

    def words(self) -> str:
        """How many there are, and why; empty where there are none."""
        if not self.counts:
            return ""
        reasons = (f"{number} as where {text}" for text, number in self.counts.most_common())
        many = f"{self.counts.total()} layouts, stages or splits of pipelines"
        return f"{many} cannot be lowered: {'; '.join(reasons)}"
