"""Names of accelerators, however they are written, and what a slip was meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import Enum
from types import MappingProxyType

#: As the field writes them (and SkyPilot's files do): the plain name is the first of its kind, later ones say more.
ACCELERATORS = (
    "A10", "A100", "A100-80GB", "A10G", "B200", "B300", "GB200", "GH200", "H100", "H100-MEGA", "H200", "K80", "L4",
    "L40", "L40S", "M4000", "M60", "MI300X", "P100", "P4", "RTX-PRO-6000", "T4", "T4g", "V100", "V100-32GB",
)  # fmt: skip

_ALIASES = MappingProxyType(
    {
        "A100-40GB": "A100",
        "A100-80": "A100-80GB",
        "A100-SXM": "A100",
        "A100-SXM-80GB": "A100-80GB",
        "A100-SXM4": "A100",
        "A100-SXM4-40GB": "A100",
        "A100-SXM4-80GB": "A100-80GB",
        "A100-PCIE-80GB": "A100-80GB",
        "A100-PCIE-40GB": "A100",
        "A10080GB": "A100-80GB",
        "AMD-INSTINCT-MI300X": "MI300X",
        "AMD-MI300X": "MI300X",
        "B200-180GB": "B200",
        "B200-192GB": "B200",
        "B200-SXM": "B200",
        "H100-80GB": "H100",
        "H100-SXM": "H100",
        "H100-SXM5": "H100",
        "H100-SXM5-80GB": "H100",
        "H100-80GB-HBM3": "H100",
        "H100-MEGA-80GB": "H100-MEGA",
        "H200-141GB": "H200",
        "H100-80GB-MEGA": "H100-MEGA",
        "H200-SXM": "H200",
        "H200-SXM5": "H200",
        "INSTINCT-MI300X": "MI300X",
        "MI300X-192GB": "MI300X",
        "RTX-6000-PRO": "RTX-PRO-6000",
        "RTX-PRO-6000-BLACKWELL": "RTX-PRO-6000",
        "RTX-PRO-6000-BSE": "RTX-PRO-6000",
        "RTX-PRO-SERVER-6000": "RTX-PRO-6000",
        "RTXPRO6000": "RTX-PRO-6000",
        "L4-24GB": "L4",
        "L40S-48GB": "L40S",
        "T4-16GB": "T4",
        "V100-16GB": "V100",
        "V100-SXM2": "V100",
        "V100-SXM2-16GB": "V100",
        "V100-SXM2-32GB": "V100-32GB",
    }
)
_BY_FOLDED = {name.casefold(): name for name in ACCELERATORS} | {
    alias.casefold(): name for alias, name in _ALIASES.items()
}
_MAKERS = re.compile(r"^(nvidia-)?(tesla-)?")

#: A card of the same chip that another cloud has, where people request the one and can take the other.
_SISTERS = MappingProxyType({"A10": "A10G", "A10G": "A10", "H100-MEGA": "H100"})


class Vendor(str, Enum):
    NVIDIA = "NVIDIA"
    AMD = "AMD"
    AWS = "AWS"
    GOOGLE = "Google"
    INTEL = "Intel"


_VENDORS = (
    (re.compile(r"mi\d|radeon|instinct|amd"), Vendor.AMD),
    (re.compile(r"trainium|inferentia"), Vendor.AWS),
    (re.compile(r"tpu"), Vendor.GOOGLE),
    (re.compile(r"gaudi"), Vendor.INTEL),
)


def canonical(accelerator: str) -> str:
    """Return the one name of ``a100-40gb``, ``NVIDIA Tesla T4`` or ``nvidia-l4``; as it is if unknown."""
    folded = re.sub(r"[\s_]+", "-", accelerator.strip()).casefold()
    return _BY_FOLDED.get(folded) or _BY_FOLDED.get(_MAKERS.sub("", folded)) or accelerator


def vendor(accelerator: str) -> Vendor:
    """Return who makes the accelerator; a name that says nothing else is one of NVIDIA's."""
    name = accelerator.casefold()
    return next((maker for pattern, maker in _VENDORS if pattern.match(name)), Vendor.NVIDIA)


def sister_of(accelerator: str) -> str | None:
    """Return the name of a card of the same chip, if there is one under another name."""
    return _SISTERS.get(canonical(accelerator))


def close_to(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` looks like a slip of."""
    by_folded = {name.casefold(): name for name in known}
    folded = word.casefold()[:64]
    close = difflib.get_close_matches(folded, by_folded, n=5, cutoff=0.65)
    # Letters in the wrong order are the likeliest slip, and difflib thinks too little of it.
    close.sort(key=lambda name: sorted(name) != sorted(folded))
    return by_folded[close[0]] if close else None
