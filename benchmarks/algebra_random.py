"""Random models of `algebra.py`: a model of `rewritten_source.py`, at times of larger sizes, and a
small cluster.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from rewritten_source import source

from parloom import api

CLUSTERS = ("2x2xcpu", "1x4xV100", "1x8xH100")
# By how much widths and numbers of samples are larger.
SCALES = (1, 16, 64)
METHODS = ("auto", "auto --no-rewrites", "sequential")


def random_cases(
    first: int, count: int, folder: Path
) -> Iterator[tuple[str, str, Callable[[], api.Captured]]]:
    """Models with names, clusters, and how they are captured."""
    for seed in range(first, first + count):
        rng = Random(f"algebra {seed}")
        cluster, scale = rng.choice(CLUSTERS), rng.choice(SCALES)

        def captured(seed: int = seed, scale: int = scale) -> api.Captured:
            path = folder / f"model_{seed}.py"
            path.write_text(source(seed, scale).text, encoding="utf-8")
            return api.capture(f"{path}:factory", optimizer="sgd")

        yield f"random {seed} x{scale}", cluster, captured
