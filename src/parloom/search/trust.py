"""Which estimates are worth simulating, by how far from simulated steps those before were."""

from math import inf

# Estimates are taken to be too high by up to this share at first, or by more where that was seen.
MARGIN = 0.08
# After so many simulations of one question, an estimate is taken to be too high by no more than a
# `SPREAD` beyond what those before it were.
SEEN, SPREAD = 4, 0.01


class Trust:
    """What estimates of one question promise; `best_ps` is the fastest simulated step that fits."""

    def __init__(self) -> None:
        self.best_ps, self._least, self._seen = inf, 1.0, 0

    def saw(self, estimate_ps: int, step_ps: float, *, fits: bool) -> None:
        """Learn from a simulated step."""
        self._seen += 1
        self._least = min(self._least, step_ps / max(1, estimate_ps))
        if fits:
            self.best_ps = min(self.best_ps, step_ps)

    def promises(self, estimate_ps: float) -> bool:
        """Whether a plan with this estimate may be faster than the best."""
        learnt = 1 - self._least + SPREAD
        margin = max(learnt, MARGIN) if self._seen < SEEN else learnt
        return estimate_ps * (1 - margin) <= self.best_ps
