"""What devices there are to plan for: vendors' figures, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device as JAX counts them (half a chip on TPU 7x).

    Rates are dense peaks in FLOP/s and bytes/s. Links and network are per direction: a device sends that much while
    it receives as much.

    Attributes:
        name: as the command line takes it. memory: bytes. bandwidth: of that memory.
        bf16, fp8, fp4: of matrix products; a device without a format has the next wider one's.
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
_AMD = "AMD Instinct {} datasheet (dense; 7 Infinity Fabric links of 153.6 GB/s bidirectional); 400 Gb/s a GPU"


def _tpu(name: str, memory: int, bandwidth: float, rates: tuple, torus: tuple, rest: tuple, title: str) -> Hardware:
    (bf16, fp8), (dimensions, link), (domain, network) = rates, torus, rest
    figures = memory * GiB, bandwidth * GB, bf16 * T, fp8 * T, fp8 * T, dimensions, link * GB, domain, network * GB
    return Hardware(name, *figures, _TPU.format(title))


def _gpu(name: str, memory: int, bandwidth: float, rates: tuple, link: float, domain: int, source: str) -> Hardware:
    bf16, fp8, fp4 = (rate * T for rate in rates)
    return Hardware(name, memory * GB, bandwidth * GB, bf16, fp8, fp4, 0, link * GB, domain, 50 * GB, source)


_TABLE = (
    _tpu("v5e", 16, 819, (197, 197), (2, 50), (256, 3.125), "TPU v5e"),
    _tpu("v5p", 95, 2765, (459, 459), (3, 100), (8960, 6.25), "TPU v5p"),
    _tpu("v6e", 32, 1638, (918, 918), (2, 100), (256, 12.5), "TPU v6e"),
    # A chip is two devices, between which everything is halved.
    _tpu("tpu7x", 96, 3690, (1153.5, 2307), (3, 50), (18432, 6.25), "TPU7x"),
    _gpu("h100", 80, 3350, (989.5, 1979, 1979), 450, 8, _NVIDIA.format("H100 SXM")),
    _gpu("h200", 141, 4800, (989.5, 1979, 1979), 450, 8, _NVIDIA.format("H200 SXM")),
    _gpu("b200", 180, 8000, (2250, 4500, 9000), 900, 8, _NVIDIA.format("DGX B200")),
    _gpu("gb200", 186, 8000, (2500, 5000, 10000), 900, 72, _NVIDIA.format("GB200 NVL72")),
    _gpu("mi355x", 288, 8000, (2516, 5033, 10066), 537.6, 8, _AMD.format("MI355X")),
)
HARDWARE = {hardware.name: hardware for hardware in _TABLE}


def find(name: str) -> Hardware:
    """A device by name.

    Raises:
        ValueError: an unknown one, with those that are known.
    """
    if name.lower() not in HARDWARE:
        raise ValueError(f"hardware={name}: must be one of {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]
