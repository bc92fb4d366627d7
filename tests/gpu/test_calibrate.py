"""On a GPU: what is measured there is timed by the device, and named after it."""

import pytest

from parloom import zoo
from parloom.capture import capture
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.cost.local_operators import local_operator
from parloom.cost.measured import calibrated
from parloom.execute.calibrate import calibrate, fingerprint
from parloom.ir.lower import lower
from parloom.ir.ops import op_of
from parloom.ir.pcg import Compute

pytestmark = pytest.mark.gpu


def test_a_gpu_is_measured() -> None:
    model, batch = zoo.build("gpt")
    graph = capture(model.train(), batch)
    pcg = lower(graph, next(METHODS["data_parallel"](graph, load_cluster("1xH100"), 1, 0)))
    made = calibrate([pcg], None, least_s=0.02)
    found = fingerprint()
    assert made.fingerprint == found
    assert (found.backend, found.driver[:4]) == ("nccl", "cuda")
    # Products of 2,048 rows are faster than any processor's, and matrix units beat plain ones.
    best = {p.dtype: max(q.flops / q.seconds for q in made.products if q.dtype == p.dtype)
            for p in made.products}  # fmt: skip
    assert best["bfloat16"] > best["float32"] > 5e12
    assert made.launch_s < 1e-4
    assert 1e-5 < made.split_s < 1e-3
    _, kernels = calibrated(load_cluster("1xH100"), made)
    for item in (item for f in (pcg.main, *pcg.functions) for item in f.body):
        if isinstance(item, Compute) and not op_of(item.node).view:
            assert kernels.seconds(local_operator(item, pcg.mesh)).source == "measured"
