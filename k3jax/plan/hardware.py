"""What devices there are to plan for: vendors' figures, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device as JAX counts them (half a chip on TPU 7x).

    Rates are dense peaks in FLOP/s and bytes/s. What goes over links is per direction: a device sends that much while it
    receives as much.

    Attributes:
        name: as the command line takes it.
        memory: bytes. bandwidth: of that memory.
        bf16, fp8, fp4: matrix products; a device without a format has the rate of the next wider one.
        float32_passes: bf16 products that one float32 product of highest precision takes.
        torus: dimensions of the torus the links form, two links a dimension; 0: a switch.
        link: of one link of the torus, or of all links into the switch.
        domain: devices that links join. network: of the network beyond, a device.
        source: where the figures are published.
    """

    name: str
    memory: float
    bandwidth: float
    bf16: float
    fp8: float
    fp4: float
    torus: int
    link: float
    domain: int
    network: float
    source: str
    float32_passes: int = 6

    @property
    def links(self) -> float:
        """Bytes/s that a device sends over all its links."""
        return self.link * 2 * self.torus if self.torus else self.link


GB, GiB, T = 1e9, 2**30, 1e12
_TPU = "Google Cloud TPU documentation, system architecture of {} (per chip; ICI bidirectional)"
_NVIDIA = "NVIDIA {} datasheet (half of each figure with sparsity; NVLink bidirectional); ConnectX-7 400 Gb/s a GPU"

_TABLE = (
    Hardware("v5e", 16 * GiB, 819 * GB, 197 * T, 197 * T, 197 * T, 2, 50 * GB, 256, 3.1 * GB, _TPU.format("TPU v5e")),
    Hardware("v5p", 95 * GiB, 2765 * GB, 459 * T, 459 * T, 459 * T, 3, 100 * GB, 8960, 6.25 * GB, _TPU.format("TPU v5p")),
    Hardware("v6e", 32 * GiB, 1638 * GB, 918 * T, 918 * T, 918 * T, 2, 100 * GB, 256, 12.5 * GB, _TPU.format("TPU v6e")),
    # A chip is two devices, between which everything is halved.
    Hardware(
        "tpu7x", 96 * GiB, 3690 * GB, 1153.5 * T, 2307 * T, 2307 * T, 3, 50 * GB, 18432, 6.25 * GB, _TPU.format("TPU7x")
    ),
    Hardware("h100", 80 * GB, 3350 * GB, 989.5 * T, 1979 * T, 1979 * T, 0, 450 * GB, 8, 50 * GB, _NVIDIA.format("H100 SXM")),
    Hardware("h200", 141 * GB, 4800 * GB, 989.5 * T, 1979 * T, 1979 * T, 0, 450 * GB, 8, 50 * GB, _NVIDIA.format("H200 SXM")),
    Hardware("b200", 180 * GB, 8000 * GB, 2250 * T, 4500 * T, 9000 * T, 0, 900 * GB, 8, 50 * GB, _NVIDIA.format("DGX B200")),
    Hardware(
        "gb200", 186 * GB, 8000 * GB, 2500 * T, 5000 * T, 10000 * T, 0, 900 * GB, 72, 50 * GB, _NVIDIA.format("GB200 NVL72")
    ),
    Hardware(
        "mi355x", 288 * GB, 8000 * GB, 2516 * T, 5033 * T, 10066 * T, 0, 537.6 * GB, 8, 50 * GB,
        "AMD Instinct MI355X datasheet (dense; 7 Infinity Fabric links of 153.6 GB/s bidirectional); 400 Gb/s a GPU",
    ),
)  # fmt: skip
HARDWARE = {hardware.name: hardware for hardware in _TABLE}


def find(name: str) -> Hardware:
    """A device by name.

    Raises:
        ValueError: an unknown one, with those that are known.
    """
    if name.lower() not in HARDWARE:
        raise ValueError(f"hardware={name}: must be one of {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]
