"""Step time from first principles: bytes over bandwidth or operations over peak, the greater.

    T(n tokens) = max(weight bytes / bandwidth, operations of the products / peak)
                + max(cache bytes / bandwidth, operations of attention / peak)
                + overhead

A step reads every weight it touches once, however many tokens share it, and the cache of each
request once, however many tokens of it are verified; operations grow with tokens. So draft tokens
are nearly free until the operations catch up, at about ``peak / bandwidth`` tokens in 16 bits (the
ridge), and cost in proportion beyond it. The products and attention run one after the other: a
batch whose products are bound by operations still waits for its caches to be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.errors import PlanError
from foredraft.plan.acceptance import check_count
from foredraft.plan.shape import ModelShape

_FAR = 1 << 20  # draft tokens; where the slope is that of operations alone


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, by its maker's figures or the user's.

    Attributes:
        name: What it is called.
        bandwidth_gb_s: Memory bandwidth, in 10^9 bytes a second.
        tflops: Peak of dense matrix products in 16 bits, in 10^12 operations a second.
        tflops_8bit: The same in fp8; ``None`` where it has none.
        memory_gb: Memory, in 10^9 bytes; ``None`` where it is not known.
        overhead_s: Time of a step besides, in seconds: launches, scheduling, sampling.
        source: Where the figures are from.
    """

    name: str
    bandwidth_gb_s: float
    tflops: float
    tflops_8bit: float | None = None
    memory_gb: float | None = None
    overhead_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        """Check the figures."""
        for name in ("bandwidth_gb_s", "tflops", "tflops_8bit", "memory_gb"):
            value = getattr(self, name)
            if value is None and name in ("tflops_8bit", "memory_gb"):
                continue
            if not _is_finite(value) or value <= 0:
                raise PlanError(f"{name} is {value!r}; allowed is a number above 0. Give another.")
        if not _is_finite(self.overhead_s) or self.overhead_s < 0:
            raise PlanError(
                f"overhead_s is {self.overhead_s!r}; allowed is a number of seconds of 0 or more."
            )

    def peak(self, shape: ModelShape) -> float:
        """Operations a second: in fp8 where weights and machine are, else in 16 bits."""
        if shape.is_fp8 and self.tflops_8bit is not None:
            return self.tflops_8bit * 1e12
        return self.tflops * 1e12


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_GPUS = (
    # Dense figures: where the sheet states them with sparsity, half of these.
    Hardware("T4", 320, 65, None, 16, source=f"{_NVIDIA}/tesla-t4/"),
    Hardware("L4", 300, 121, 242, 24, source=f"{_NVIDIA}/l4/"),
    Hardware("A10", 600, 125, None, 24, source=f"{_NVIDIA}/products/a10-gpu/"),
    Hardware("A100-40GB", 1555, 312, None, 40, source=f"{_NVIDIA}/a100/"),
    Hardware("A100-80GB", 2039, 312, None, 80, source=f"{_NVIDIA}/a100/"),
    Hardware("L40S", 864, 362, 733, 48, source=f"{_NVIDIA}/l40s/"),
    Hardware(
        "RTX-3090",
        936,
        71,  # with 32-bit accumulation
        None,
        24,
        source="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
    ),
    Hardware(
        "RTX-4090",
        1008,
        165.2,  # with 32-bit accumulation
        330.3,
        24,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    Hardware("H100-PCIe", 2000, 756, 1513, 80, source=f"{_NVIDIA}/h100/"),
    Hardware("H100-SXM", 3350, 989, 1979, 80, source=f"{_NVIDIA}/h100/"),
    Hardware("H200", 4800, 989, 1979, 141, source=f"{_NVIDIA}/h200/"),
    Hardware("B200", 8000, 2250, 4500, 180, source=f"{_NVIDIA}/dgx-b200/"),
    Hardware(
        "MI300X",
        5300,
        1307.4,
        2614.9,
        192,
        source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
)
HARDWARE: dict[str, Hardware] = {gpu.name: gpu for gpu in _GPUS}
"""Public figures of well-known GPUs, by name."""

_ALIASES = {"h100": "H100-SXM", "a100": "A100-80GB"}


def find_hardware(name: str) -> Hardware:
    """Return a machine of the table; case, spaces and dashes do not matter."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum()).removeprefix("nvidia")

    wanted = plain(name)
    wanted = plain(_ALIASES.get(wanted, wanted))
    for gpu in _GPUS:
        if plain(gpu.name) == wanted:
            return gpu
    raise PlanError(
        f"hardware is {name!r}; known are {', '.join(HARDWARE)}. Choose one, or describe yours "
        "with its bandwidth in GB/s and its peak in TFLOPS."
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a machine.

    Attributes:
        shape: The model.
        hardware: The machine.
    """

    shape: ModelShape
    hardware: Hardware

    def seconds(self, num_requests: int, num_tokens: float, context: int) -> float:
        """Time of a target pass.

        Args:
            num_requests: Requests in it; the cache of each is read once.
            num_tokens: Tokens in it, all requests together: one a request is plain decoding.
            context: Tokens of each request that are in the cache already.
        """
        check_count("num_requests", num_requests, 1)
        check_count("context", context)
        shape = self.shape
        bandwidth = self.hardware.bandwidth_gb_s * 1e9
        cached = num_requests * shape.cache_bytes(context)
        written = num_tokens * shape.cache_bytes_per_token
        attended = shape.attention_operations(num_tokens, context)
        attention = max((cached + written) / bandwidth, attended / (self.hardware.tflops * 1e12))
        return max(self._products(num_tokens)) + attention + self.hardware.overhead_s

    def _products(self, num_tokens: float) -> tuple[float, float]:
        """Seconds of the products with the weights: of reading these, and of multiplying."""
        read = self.shape.weight_bytes(num_tokens) / (self.hardware.bandwidth_gb_s * 1e9)
        return read, self.shape.operations(num_tokens) / self.hardware.peak(self.shape)

    def verify_cost(self, num_speculative_tokens: float, num_requests: int, context: int) -> float:
        """A verify pass with so many draft tokens a request, in plain decode steps."""
        rows = num_requests * (1 + num_speculative_tokens)
        plain = self.seconds(num_requests, num_requests, context)
        return self.seconds(num_requests, rows, context) / plain

    def alpha(self, num_speculative_tokens: int, num_requests: int, context: int) -> float:
        """Mean marginal cost of the first so many draft tokens a request, in plain steps."""
        check_count("num_speculative_tokens", num_speculative_tokens, 1)
        cost = self.verify_cost(num_speculative_tokens, num_requests, context)
        return (cost - 1) / num_speculative_tokens

    def last_alpha(self, num_requests: int, context: int) -> float:
        """Marginal cost where drafts are so long that operations alone count."""
        near = self.verify_cost(_FAR, num_requests, context)
        return (self.verify_cost(2 * _FAR, num_requests, context) - near) / _FAR

    def ridge_tokens(self) -> float:
        """Tokens of a step at which operations take as long as reading the weights."""

        def is_compute_bound(num_tokens: float) -> bool:
            read, multiplied = self._products(num_tokens)
            return multiplied >= read

        low, high = 0.0, 1.0
        while not is_compute_bound(high):
            low, high = high, high * 2
            if high > _FAR:
                return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
        return high

    def most_requests(self, context: int) -> int | None:
        """Requests whose cache fits into memory beside the weights; ``None`` where not known."""
        if self.hardware.memory_gb is None:
            return None
        free = self.hardware.memory_gb * 1e9 - self.shape.stored_bytes
        each = self.shape.cache_bytes(max(1, context))
        return max(0, int(free // each)) if each else None


def described_hardware(
    bandwidth_gb_s: float, tflops: float, overhead_s: float = 0.0, memory_gb: float | None = None
) -> Hardware:
    """Return a machine that the user describes."""
    return Hardware(
        "the described machine",
        bandwidth_gb_s,
        tflops,
        None,
        memory_gb,
        overhead_s,
        "given by the user",
    )


def hardware_table() -> list[Mapping[str, Any]]:
    """Rows of the table, for printing."""
    return [
        {
            "name": gpu.name,
            "bandwidth_gb_s": gpu.bandwidth_gb_s,
            "tflops": gpu.tflops,
            "tflops_8bit": gpu.tflops_8bit,
            "memory_gb": gpu.memory_gb,
            "source": gpu.source,
        }
        for gpu in _GPUS
    ]
