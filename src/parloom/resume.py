"""A run goes on from its last checkpoint, on the devices that are there: `parloom run --resume`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parloom import api
from parloom.cost.clusters import resolve_cluster
from parloom.errors import InfeasibleError, InputError, LaunchError
from parloom.execute import launch
from parloom.execute.checkpoint import latest
from parloom.execute.files import short_digest
from parloom.execute.manifest import MANIFEST, read_manifest, resolve
from parloom.ir.mesh import part_sizes
from parloom.ir.plan import Plan
from parloom.search.request import AUTO
from parloom.searching import Captured, asked_of
from parloom.tracing import traced


@dataclass(frozen=True, slots=True)
class Devices:
    """A cluster by its spec, and how many devices of it: None where the search may choose."""

    cluster: str
    count: int | None = None


def resume(
    path: str | Path,
    script: Sequence[str],
    *,
    checkpoint: str | Path | None = None,
    cluster: str | None = None,
    devices: int | None = None,
    timeout_s: float | None = None,
    trace: str | Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
    verbose: bool = False,
) -> int:
    """Run `script` on from the newest checkpoint in `checkpoint`, by default in the plan's folder;
    the exit code. On other devices than the plan's, those of `cluster` or a part of it, it runs
    under a new plan of the same model, batch and optimizer.

    Raises `InputError` where there is no checkpoint, `LaunchError` for a new plan inside of a job
    that is running, and what `plan` raises.
    """
    path = Path(path)
    file = path / "plan.json" if path.is_dir() else path
    plan = api.load(file)
    if plan.inference is not None:
        raise InputError(
            "--resume is about training, and this plan is for inference; `parloom run PLAN --"
            " REQUESTS ANSWERS` answers all requests"
        )
    last = last_checkpoint(file.parent if checkpoint is None else Path(checkpoint))
    there = devices_there(plan, cluster, devices)
    if there is not None:
        if launch.inside_a_job():
            raise LaunchError(
                f"--resume makes a new plan for {there.cluster}, and this process is a rank"
                " already: start `parloom run --resume` without torchrun, or plan first"
            )
        plan = replanned(plan, there, progress)
        file = api.save(plan, file.parent / f"replanned-{short_digest(plan)}")["plan"]
        progress(f"{file}: {plan.method} on {plan.decisions.num_ranks} devices of {there.cluster}")
    progress(f"going on from {last}, after step {read_manifest(last).step}")
    with traced(plan, trace, progress) as observed:
        return launch.run(
            plan,
            script,
            plan_path=file,
            say=progress,
            verbose=verbose,
            timeout_s=timeout_s,
            checkpoint=last,
            observed=observed,
        )


def last_checkpoint(folder: Path) -> Path:
    """The checkpoint of the most steps in a folder, or the folder itself if it is one.

    Raises `InputError` where there is none.
    """
    itself = resolve(folder.absolute())
    found = itself if (itself / MANIFEST).is_file() else latest(folder)
    if found is None:
        raise InputError(
            f"no checkpoint in {folder}: --checkpoint says where the script saves"
            " (`trainer.save(FOLDER)`); without one, run it from the start without --resume"
        )
    return found


def devices_there(plan: Plan, cluster: str | None, devices: int | None) -> Devices | None:
    """The devices to plan for anew: those that are asked for, or the GPUs that are left; None where
    the plan will do.
    """
    loaded = resolve_cluster(cluster or plan.cluster)
    ranks = plan.decisions.num_ranks
    if cluster is None and devices is None and loaded.cluster.device.name != "cpu":
        left = torch.cuda.device_count()
        if 0 < left < ranks and not launch.inside_a_job():
            sizes = part_sizes(loaded.cluster)
            if not sizes:
                raise InputError(
                    f"{left} devices of {loaded.cluster.name} are left, which has several types:"
                    " say of which they are (--cluster)"
                )
            return Devices(loaded.spec, max(size for size in sizes if size <= left))
    same = loaded.spec == resolve_cluster(plan.cluster).spec and devices in (None, ranks)
    return None if same else Devices(loaded.spec, devices)


def replanned(plan: Plan, there: Devices, progress: Callable[[str], None]) -> Plan:
    """The fastest plan for other devices of the same program, under the same limits; by the same
    method, or `auto` where that finds none there.
    """
    captured, asked = Captured.of(plan), asked_of(plan)

    def search(method: str) -> Plan:
        return api.search(
            captured,
            cluster=there.cluster,
            devices=there.count,
            progress=progress,
            **asked | {"method": method},
        )

    if asked["method"] != AUTO:
        try:
            return search(plan.method)
        except (InfeasibleError, InputError) as error:
            progress(f"{plan.method} has no plan for {there.cluster}: {error}; trying {AUTO}")
    return search(AUTO)
