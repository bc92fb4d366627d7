"""Clusters: specs, the device table, files, and every complaint with its place."""

import re
from pathlib import Path

import pytest

from parloom.cost.clusters import load_cluster, resolve_cluster
from parloom.cost.collectives import collective
from parloom.cost.devices import find_device, known_devices
from parloom.errors import InputError
from parloom.ir.mesh import part_of

LAB = """\
name: lab
device: A100-40GB
levels:
  - {name: nvlink, size: 4, bandwidth: 300GB/s, latency: 4us}
  - {name: ethernet, size: 3, bandwidth: 25Gbit/s}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "lab.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_two_nodes_of_eight() -> None:
    loaded = resolve_cluster("2x8xH100")
    cluster = loaded.cluster
    assert cluster.device.name == "H100-SXM5-80GB"
    assert [level.size for level in cluster.levels] == [8, 2]
    assert cluster.levels[0].link.bandwidth_bytes_per_s == 450e9
    # 400 GB/s a node over 8 devices
    assert cluster.levels[1].link.bandwidth_bytes_per_s == 50e9
    assert cluster.backend == "nccl"
    assert loaded.assumptions[0] == "2 nodes x 8 devices = 16 x H100-SXM5-80GB"
    assert any(
        "between nodes: InfiniBand, 50 GB/s per device" in line for line in loaded.assumptions
    )


def test_one_node_has_one_level() -> None:
    cluster = load_cluster("8xH100")
    assert cluster.num_devices == 8
    assert len(cluster.levels) == 1
    assert load_cluster("1x8xH100") == cluster


def test_cpu_is_gloo_with_stated_links() -> None:
    loaded = resolve_cluster("4xcpu")
    assert loaded.cluster.backend == "gloo"
    assert loaded.cluster.device.rate("float32") == 200e9
    assert loaded.cluster.device.rate("bfloat16") == 100e9
    assert any("loopback" in line and "assumed" in line for line in loaded.assumptions)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("H100", "H100-SXM5-80GB"),
        ("a100", "A100-SXM4-80GB"),
        ("V100", "V100-SXM2-16GB"),
        ("V100-32GB", "V100-SXM2-32GB"),
        ("GH200-96GB", "GH200-96GB"),
        ("CPU", "cpu"),
    ],
)
def test_short_names_in_any_case(short: str, name: str) -> None:
    assert find_device(short).device.name == name


def test_every_device_is_complete_and_named_once() -> None:
    table = known_devices()
    names = [alias.lower() for d in table for alias in (d.device.name, *d.short)]
    assert len(names) == len(set(names))
    assert all(d.source and d.scale_up.level.link.bandwidth_bytes_per_s > 0 for d in table)
    assert len(table) >= 30


def test_a_rack_wide_fabric_joins_nodes() -> None:
    assert load_cluster("4x4xGB200").levels[1].link.bandwidth_bytes_per_s == 900e9
    assert load_cluster("2x72xGB200").levels[1].link.bandwidth_bytes_per_s == 50e9
    loaded = resolve_cluster("64x4xGB200")  # four racks of as many nodes as divide and fit
    rates = [(v.size, v.link.bandwidth_bytes_per_s) for v in loaded.cluster.levels]
    assert rates == [(4, 900e9), (16, 900e9), (4, 50e9)]
    assert any(line.startswith("between 16 nodes of a rack") for line in loaded.assumptions)
    assert any(line.startswith("between racks: InfiniBand") for line in loaded.assumptions)


def test_nodes_of_four_are_joined_by_their_network() -> None:
    levels = load_cluster("2x4xV100-32GB").levels
    assert [level.name for level in levels] == ["NVLink2", "Omni-Path"]


@pytest.mark.parametrize(("number", "links"), [(2, 1), (4, 3), (8, 7)])
def test_a_part_of_a_full_mesh_has_the_links_inside_it(number: int, links: int) -> None:
    (level,) = load_cluster(f"{number}xMI300X").levels
    assert level.link.bandwidth_bytes_per_s == pytest.approx(links * 64e9)
    (whole,) = load_cluster("8xMI300X").levels
    assert whole.part(number).link == level.link
    switch = load_cluster("8xH100").levels[0]
    assert switch.part(number).link == switch.link


def test_a_part_of_a_cluster_is_some_of_its_prime_axes() -> None:
    whole = load_cluster("6x8xH100")
    for count, sizes in ((1, (1, 1)), (4, (4, 1)), (8, (8, 1)), (24, (8, 3)), (48, (8, 6))):
        part = part_of(whole, count)
        assert tuple(level.size for level in part.levels) == sizes
        assert part.num_devices == count
        inside = {(axis.size, axis.level) for axis in part.prime_axes()}
        assert inside <= {(axis.size, axis.level) for axis in whole.prime_axes()}
    assert part_of(whole, 48).levels == whole.levels
    with pytest.raises(InputError, match="5 devices are no regular part"):
        part_of(whole, 5)


def test_a_part_of_a_ring_is_a_line() -> None:
    (ring, *_) = load_cluster("64xTPU-v4").levels
    assert ring.fabric == "ring"
    assert ring.part(ring.size).fabric == "ring"
    assert ring.part(2).fabric == "line"


def test_presets_say_what_the_table_of_hardware_says() -> None:
    """Memory in decimal GB and fabrics per device and direction, as in hardware.csv."""
    stated = {"TPU-v4": (32, 300), "TPU-v5p": (95, 600), "TPU-v5e": (16, 200), "H100": (80, 450),
              "GB200": (186, 900), "V100": (16, 150), "MI300X": (192, 448)}  # fmt: skip
    for name, (memory, fabric) in stated.items():
        known = find_device(name)
        links = max(1, 2 * known.scale_up.torus)
        assert known.device.memory_bytes == memory * 10**9
        assert links * known.scale_up.level.link.bandwidth_bytes_per_s == fabric * 1e9


@pytest.mark.parametrize(
    "spec", ["TPU-v3:4x4", "TPU-v6e:4x8", "TPU-v6e:16x16", "TPU-v7x:2x2x1", "TPU-v7x:4x4x8"]
)
def test_slices_of_all_pods(spec: str) -> None:
    """Those below the sides that wrap around, too."""
    name, _, sides = spec.partition(":")
    levels = [level.size for level in load_cluster(spec).levels]
    assert levels == sorted(int(side) for side in sides.split("x") if side != "1")
    with pytest.raises(InputError, match=rf"a pod of {name} has no such slice; there are \d+x"):
        load_cluster(f"{spec}x3")


def test_digits_are_those_of_ascii() -> None:
    for spec in ("TPU-v5e:4x\N{ARABIC-INDIC DIGIT FOUR}", "\N{ARABIC-INDIC DIGIT FOUR}xcpu"):
        with pytest.raises(InputError, match="cannot read the cluster"):
            load_cluster(spec)


def test_more_devices_than_the_fabric_joins_is_said() -> None:
    assert any("as fast as 8" in line for line in resolve_cluster("16xH100").assumptions)


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown device 'H1000'; did you mean .*'H100'"):
        load_cluster("2x8xH1000")


@pytest.mark.parametrize("spec", ["H100", "x8xH100", "2x8", "", "axbxc", "-2x8xH100"])
def test_unreadable_spec_shows_the_forms(spec: str) -> None:
    with pytest.raises(InputError, match=r"2x8xH100.*4xcpu.*YAML|unknown device"):
        load_cluster(spec)


@pytest.mark.parametrize("spec", ["0x8xH100", "8x0xH100", "0xcpu", "9999999x9999999xH100"])
def test_device_count_out_of_range(spec: str) -> None:
    with pytest.raises(InputError, match="out of range"):
        load_cluster(spec)


def test_file(tmp_path: Path) -> None:
    loaded = resolve_cluster(write(tmp_path, LAB))
    cluster = loaded.cluster
    assert (cluster.name, cluster.num_devices) == ("lab", 12)
    assert cluster.device.name == "A100-SXM4-40GB"
    assert cluster.levels[1].link.bandwidth_bytes_per_s == 3.125e9
    assert cluster.levels[0].link.latency_s == pytest.approx(4e-6)
    assert [line.split(": ")[1] for line in loaded.assumptions] == [
        "nvlink gives payload 77% of its bandwidth (assumed, as for NVLink3)",
        "ethernet takes 30 us a message and gives payload 85% of its bandwidth"
        " (assumed, as for Ethernet)",
    ]


def test_a_file_fits_on_one_line_that_reads_back_exactly(tmp_path: Path) -> None:
    loaded = resolve_cluster(write(tmp_path, LAB))
    again = resolve_cluster(loaded.spec)
    assert again.cluster == loaded.cluster
    assert again.spec == loaded.spec
    assert "\n" not in loaded.spec
    spec = resolve_cluster("2x8xH100")
    assert resolve_cluster(spec.spec) == spec


def test_a_damaged_line_has_a_place() -> None:
    with pytest.raises(InputError, match=r"cluster:1:2: unknown key 'nam'; did you mean 'name'"):
        load_cluster('{"nam": "lab"}')


def test_levels_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Links are counted by the names of their levels: of one name, two would be one."""
    two = "  - {name: InfiniBand, size: 2, bandwidth: 50GB/s}\n"
    loaded = resolve_cluster(write(tmp_path, f"{LAB}{two}{two}"))
    names = [level.name for level in loaded.cluster.levels]
    assert names == ["nvlink", "ethernet", "InfiniBand 1", "InfiniBand 2"]
    known = load_cluster("2x8xH100").levels[1].link
    assert loaded.cluster.levels[3].link.efficiency == known.efficiency  # by the name that is given


def test_file_with_its_own_device(tmp_path: Path) -> None:
    own = """\
device:
  name: chip
  memory: 64GiB
  memory_bandwidth: 1.6TB/s
  rates: {bf16: 200TFLOP/s, fp32: 50TFLOP/s}
backend: gloo
levels: [{name: bus, size: 2, bandwidth: 64GB/s}]
"""
    cluster = load_cluster(write(tmp_path, own))
    assert cluster.device.rate("bfloat16") == 200e12
    assert cluster.device.memory_bytes == 64 * 2**30
    assert (cluster.name, cluster.backend) == ("lab", "gloo")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size: 4", "sise: 4", r"lab.yaml:4:20: unknown key 'sise'; did you mean 'size'"),
        ("25Gbit/s", "25Gb/s", r"lab.yaml:5:42: bandwidth: '25Gb/s' is ambiguous.*25Gbit/s or"),
        ("A100-40GB", "A10-40GB", r"lab.yaml:2:9: device: unknown device 'A10-40GB'; did you mean"),
        ("size: 3", "size: three", r"lab.yaml:5:28: size: expected a whole number >= 1"),
        ("size: 3", "size: 0", r"expected a whole number >= 1, got '0'"),
        ("name: lab", "name: [lab]", r"^[^:]*lab.yaml:1:7: expected a plain value"),
        (", size: 3", "", r"lab.yaml:5:\d+: missing key 'size' \(or 'torus', a list of sizes\)"),
        ("name: lab", "name: lab\nname: lab", r"lab.yaml:2:1: key 'name' is given twice"),
        ("device: A100-40GB\n", "", r"lab.yaml:1:1: missing key 'device'"),
        ("levels:\n", "levels: 3\n#", r"lab.yaml:\d+:\d+: "),
        ("name: lab", "backend: mpi", r"backend: unknown backend 'mpi'"),
        ("name: lab", "name: {", r"lab.yaml:\d+:\d+: not YAML"),
        ("size: 3", "size: 999999999", r"at most 1048576 can be planned for"),
    ],
)
def test_faults_in_a_file_have_a_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(write(tmp_path, LAB.replace(old, new)))


@pytest.mark.parametrize("text", ["", "- a\n", "just text", "[" * 5000, "a: \x00"])
def test_what_is_no_cluster_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"lab.yaml"):
        load_cluster(write(tmp_path, text))


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = LAB.replace("name: lab", f"name: !!python/object/apply:os.mkdir ['{marker}']")
    with pytest.raises(InputError, match="expected a plain value"):
        load_cluster(write(tmp_path, text))
    assert not marker.exists()


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the cluster file .*No such file"):
        load_cluster(str(tmp_path / "none.yaml"))
    path = tmp_path / "lab.yaml"
    path.write_bytes(b"\x80\x04\x95")
    with pytest.raises(InputError, match="UTF-8"):
        load_cluster(str(path))


# --- hosts, prices, sharing, tori, parts ------------------------------------------------------


def test_every_device_of_the_measurements_is_known() -> None:
    """Names as in the table of published hardware."""
    names = """V100-SXM2-16GB; V100-SXM2-32GB; V100-SXM3-32GB (DGX-2); A100-SXM4-40GB;
        A100-SXM4-80GB; A100-PCIe-80GB; H100-SXM5-80GB; H100-PCIe-80GB;
        H100-96GB-HBM2e (Meta Grand Teton); H200-SXM-141GB; H800-80GB; GH200-96/144GB; B200-180GB;
        B300; GB200 (NVL72); GB300 (NVL72); L40S; MI300X; MI325X; MI355X; Gaudi2; Gaudi3; Trainium2;
        TPU v3 (chip); TPU v4; TPU v5e; TPU v5p; TPU v6e (Trillium); TPU v7x (Ironwood)"""
    for name in names.split(";"):
        known = find_device(name.strip())
        spec = f"2x4x{name.strip()}"
        assert load_cluster(spec).device == known.device
        assert load_cluster(resolve_cluster(spec).spec) == load_cluster(spec)


def test_every_number_has_a_source_and_what_was_recalled_is_said() -> None:
    for known in known_devices():
        fields = dict(known.sources)
        assert {"memory", "memory_bandwidth", "scale_up.bandwidth"} <= fields.keys()
        assert all(fields.values())
    h100 = find_device("H100")
    assert dict(h100.sources)["rates.bfloat16"].startswith("ml-engineering")
    assert h100.recalled == ("rates.float32", "cores")
    assert "scale_up" in find_device("DGX-2").recalled
    lines = resolve_cluster("8xH800").assumptions
    assert (
        "written from memory, so check them: memory, memory_bandwidth, rates, cores, efficiency"
        in lines
    )


def test_nodes_have_hosts_and_prices() -> None:
    cluster = load_cluster("2x8xH100")
    assert cluster.host is not None
    assert cluster.host.memory_bytes_per_device == 256 * 2**30
    assert cluster.price_per_hour == pytest.approx(16 * 4.916)
    # Two devices of a node have their share of its host.
    part = load_cluster("2xH100").host
    assert part is not None
    assert (part.num_devices, part.memory_bytes_per_device) == (2, 256 * 2**30)
    assert load_cluster("4xcpu").price_per_hour is None


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ("2x2xA100", 2),  # two nodes: each host has its own two
        ("32x6xV100", 6),
        ("16x1xH100", 1),
        ("64x4xGB200", 4),
        ("2x72xGB200", 4),  # a rack of trays
        ("{device: A100, levels: [{name: NVLink3, size: 4, bandwidth: 300GB/s}]}", 4),
        (
            "{device: A100, levels: [{name: NVLink3, size: 2, bandwidth: 300GB/s},"
            " {name: PCIe4, size: 2, bandwidth: 32GB/s},"
            " {name: Ethernet, size: 2, bandwidth: 3GB/s}]}",
            4,
        ),
    ],
)
def test_hosts_are_of_nodes(spec: str, devices: int) -> None:
    host = load_cluster(spec).host
    assert host is not None
    assert host.num_devices == devices


def test_one_port_for_a_node_is_shared() -> None:
    level = load_cluster("4x8xV100").levels[1]
    assert (level.link.bandwidth_bytes_per_s, level.oversubscription) == (3.125e9, 8)
    assert load_cluster("4x2xV100").levels[1].oversubscription == 2
    assert load_cluster("4x8xH100").levels[1].oversubscription == 1


def test_a_slice_of_a_torus() -> None:
    loaded = resolve_cluster("64xTPU v4")
    levels = loaded.cluster.levels
    assert [(v.size, v.fabric) for v in levels] == [(4, "ring")] * 3
    # 50 GB/s to each of two neighbors
    assert {v.link.bandwidth_bytes_per_s for v in levels} == {100e9}
    assert any("torus of 4x4x4 with wrap-around" in line for line in loaded.assumptions)
    assert any("no back end here runs them" in line for line in loaded.assumptions)
    assert [v.fabric for v in load_cluster("8xTPU-v5e").levels] == ["line"] * 2


def test_three_levels_with_an_oversubscribed_spine(tmp_path: Path) -> None:
    text = LAB + "  - {name: spine, size: 2, bandwidth: 25Gbit/s, oversubscription: 4}\n"
    cluster = load_cluster(write(tmp_path, text))
    assert [level.oversubscription for level in cluster.levels] == [1, 1, 4]
    assert cluster.num_devices == 24


def test_directions_may_differ(tmp_path: Path) -> None:
    text = LAB.replace("25Gbit/s", "{up: 400Mbit/s, down: 200Mbit/s}")
    link = load_cluster(write(tmp_path, text)).levels[1].link
    assert (link.bandwidth_bytes_per_s, link.down_bytes_per_s) == (50e6, 25e6)
    assert link.payload_bytes_per_s == pytest.approx(25e6 * 0.85)


UNEVEN = """\
name: mixed
join: {name: ethernet, bandwidth: 25Gbit/s}
parts:
  - {name: old, count: 2, device: V100, levels: [{name: NVLink2, size: 4, bandwidth: 150GB/s}]}
  - {name: new, device: A100, levels: [{name: NVLink3, size: 8, bandwidth: 300GB/s}]}
"""


def test_unequal_parts_are_described(tmp_path: Path) -> None:
    path = write(tmp_path, UNEVEN)
    cluster = resolve_cluster(path).cluster
    assert (cluster.num_devices, [part.count for part in cluster.parts]) == (16, [2, 1])
    assert cluster.price_per_hour == pytest.approx(8 * 3.06 + 8 * 5.12)
    with pytest.raises(InputError, match=r"unequal parts \(2 x old, 1 x new\).*equal devices"):
        collective("all_reduce", 1.0, ((0, 3),), cluster)
    again = resolve_cluster(resolve_cluster(path).spec)
    assert again.cluster == cluster
    assert not again.assumptions


def test_equal_parts_are_an_ordinary_cluster(tmp_path: Path) -> None:
    text = UNEVEN.replace("V100", "A100").replace("NVLink2", "NVLink3").replace("150GB", "300GB")
    cluster = load_cluster(write(tmp_path, text.replace("size: 4", "size: 8")))
    assert [level.size for level in cluster.levels] == [8, 3]
    assert cluster.name == "mixed"


OWN = """\
device: {name: chip, memory: 64GiB, memory_bandwidth: 1.6TB/s, rates: {bf16: 200TFLOP/s}}
levels: [{name: NVLink, size: 2, bandwidth: 64GB/s}]
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # a figure for both directions
        (LAB.replace("300GB/s", "600GB/s"),
         r"lab.yaml:4:40: bandwidth: '600GB/s' is what nvlink moves in both directions together; "
         r"write 300GB/s if that is meant, or '600GB/s per direction' if a device sends that much"),
        (OWN.replace("64GB/s", "900GB/s"), r"write 450GB/s .* or '900GB/s per direction'"),
        (OWN.replace("NVLink,", "NVLink5,").replace("64GB/s", "1.8TB/s"), r"write 900GB/s"),
        (LAB.replace("300GB/s", "600GB/s bidirectional"), r"lab.yaml:4:40.*write 300GB/s if"),
        # values that no machine has
        (OWN.replace("64GiB", "-64GiB"), r"lab.yaml:1:30: memory: '-64GiB'.* negative"),
        (OWN.replace("64GiB", "nanGiB"), r"memory: 'nanGiB'.* not a number"),
        (OWN.replace("64GiB", "0GiB"), r"memory: must be greater than zero"),
        (OWN.replace("64GiB", "9e9TiB"), r"out of range: more than 1 EiB; is the unit right"),
        (OWN.replace("64GB/s", "0GB/s"), r"lab.yaml:2:\d+: bandwidth: .*greater than zero"),
        (OWN.replace("size: 2", "size: 2, oversubscription: 0.5"), r"from 1 on"),
        (OWN.replace("size: 2", "size: 2, efficiency: 1.5"), r"at most 1"),
        (OWN.replace("size: 2", "size: 2, fabric: torus"), r"unknown fabric 'torus'"),
        (OWN.replace("size: 2", "size: 2, reduces: yes"), r"expected true or false, got 'yes'"),
        (OWN.replace("size: 2", "torus: [2, 0]"), r"lab.yaml:2:\d+: torus: expected a whole"),
        (OWN + "host: {memory: 1TB, devices: 3, bandwidth: 25GB/s}\n",
         r"lab.yaml:3:30: devices: a host of 3 devices, but there are 2"),
        # structure
        (OWN + "count: 2\n", r"lab.yaml:3:1: unknown key 'count'"),
        (UNEVEN.replace("count: 2", "cuont: 2"),
         r"lab.yaml:4:17: unknown key 'cuont'; did you mean 'count'"),
        (UNEVEN.replace("device: V100,", "device: cpu, backend: gloo,"),
         r"lab.yaml:5:5: this part has back end nccl, the first gloo"),
        ("name: &a {b: *a}\n", r"lab.yaml:1:7: a cycle: an alias makes this part contain itself"),
        ("parts: &p\n  - parts: *p\n    join: {}\n", r"lab.yaml:\d+:\d+: a cycle"),
        ("a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
         "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
         "e: [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*d,*d,*d,*d,*d,*d,*d,*d,*d]\n",
         r"more than 100000 values"),
        ('name: "\\uD800"\n' + OWN, r"characters that cannot be printed"),
    ],
)  # fmt: skip
def test_more_faults_have_a_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_cluster(write(tmp_path, text))


def test_a_direction_that_is_said_is_believed(tmp_path: Path) -> None:
    text = LAB.replace("300GB/s", "600GB/s per direction")
    assert load_cluster(write(tmp_path, text)).levels[0].link.bandwidth_bytes_per_s == 600e9


def test_the_files_on_the_page_are_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/reference/clusters.md"
    texts = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    found = [resolve_cluster(write(tmp_path, text)).cluster for text in texts]
    assert [cluster.num_devices for cluster in found] == [64, 256, 16]
    assert [bool(cluster.parts) for cluster in found] == [False, False, True]
