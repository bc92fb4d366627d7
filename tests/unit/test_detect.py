"""This machine as a cluster, from what a driver would say of several."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from parloom import cli
from parloom.errors import InputError
from parloom.execute import detect

Use = Callable[..., None]


@dataclass
class Cards:
    name: str
    count: int
    memory: int
    links: int = 0
    mesh: bool = False
    generation: int = 4
    users: tuple[tuple[int, int], ...] = ()  # of GPU 3

    def module(self) -> ModuleType:
        module: Any = ModuleType("pynvml")
        module.NVML_P2P_CAPS_INDEX_NVLINK, module.NVML_P2P_STATUS_OK = 2, 0
        module.nvmlInit = module.nvmlShutdown = lambda: None
        module.nvmlSystemGetDriverVersion = lambda: b"580.95"
        module.nvmlDeviceGetCount = lambda: self.count
        module.nvmlDeviceGetHandleByIndex = lambda index: index
        module.nvmlDeviceGetName = lambda handle: self.name
        module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(
            total=self.memory, free=self.memory - sum(b for _, b in self._users(handle))
        )
        module.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self._users(handle)
        ]
        module.nvmlDeviceGetNvLinkState = self._link
        module.nvmlDeviceGetMaxPcieLinkGeneration = lambda handle: self.generation
        module.nvmlDeviceGetMaxPcieLinkWidth = lambda handle: 16
        module.nvmlDeviceGetP2PStatus = lambda a, b, index: 0 if self.mesh else 5
        return module  # type: ignore[no-any-return]

    def _users(self, handle: int) -> tuple[tuple[int, int], ...]:
        return self.users if handle == 3 else ()

    def _link(self, handle: int, link: int) -> int:
        if link >= self.links:
            raise RuntimeError("not supported")
        return 1


H100 = Cards("NVIDIA H100 80GB HBM3", 8, 85_520_809_984, 18, True, 5, ((4411, 21 * 10**9),))
RTX4090 = Cards("NVIDIA GeForce RTX 4090", 2, 25_757_220_864)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def install(cards: Cards | None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", cards and cards.module())
        monkeypatch.setattr(detect, "_from_torch", lambda: None)

    return install


@pytest.mark.parametrize(
    ("cards", "device", "link", "rate"),
    [
        (H100, "H100-SXM5-80GB", "NVLink4", 450e9),
        (RTX4090, "RTX4090", "PCIe4", 31.5e9),
        (Cards("NVIDIA GeForce RTX 3090", 4, 25_438_126_080), "RTX3090", "PCIe4", 31.5e9),
        (Cards("NVIDIA A100-SXM4-40GB", 8, 42_949_672_960, 12, True), "A100-SXM4-40GB",
         "NVLink3", 300e9),
        (Cards("NVIDIA A100 80GB PCIe", 4, 85_899_345_920), "A100-PCIe-80GB", "PCIe4", 31.5e9),
        # Some pairs are joined only: what joins all is PCIe.
        (Cards("Tesla V100-SXM2-16GB", 8, 16_945_512_448, 6, False, 3), "V100-SXM2-16GB",
         "PCIe3", 15.76e9),
    ],
)  # fmt: skip
def test_the_cluster_of_gpus(use: Use, cards: Cards, device: str, link: str, rate: float) -> None:
    use(cards)
    found = detect.cluster_here(detect.detect()).cluster
    (level,) = found.levels
    assert (found.device.name, found.num_devices, level.name) == (device, cards.count, link)
    assert level.link.bandwidth_bytes_per_s == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("cards", [H100, RTX4090, None])
def test_init_writes_what_check_accepts(
    use: Use, cards: Cards | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(cards)
    path = tmp_path / "cluster.yaml"
    assert cli.main(["cluster", "init", "--out", str(path)]) == 0
    assert cli.main(["cluster", "check", str(path)]) == 0
    assert "this-machine" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert "read" in text
    assert "assumed" in text
    assert cli.main(["cluster", "init", "--out", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == text


def test_show_says_who_uses_memory(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use(H100)
    assert cli.main(["cluster", "show"]) == 0
    shown = capsys.readouterr().out
    assert "warning: GPU 3 has 21 GB in use by pid 4411" in shown
    assert "NVLink joins all pairs" in shown
    assert cli.main(["cluster", "show", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["gpus"]) == 8
    assert document["driver"] == "580.95"
    use(RTX4090)
    assert cli.main(["cluster", "show"]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["NVIDIA Titan Z", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100 NVL"])
def test_an_unknown_gpu_says_what_to_do(use: Use, name: str) -> None:
    use(Cards(name, 1, 25_757_220_864))
    with pytest.raises(InputError, match=r"no numbers are known for .* write a cluster"):
        detect.cluster_here(detect.detect())


def test_without_an_accelerator_the_cpu_is_planned_for(use: Use) -> None:
    use(None)
    here = detect.detect()
    assert detect.cluster_here(here).spec == f"{here.num_cores}xcpu"
    assert detect.found_words(here).startswith("No accelerator found here; planning for this CPU (")
