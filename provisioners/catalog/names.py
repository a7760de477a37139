"""Names of accelerators, however they are written, and what a slip was meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from types import MappingProxyType

#: As the field writes them (and SkyPilot's files do): the plain name is the first of its kind, later ones say more.
ACCELERATORS = (
    "A10", "A100", "A100-80GB", "A10G", "B200", "B300", "GB200", "GH200", "H100", "H100-MEGA", "H200", "K80", "L4",
    "L40", "L40S", "M4000", "M60", "P100", "P4", "RTX-PRO-6000", "T4", "T4g", "V100", "V100-32GB",
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
        "H100-80GB": "H100",
        "H100-SXM": "H100",
        "H100-SXM5": "H100",
        "H100-SXM5-80GB": "H100",
        "H100-80GB-HBM3": "H100",
        "H100-MEGA-80GB": "H100-MEGA",
        "H200-141GB": "H200",
        "H200-SXM": "H200",
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


def canonical(accelerator: str) -> str:
    """The one name of what is written ``a100-40gb``, ``NVIDIA Tesla T4`` or ``nvidia-l4``; as it is if unknown."""
    folded = re.sub(r"[\s_]+", "-", accelerator.strip()).casefold()
    return _BY_FOLDED.get(folded) or _BY_FOLDED.get(_MAKERS.sub("", folded)) or accelerator


def close_to(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` looks like a slip of."""
    by_folded = {name.casefold(): name for name in known}
    folded = word.casefold()[:64]
    close = difflib.get_close_matches(folded, by_folded, n=5, cutoff=0.65)
    # Letters in the wrong order are the likeliest slip, and difflib thinks too little of it.
    close.sort(key=lambda name: sorted(name) != sorted(folded))
    return by_folded[close[0]] if close else None
