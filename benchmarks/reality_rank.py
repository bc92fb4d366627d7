"""One rank of the reality benchmark: several plans, each for some steps.

Started by `reality.py` on every device of the bed; rank 0 prints one JSON line per plan, with the
slowest rank's seconds of every step.
"""

import argparse
import gc
import json
import os
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist
from cluster_rank import _slowest
from reality_models import MODELS
from torch.optim import SGD

from parloom import api


def timed(plan: Path, steps: int) -> list[float]:
    """Seconds of the steps after two to warm up."""
    model, batch = MODELS[plan.parent.name]()
    trainer = api.parallelize(model.train(), plan, optimizer=lambda named: SGD(named, lr=0.05))
    times = []
    for index in range(2 + steps):
        dist.barrier()
        started = time.perf_counter()
        trainer.step(batch)
        if index >= 2:
            times.append(time.perf_counter() - started)
    return _slowest(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for plan in args.plans:
        with redirect_stdout(StringIO()):  # the log of the steps
            times = timed(plan, args.steps)
        gc.collect()
        if dist.get_rank() == 0:
            row = {"model": plan.parent.name, "plan": plan.name, "seconds": times}
            print("RESULT " + json.dumps(row), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in cluster_rank.py


if __name__ == "__main__":
    main()
