"""One rank of the cluster benchmarks: plans of parloom and what torch offers, in turns.

Started on every device of the bed. All sides of a row train the same model from the same weights on
the same batch with the same optimizer; rank 0 prints one JSON line per row. A plan that leaves
devices idle is trained before the others, by the ranks that it has.
"""

import argparse
import gc
import json
import os
import sys
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from cluster_models import MODELS, rate_of
from torch import Tensor
from torch.optim import SGD
from torch_sides import SIDES, Step

from parloom import api
from parloom.ir.regular_parts import devices_of
from parloom.runtime.spans import waiting_share

SPEND_S = 0.03
REST_S = 0.03
SLOW = 3.0
LONGEST_S = 1800


class ParloomStep:
    """The trainer of a plan that was made beforehand."""

    def __init__(self, name: str, plan: Path) -> None:
        model, self._batch = MODELS[name]()
        rate = rate_of(name)
        self._trainer = api.parallelize(model, plan, optimizer=lambda named: SGD(named, lr=rate))

    def __call__(self) -> Tensor:
        return self._trainer.step(self._batch).loss

    def waits(self) -> float:
        """The share of one more step in which this rank waits for other stages."""
        return waiting_share(self._trainer.step(self._batch, observed=True).spans)


def _timed(step: Step) -> tuple[float, Tensor]:
    # A quota saves what is not used for one period: who comes after a side that waited for the
    # network would start with more than who comes after one that computed to the end, or than in
    # the middle of a run. So all of it is spent.
    spent = time.perf_counter() + SPEND_S
    while time.perf_counter() < spent:
        pass
    dist.barrier()
    started = time.perf_counter()
    loss = step()
    return time.perf_counter() - started, loss


def _slowest(times: list[float], side: str = "") -> list[float]:
    """Each step's time on the rank that took longest; of one device alone those of the rank that is
    the fastest in all.
    """
    longest = torch.tensor(times, dtype=torch.float64)
    if side == "one device":
        ranks = [torch.empty_like(longest) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, longest)
        longest = min(ranks, key=lambda own: float(own.sum()))
    else:
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    found: list[float] = longest.tolist()
    return found


def _of_ranks(value: float) -> list[float]:
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
    return [float(one) for one in found]


def _mean(loss: Tensor) -> float:
    """The loss of the whole batch: parts differ where ranks have samples of their own."""
    total = loss.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _started(name: str, side: str, plans: Path) -> tuple[Step, Tensor] | str:
    """A side and its first loss, or, on all ranks alike, torch's reason why it has none."""
    if side not in SIDES:
        planned = ParloomStep(name, plans / name / side)
        return planned, planned()
    error = ""
    try:
        step = SIDES[side](*MODELS[name](), rate_of(name))
        loss = step()
    except Exception as raised:  # whatever it is, it stands in the table
        error = f"{type(raised).__name__}: {raised}".strip().partition("\n")[0]
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next(filter(None, errors)) if any(errors) else (step, loss)


@dataclass(frozen=True)
class Alone:
    """A side that was trained before the others: its steps on the slowest rank, and all losses."""

    seconds: list[float]
    losses: list[float]


def trained_alone(name: str, side: str, plans: Path, steps: int, port: int) -> Alone | None:
    """Train a plan that has fewer ranks than there are; rank 0 of the bed may be none of them."""
    stages = api.load(plans / name / side).decisions.stages if side not in SIDES else ()
    used = sorted({device for stage in stages for device in devices_of(stage)})
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not used or len(used) == world:
        return None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], port, world, rank == 0, timedelta(seconds=LONGEST_S)
    )
    if rank in used:
        dist.init_process_group("gloo", store=store, rank=used.index(rank), world_size=len(used))
        step = ParloomStep(name, plans / name / side)
        losses = [step()]
        times = []
        for _ in range(1 + steps):
            seconds, loss = _timed(step)
            times.append(seconds)
            losses.append(loss)
        found = Alone(_slowest(times[1:]), [_mean(loss) for loss in losses])
        dist.destroy_process_group()
        if rank == used[0]:
            store.set("found", json.dumps(asdict(found)))
    found = Alone(**json.loads(store.get("found")))
    store.add("read", 1)
    while rank == 0 and store.add("read", 0) < world:  # its store ends with it
        time.sleep(REST_S)
    return found


def compare(
    name: str, names: list[str], plans: Path, steps: int, first: int, alone: dict[str, Alone]
) -> dict[str, object]:
    """Time all sides in turns but those that were trained `alone`; the one at `first` begins, and
    the next one in the next turn.

    Of sides that take `SLOW` times as long as the fastest the second step counts, of others all
    after it: buckets are formed in the first step, memory is warm in the second.
    """
    started = {side: _started(name, side, plans) for side in names if side not in alone}
    sides = {side: found[0] for side, found in started.items() if not isinstance(found, str)}
    losses = {side: [found[1]] for side, found in started.items() if not isinstance(found, str)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    slow: set[str] = set()
    for index in range(1 + steps):
        begin = (first + index) % max(1, len(sides))
        for side, step in (*list(sides.items())[begin:], *list(sides.items())[:begin]):
            if side not in slow:
                seconds, loss = _timed(step)
                times[side].append(seconds)
                losses[side].append(loss)
        if index == 0 and sides:
            warm = _slowest([times[side][0] for side in sides])
            slow = {s for s, t in zip(sides, warm, strict=True) if t > SLOW * min(warm)}
    counts = [len(of_side) for of_side in losses.values()]
    last = min([*counts, *(len(own.losses) for own in alone.values())]) - 1
    return {
        "model": name,
        "seconds": {side: own.seconds for side, own in alone.items()}
        | {side: _slowest(t if side in slow else t[1:], side) for side, t in times.items()},
        "losses": {side: own.losses[last] for side, own in alone.items()}
        | {side: _mean(losses[side][last]) for side in sides},
        "first_losses": {side: own.losses[0] for side, own in alone.items()}
        | {side: _mean(losses[side][0]) for side in sides},
        "waits": {
            side: _of_ranks(fmean(step.waits() for _ in range(steps)))
            for side, step in sides.items()
            if isinstance(step, ParloomStep) and side not in slow
        },
        "errors": {side: found for side, found in started.items() if isinstance(found, str)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", type=Path, required=True, help="folder of MODEL/METHOD")
    parser.add_argument("--rows", nargs="+", required=True, help="model:method or torch's side,..")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # what torch says of its own sides
    rows = [(name, sides.split(",")) for name, _, sides in (r.partition(":") for r in args.rows)]
    alone: dict[str, dict[str, Alone]] = {name: {} for name, _ in rows}
    port = int(os.environ["MASTER_PORT"])
    for name, sides in rows:
        for side in sides:
            port += 1
            with redirect_stdout(StringIO()):
                own = trained_alone(name, side, args.plans, args.steps, port)
            if own is not None:
                alone[name][side] = own
    dist.init_process_group("gloo")
    for name, sides in rows:
        with redirect_stdout(StringIO()):  # the log of the steps
            found = compare(name, sides, args.plans, args.steps, args.first, alone[name])
        gc.collect()
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    sys.stdout.flush()
    # Not by the interpreter: threads of gloo now and then abort a process that takes itself apart.
    os._exit(0)


if __name__ == "__main__":
    main()
