"""Reports of large plans: how long they take to write, how large they are, how long a browser opens
them, and whether every view of them passes the tests of `tests/web`.

    PYTHONPATH=. python benchmarks/reports.py [--cases gpt3_175b,llama31_405b,mmt] [--out DIR]
        [--json FILE] [REPORT ...]

Each case is planned and reported by commands in processes of their own, unless REPORTs are given.
Goals: 5 MB, and 2 s until all charts are drawn (median of five); exit code 1 where one is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from common import ROOT, report
from questions import Row, documented
from tests.web.driven import Seen, chromium

MOST_BYTES, MOST_S, TIMES = 5_000_000, 2.0, 5
# Flags of `parloom plan`, and the model of `scale` in cases.yaml whose configuration it reads.
CASES: dict[str, tuple[str, str]] = {
    "mmt": ("", "zoo:mmt --cluster 4xV100 --method graphpipe"),
    "gpt3_175b": (
        "gpt3_175b",
        "--cluster 128x8xA100-80GB --batch 1024 --seq 2048 --dtype bf16 --optimizer adamw",
    ),
    "llama31_405b": (
        "llama31_405b",
        "--cluster 2048x8xH100 --batch 2048 --seq 8192 --dtype bf16 --optimizer adamw"
        " --method megatron --microbatches 16",
    ),
}


def written(name: str, folder: Path) -> tuple[Path, Row]:
    """The report of a case, and the seconds of its commands."""
    model, flags = CASES[name]
    words = flags.split()
    if model:
        config = folder / f"{model}.json"
        config.write_text(json.dumps(documented()["scale"][model]["config"]), encoding="utf-8")
        words.insert(0, str(config))
    plan, page = folder / name, folder / f"{name}.html"
    seconds = {}
    for verb, command in (
        ("plan", [*words, "--out", str(plan)]),
        ("report", [str(plan), "--out", str(page)]),
    ):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", "parloom", verb, *command], check=True)
        seconds[f"{verb}_s"] = time.monotonic() - begun
    return page, seconds


def opened(page: Path) -> float:
    """Seconds until all charts are drawn, the median of some."""
    found = []
    with chromium() as browser:
        for _ in range(TIMES):
            seen = Seen(browser, page)
            found.append(seen.opened_s)
            seen.page.close()
    return statistics.median(found)


def is_driven(page: Path) -> bool:
    """Whether the tests of any report pass."""
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/web", "--report", str(page)]
    return subprocess.run(tests, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    """Print the table; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="*", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    rows: list[Row] = []
    with TemporaryDirectory() as place:
        folder = options.out or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        given = [(page.resolve(), Row()) for page in options.reports]
        for page, seconds in given or (written(name, folder) for name in options.cases.split(",")):
            row = {"report": page.stem, **seconds, "bytes": page.stat().st_size}
            rows.append(row | {"opened_s": opened(page), "driven": is_driven(page)})
            report("reports", rows, options.json)
    print("| report | MB | open | every view |\n|---|---|---|---|")
    for row in rows:
        size = f"{row['bytes'] / 1e6:.2f}"
        passes = "passes" if row["driven"] else "FAILS"
        print(f"| {row['report']} | {size} | {row['opened_s']:.2f} s | {passes} |")
    good = all(
        row["driven"] and row["bytes"] < MOST_BYTES and row["opened_s"] < MOST_S for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
