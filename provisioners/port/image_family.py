"""Which kind of image an instance type needs: its processor and the driver of its accelerators.

The catalog shows it, and each cloud has a table from it to its default image, so that both follow one rule. A cloud whose
table lacks a family has no default image for it, and refuses the order unless the user names an image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from provisioners.port.accelerator_names import Vendor, vendor


class ImageFamily(str, Enum):
    PLAIN = "plain"
    PLAIN_ARM64 = "plain-arm64"
    CUDA = "cuda"  # NVIDIA's open kernel modules: Turing and later
    CUDA_ARM64 = "cuda-arm64"
    CUDA_LEGACY = "cuda-legacy"  # NVIDIA's proprietary kernel modules: before Turing
    GRID = "grid"  # NVIDIA's driver for parts of a GPU
    ROCM = "rocm"
    OTHER = "other"  # Trainium, Inferentia, Gaudi, TPU


_ARM64: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        # AWS marks Graviton by a g after the generation (m7g, c7gn, g5g; not g5); Grace sits beside GB200.
        "aws": re.compile(r"(a1|[a-z]+\d+g[a-z]*|p\d+e-gb\d+)\."),
        "gcp": re.compile(r"(t2a|c4a|n4a|a4x)-"),
        # Azure: a p among the small letters after the number of CPUs (D4ps_v5), and Grace.
        "azure": re.compile(r"standard_([a-z]+\d+(-\d+)?[a-oq-z]*p[a-z]*(_|$)|.*_gb\d+_)"),
    }
)
_PARTS_OF_A_GPU: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {"aws": re.compile(r"gr?\d+f\."), "azure": re.compile(r"standard_nv\d+adm?s_a10_v5")}
)
_BEFORE_TURING = ("K80", "M4000", "M60", "P100", "P4", "V100", "V100-32GB")


def image_family(cloud: str, machine_type: str, accelerator: str | None) -> ImageFamily:
    """Return the family of a machine type as its cloud names it; `accelerator` is the catalog's name."""
    is_arm64 = _is(machine_type, _ARM64.get(cloud))
    if accelerator is None:
        return ImageFamily.PLAIN_ARM64 if is_arm64 else ImageFamily.PLAIN
    maker = vendor(accelerator)
    if maker is not Vendor.NVIDIA:
        return ImageFamily.ROCM if maker is Vendor.AMD else ImageFamily.OTHER
    if _is(machine_type, _PARTS_OF_A_GPU.get(cloud)):
        return ImageFamily.GRID
    if is_arm64:
        return ImageFamily.CUDA_ARM64
    return ImageFamily.CUDA_LEGACY if accelerator in _BEFORE_TURING else ImageFamily.CUDA


def _is(machine_type: str, pattern: re.Pattern[str] | None) -> bool:
    return pattern is not None and pattern.match(machine_type.lower()) is not None
