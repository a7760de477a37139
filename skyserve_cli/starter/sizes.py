"""How large models are, and how much memory accelerators have. Figures are in GB of 10^9 bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The most memory that an accelerator of this name has; names as in service files, without dashes and in capitals.
_MEMORY: Mapping[str, float] = {
    "T4": 16, "P4": 8, "P100": 16, "V100": 32, "V10032GB": 32, "K80": 12, "M60": 8, "M4000": 8,
    "L4": 24, "L40": 48, "L40S": 48, "A10": 24, "A10G": 24, "A16": 16, "A30": 24, "A40": 48, "A2": 16,
    "A100": 80, "A10080GB": 80, "A100SXM480GB": 80, "H100": 80, "H10080GB": 80, "H100SXM": 80, "H100MEGA": 80, "H100NVL": 94,
    "H200": 141, "H200SXM": 141, "GH200": 144, "B200": 192, "GB200": 192, "B300": 288, "GB300": 288,
    "RTX3060": 12, "RTX3090": 24, "RTX4080": 16, "RTX4090": 24, "RTX5090": 32, "RTXA4000": 16, "RTXA5000": 24, "RTXA6000": 48,
    "A4000": 16, "A5000": 24, "A6000": 48, "RTX6000ADA": 48, "RTX4000ADA": 20, "RTXPRO6000": 96,
    "MI100": 32, "MI210": 64, "MI250": 128, "MI250X": 128, "MI300X": 192, "MI325X": 256, "MI350X": 288, "MI355X": 288,
}  # fmt: skip
#: Names that mean the smaller kind where machines are rented by name.
_RENTED_MEMORY: Mapping[str, float] = {"A100": 40, "V100": 16}
_RENTED = frozenset(("aws", "gcp", "azure", "lambda"))

#: Billions of parameters of models whose names do not have them, or not exactly; and bytes of each, where the usual weights are not bf16.
_MODELS: tuple[tuple[str, float, float | None], ...] = (
    (r"llama-?[23](\.\d)?-70b|llama-?2-?70b|llama-70b", 70.6, None),
    (r"llama-?3(\.\d)?-8b", 8.03, None),
    (r"llama-?3\.1-405b", 405.9, None),
    (r"llama-4-scout", 109, None),
    (r"llama-4-maverick", 400, None),
    (r"qwen2\.5-.*?7b", 7.62, None),
    (r"qwen2\.5-.*?72b", 72.7, None),
    (r"qwen2\.5-.*?32b|qwq-32b", 32.8, None),
    (r"mixtral-8x7b", 46.7, None),
    (r"mixtral-8x22b", 141, None),
    (r"mistral-large", 123, None),
    (r"gpt-oss-120b", 117, 0.55),
    (r"gpt-oss-20b", 21, 0.65),
    (r"deepseek-(v3|r1)(?!-distill)", 671, 1),
    (r"kimi-k2", 1000, 0.55),
)
_BILLIONS = re.compile(r"(?<![a-z0-9.])(\d{1,4}(?:\.\d+)?)b(?![a-z0-9])")
_EXPERTS = re.compile(r"(?<![a-z0-9.])(\d{1,3})x(\d{1,3}(?:\.\d+)?)b(?![a-z0-9])")
_FOUR_BITS = re.compile(r"awq|gptq|4-?bits?\b|int4|w4a|nvfp4|mxfp4|fp4|bnb|autoround|marlin")
_EIGHT_BITS = re.compile(r"fp8|int8|w8a|8-?bits?\b|q8_|-8bit|gptq-int8")
_OTHER = re.compile(
    r"gguf|q[1-8]_|exl[23]|aqlm|hqq|quip|quant|compress|[1235-7]-?bit|sparse|pruned|lora|adapter|mlx|draft|eagle"
)


@dataclass(frozen=True, slots=True)
class Weights:
    """`gb` of weights as `form`, such as bf16."""

    gb: float
    form: str

    def __str__(self) -> str:
        return (
            f"about {self.gb:.0f} GB of weights at {self.form}"
            if self.gb >= 10
            else f"about {self.gb:.1f} GB of weights at {self.form}"
        )


def memory_gb(accelerator: str, cloud: str | None) -> float | None:
    """Return the memory of one accelerator, where it is unclear that of the larger kind; None if it is not known."""
    name = re.sub(r"[-_ ]", "", accelerator.upper()).removeprefix("NVIDIA")
    if cloud in _RENTED and name in _RENTED_MEMORY:
        return _RENTED_MEMORY[name]
    return _MEMORY.get(name)


def weights_of_name(model: str, quantization: str | None = None, dtype: str | None = None) -> Weights | None:
    """Return the least that the weights of a model take, by its name and the engine's options; None if that is not known.

    A name that may mean other weights than bf16 without saying which gives None.
    """
    whole = model.lower().rstrip("/")
    name = whole.rpartition("/")[2].replace("_", "-")
    billions, usual = _billions(name)
    if billions is None:
        return None
    form = _form(whole, (quantization or "").lower(), (dtype or "").lower())
    if form is None:
        return None
    label, size = form
    if label == "bf16" and usual is not None:
        label, size = "its usual quantization", usual
    return Weights(billions * size, label)


def _billions(name: str) -> tuple[float | None, float | None]:
    for pattern, billions, size in _MODELS:
        if re.search(pattern, name):
            return billions, size
    if match := _EXPERTS.search(name):
        return float(match[1]) * float(match[2]) * 0.8, None  # experts share the attention layers
    match = _BILLIONS.search(name)
    return (float(match[1]), None) if match else (None, None)


def _form(name: str, quantization: str, dtype: str) -> tuple[str, float] | None:
    """Return what the weights are made of and the bytes of one; the least where it is unclear."""
    if quantization in (
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "int8",
        "eetq",
        "w8a8_int8",
        "w8a8_fp8",
        "bitsandbytes-int8",
    ):
        return quantization, 1.0
    if _OTHER.search(name) or quantization == "gguf":
        return None
    if _EIGHT_BITS.search(name) and not quantization.startswith(("awq", "bitsandbytes")):
        return "8 bits", 1.0
    if quantization or _FOUR_BITS.search(name):
        return "4 bits", 0.5
    return ("float32", 4.0) if dtype in ("float", "float32") else ("bf16", 2.0)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What the folder of a model says. `kv_bytes` is the KV cache of one token; None where the model is of another kind."""

    weights: Weights | None
    kv_bytes: float | None
    longest: int | None
    """Tokens that its positions reach, unless they are scaled."""


def local_model(folder: Path) -> LocalModel | None:
    """Return what `config.json` and the weights in a folder say; None if there is no such file. Reads no weights."""
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        config = json.loads(text)
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    longest = config.get("max_position_embeddings")
    scaled = config.get("rope_scaling") or not isinstance(longest, int)
    return LocalModel(_weights_in(folder, config), _kv_bytes(config), None if scaled else longest)


def _weights_in(folder: Path, config: Mapping[str, Any]) -> Weights | None:
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    form = str(
        (config.get("quantization_config") or {}).get("quant_method") or config.get("torch_dtype") or "bf16"
    )
    return Weights(sum(sizes) / 1e9, form) if sum(sizes) else None


def _kv_bytes(config: Mapping[str, Any]) -> float | None:
    """Return the bytes of KV cache per token at 16 bits; None for models of which not every layer keeps every token."""
    other = (
        "sliding_window",
        "layer_types",
        "hybrid_override_pattern",
        "attn_layer_period",
        "kv_lora_rank",
        "linear_num_key_heads",
    )
    if any(config.get(key) for key in other if key != "sliding_window"):
        return None
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return None
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int) and heads):
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    return 2.0 * layers * kv_heads * head_size * 2


def tokens_of(text: str) -> int | None:
    """Return ``8192``, ``32k`` (thousands) or ``32K`` (of 1024) as a number of tokens."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    if match is None:
        return None
    unit = {"": 1, "k": 1000, "K": 1024, "m": 1_000_000, "M": 1 << 20}[match[2]]
    return int(float(match[1]) * unit)
