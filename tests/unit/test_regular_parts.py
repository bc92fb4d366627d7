"""Mixed clusters as regular parts, and what crosses between these."""

from pathlib import Path

import pytest

from parloom.cost.clusters import load_cluster
from parloom.errors import InputError
from parloom.ir.mesh import Cluster, Mesh, grid
from parloom.ir.plan import Decisions, Stage, one_stage
from parloom.ir.regular_parts import (
    Join,
    check_on_any,
    joined,
    memory_of,
    own_part,
    part_with,
    regular_parts,
    slowest_join,
    used_cluster,
)
from parloom.report.mixed import left_out_words

# Two nodes of four, one of eight below two switches, and a group of unequal nodes twice.
NESTED = """\
name: mixed
join: {name: wan, bandwidth: 10Gbit/s, latency: 50us}
parts:
  - {name: old, count: 2, device: V100, levels: [{name: NVLink2, size: 4, bandwidth: 150GB/s}]}
  - name: new
    device: A100
    levels:
      - {name: NVLink3, size: 4, bandwidth: 300GB/s}
      - {name: leaf, size: 2, bandwidth: 100Gbit/s}
    uplink: {bandwidth: 40Gbit/s, latency: 20us}
  - name: island
    count: 2
    join: {name: lan, bandwidth: 25Gbit/s, latency: 10us}
    parts:
      - {name: one, device: T4, levels: [{name: PCIe3, size: 2, bandwidth: 12GB/s}]}
      - {name: two, count: 2, device: P4, levels: [{name: PCIe3, size: 1, bandwidth: 12GB/s}]}
"""
PLAIN = "2x4xA100"


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path: Path = tmp_path_factory.mktemp("cluster") / "mixed.yaml"
    text = NESTED.replace("device: P4", "device: L4")
    path.write_text(text)
    return load_cluster(str(path))


def stage(*devices: int) -> Stage:
    return Stage((), (range(devices[0], devices[-1] + 1),), grid({"x": len(devices)}))


def test_a_regular_cluster_is_its_own_part() -> None:
    cluster = load_cluster(PLAIN)
    (part,) = regular_parts(cluster)
    assert part.cluster == cluster
    assert part.devices == range(8)
    assert joined(cluster, range(4), range(4, 8)) == Join(cluster, 1)
    assert joined(cluster, range(2), range(2, 4)) == Join(cluster, 0)
    assert slowest_join(cluster) == Join(cluster, 1)


def test_parts_follow_each_other_and_have_levels_alike(nested: Cluster) -> None:
    parts = regular_parts(nested)
    assert [part.devices for part in parts] == [
        range(8), range(8, 16), range(16, 18), range(18, 20), range(20, 22), range(22, 24),
    ]  # fmt: skip
    assert {len(part.cluster.levels) for part in parts} == {3}
    assert [[level.size for level in p.cluster.levels] for p in parts[:3]] == [
        [4, 1, 2], [4, 2, 1], [2, 1, 1],
    ]  # fmt: skip
    assert sum(part.cluster.num_devices for part in parts) == nested.num_devices


def test_parts_are_joined_by_the_slowest_link_between_them(nested: Cluster) -> None:
    def rate(one: range, other: range) -> tuple[float, float]:
        found = joined(nested, one, other)
        assert found.bridges == (part_with(nested, one) != part_with(nested, other))
        link = found.cluster.levels[found.level].link
        return link.bandwidth_bytes_per_s, link.latency_s

    assert rate(range(4), range(4, 8)) == (10e9 / 8, 50e-6)  # nodes of one part
    assert rate(range(4), range(8, 16)) == (10e9 / 8, 50e-6)  # the slower of two uplinks
    assert rate(range(8, 12), range(16, 18)) == (10e9 / 8, 50e-6)
    assert rate(range(16, 18), range(18, 19)) == (25e9 / 8, 10e-6)  # inside of an island
    assert rate(range(16, 18), range(20, 22)) == (10e9 / 8, 50e-6)  # between two islands
    slowest = slowest_join(nested)
    assert slowest.bridges
    assert slowest.cluster.levels[slowest.level].link.bandwidth_bytes_per_s == 10e9 / 8


def test_a_stage_lies_within_one_part(nested: Cluster) -> None:
    assert own_part(nested, stage(*range(8, 12))).device.name.startswith("A100")
    with pytest.raises(InputError, match=r"6 to 9 of mixed are not all in one of its parts"):
        own_part(nested, stage(6, 7, 8, 9))
    with pytest.raises(InputError, match=r"over more nodes than so many need"):
        own_part(nested, stage(2, 3, 4, 5))


def test_what_idle_devices_are_worth_is_said(nested: Cluster) -> None:
    """With the step of the fastest plan that uses some of them; or that there is none."""

    def plan(*devices: tuple[int, int]) -> Decisions:
        return Decisions(tuple(stage(*range(first, last + 1)) for first, last in devices))

    fast, slow = (plan((8, 15)), 1.0), (plan((0, 7), (8, 15)), 1.2)
    idle = "8 x V100-SXM2-16GB + 4 x T4 + 4 x L4 stay idle"
    assert left_out_words(nested, [slow, fast]) == (
        f"{idle}: with them 1.2 s (+20.0%), without 1 s",
    )
    assert left_out_words(nested, [fast]) == (f"{idle}: no plan that was found and fits uses them",)
    every = plan((0, 7), (8, 15), (16, 17), (18, 19), (20, 21), (22, 23)), 0.5
    (line,) = left_out_words(nested, [slow, fast, every])
    fewer = idle.removesuffix(" stay idle")
    assert line == f"all devices are used: without {fewer} 1 s (+100.0%), with them 500 ms"
    assert left_out_words(nested, [every]) == ()


def test_limits_are_those_of_types(nested: Cluster) -> None:
    assert memory_of(nested, "T4") == 16 * 10**9
    largest = load_cluster(PLAIN).device
    assert memory_of(nested) == memory_of(nested, largest.name) == largest.memory_bytes


def test_a_check_passes_where_one_part_does(nested: Cluster) -> None:
    def four(part: Cluster) -> None:
        if part.num_devices != 2:
            raise InputError(f"{part.num_devices} devices")

    check_on_any(nested, four)
    with pytest.raises(InputError, match="8 devices"):
        check_on_any(load_cluster(PLAIN), four)


def test_plans_are_priced_on_what_they_use(nested: Cluster) -> None:
    alone = used_cluster(nested, Decisions((stage(8, 9),)))
    assert (alone.num_devices, alone.device.name[:4]) == (2, "A100")
    both = Decisions((stage(0, 1), stage(8, 9)))
    assert used_cluster(nested, both) == nested
    plain = load_cluster(PLAIN)
    assert used_cluster(plain, Decisions(one_stage(grid({"x": 4})))).num_devices == 4
    apart = tuple(Stage((), (range(d, d + 1),), Mesh(())) for d in (0, 2))
    with pytest.raises(InputError, match="no stage has device 1, and some have devices after it"):
        used_cluster(plain, Decisions(apart))
    with pytest.raises(InputError, match="3 devices are no part of"):
        used_cluster(plain, Decisions((stage(0, 1, 2),)))
