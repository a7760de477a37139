"""What does not fit together in a file: truth tables of ports, addresses and memory. And what is taken for right."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent

import pytest

from skyserve_cli.spec.load import load_text
from skyserve_cli.starter import fit
from skyserve_cli.starter.sizes import memory_gb, tokens_of, weights_of_name

AWS = "infra: aws"


def warned(
    run: str, resources: str = AWS, *, more: str = "", service: str = "readiness_probe: /health"
) -> list[str]:
    text = f"service: {{{service}}}\nresources: {{{resources}}}\n{more}\nrun: |\n{indent(run, '  ')}\n"
    return [str(each) for each in fit.warnings(load_text(text, needs_values=False))]


# --- sizes of 0 ---


@pytest.mark.parametrize("service", ["replicas: 0", "replica_policy: {min_replicas: 0, max_replicas: 0}"])
def test_a_size_of_0_is_a_warning_even_on_purpose(service: str) -> None:
    (warning,) = warned("sleep 1", service=service)
    assert (
        warning == "service: the size is fixed at 0: no replica is launched, and no request can change that"
    )


# --- ports ---

PORTS = {
    "an option": ("vllm serve org/m --port 8001", "ports: 8000", "resources.ports", "--port 8001"),
    "an option with =": ("vllm serve org/m --port=8001", "ports: 8000", "resources.ports", "--port 8001"),
    "a module": (
        "python3 -m vllm.entrypoints.openai.api_server --model org/m --port '8001'",
        "ports: 8000",
        "resources.ports",
        "--port 8001",
    ),
    "SGLang": ("exec python -m sglang.launch_server --model-path org/m --host 0.0.0.0 \\\n  --port 30001", "ports: 30000", "resources.ports", "30001"),
    "llama.cpp": ("PATH=$PATH:/app llama-server -m model.gguf --host 0.0.0.0 --port 9000", "ports: 8080", "resources.ports", "9000"),
    "TGI": ("text-generation-launcher --model-id org/m -p 3001", "ports: 8080", "resources.ports", "3001"),
    "Ollama": ("OLLAMA_HOST=0.0.0.0:9999 ollama serve", "ports: 11434", "resources.ports", "9999"),
    "an exported address": ("export OLLAMA_HOST=0.0.0.0:9999\nollama serve", "ports: 11434", "resources.ports", "9999"),
    "a default": ("vllm serve org/m --max-model-len 100", "ports: 8080", "resources.ports", "8000, its default"),
    "one of several": ("vllm serve org/m --port 8002", "ports: [8000, 9090]", "service.ports", "8002"),
    "of the service": ("vllm serve org/m --port 8002", "cpus: 2", "service.ports", "8002"),
    "of an alternative": ("vllm serve org/m --port 8001", "any_of: [{ports: 8000}]", "resources.any_of[0].ports", "8001"),
    "in another shell": ("bash -lc 'source x; vllm serve org/m --port 8001'", "ports: 8000", "resources.ports", "8001"),
    "beside a variable": ("vllm serve $M --served-model-name $N --port 8001", "ports: 8000", "resources.ports", "8001"),
    "behind another command": ("cd /x && vllm serve org/m --port 8001 2>&1 | tee log", "ports: 8000", "resources.ports", "8001"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "resources", "path", "shown"), PORTS.values(), ids=PORTS.keys())
def test_a_port_on_which_nothing_listens(run: str, resources: str, path: str, shown: str) -> None:
    service = "readiness_probe: /health" + (", ports: 8000" if path == "service.ports" else "")
    (warning,) = warned(run, f"{AWS}, {resources}", service=service)
    assert warning.startswith(f"{path}: requests go to ")
    assert shown in warning


def test_a_port_from_a_variable_of_the_file() -> None:
    (warning,) = warned("vllm serve org/m --port $PORT", f"{AWS}, ports: 8000", more="envs: {PORT: 8001}")
    assert "--port 8001" in warning


@pytest.mark.parametrize("infra", ["infra: local", "infra: kubernetes"])
def test_without_ports_an_engine_must_take_the_port_that_it_is_given(infra: str) -> None:
    (warning,) = warned("vllm serve org/m --port 8000", infra)
    assert warning.startswith("run: vLLM listens on --port 8000, and requests go to $SKYSERVE_REPLICA_PORT")


RIGHT_PORTS = {
    "the same": ("vllm serve org/m --port 8000", "ports: 8000"),
    "a variable": ("vllm serve org/m --port $PORT", "ports: 8000"),
    "a variable in braces": ('vllm serve org/m --port "${PORT}"', "ports: 8000"),
    "a variable with a default": ("vllm serve org/m --port ${PORT:-8001}", "ports: 8000"),
    "ours": ("vllm serve org/m --port $SKYSERVE_REPLICA_PORT", "cpus: 2"),
    "ours without the option": ("vllm serve org/m & proxy $SKYSERVE_REPLICA_PORT", "cpus: 2"),
    "the default": ("vllm serve org/m", "ports: 8000"),
    "the default of a machine": ("vllm serve org/m", "cpus: 2"),
    "options in a variable": ("vllm serve org/m $ARGS", "ports: 8080"),
    "options in a variable behind a flag": ("vllm serve org/m --enable-something $ARGS", "ports: 8080"),
    "all arguments behind a flag": ('vllm serve org/m --enable-something "$@"', "ports: 8080"),
    "options in a file": ("vllm serve org/m --config c.yaml", "ports: 8080"),
    "all arguments": ('vllm serve org/m "$@"', "ports: 8080"),
    "a proxy in front": ("vllm serve org/m --port 8001 &\nexec nginx-on 8000", "ports: 8000"),
    "a container": ("docker run -p 8000:8001 vllm/vllm-openai --model org/m --port 8001", "ports: 8000"),
    "another program": ("python3 -m http.server 8001", "ports: 8000"),
    "a comment": ("# vllm serve org/m --port 8001\nmy-server 8000", "ports: 8000"),
    "text of a program": ("cat <<'END'\nvllm serve org/m --port 8001\nEND\nserver", "ports: 8000"),
    "only its name": ("pip install vllm serve; echo vllm serve --port 1", "ports: 8000"),
    "one of two engines": ("vllm serve a --port 8001 &\nvllm serve b --port 8000", "ports: 8000"),
}


@pytest.mark.parametrize(("run", "resources"), RIGHT_PORTS.values(), ids=RIGHT_PORTS.keys())
def test_what_may_be_right_is_no_warning(run: str, resources: str) -> None:
    assert warned(run, f"{AWS}, {resources}") == []


def test_a_variable_that_the_script_sets_is_not_seen() -> None:
    run = "PORT=$((8000 + 0))\nvllm serve org/m --port $PORT"
    assert warned(run, f"{AWS}, ports: 8000", more="envs: {PORT: 8001}") == []


@pytest.mark.parametrize(
    ("run", "resources", "shown"),
    [
        ("vllm serve org/m --host 127.0.0.1 --port 8000", "infra: aws, ports: 8000", "--host 0.0.0.0"),
        ("vllm serve org/m --host localhost --port 8000", "infra: local, ports: 8000", "--host 0.0.0.0"),
        ("text-generation-launcher --model-id m --hostname 127.0.0.1 -p 8000", "ports: 8000", "--hostname 0.0.0.0"),
        ("vllm serve org/m --host 0.0.0.0 --port 8000", "infra: aws, ports: 8000", None),
        ("vllm serve org/m --host 127.0.0.1 --port $SKYSERVE_REPLICA_PORT", "infra: local", None),
        ("vllm serve org/m --host $HOST --port 8000", "infra: aws, ports: 8000", None),
    ],
)  # fmt: skip
def test_an_address_that_only_the_machine_itself_reaches(run: str, resources: str, shown: str | None) -> None:
    found = warned(run, resources)
    assert [shown in each for each in found] == ([True] if shown else [])


# --- memory ---

TOO_LARGE = {
    "70B on an L4": ("vllm serve meta-llama/Llama-3.1-70B-Instruct", "L4", "about 141 GB of weights at bf16; 1 x L4 has 24 GB"),
    "70B on 4 of 4": ("vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 4", "L4:4", "141 GB of weights at bf16; 4 x L4 have 96 GB"),
    "70B on 1 of 8": ("vllm serve meta-llama/Llama-3.1-70B-Instruct", "L4:8", "(the command uses 1 of 8)"),
    "70B at 8 bits": ("vllm serve org/Llama-3.1-70B-Instruct-FP8", "L40S", "about 71 GB of weights at 8 bits"),
    "fp8 by option": ("vllm serve meta-llama/Llama-3.1-70B-Instruct --quantization fp8", "L40S", "weights at fp8"),
    "AWQ": ("vllm serve org/Llama-3.1-70B-Instruct-AWQ", "L4", "about 35 GB of weights at 4 bits"),
    "72B by SGLang": ("python3 -m sglang.launch_server --model-path Qwen/Qwen2.5-72B-Instruct --tp 2", "A100-80GB:2", None),
    "72B by SGLang on 40 GB": ("python3 -m sglang.launch_server --model-path Qwen/Qwen2.5-72B-Instruct --tp 2", "A100:2", "145 GB"),
    "a mixture": ("vllm serve mistralai/Mixtral-8x7B-Instruct-v0.1", "L40S", "about 93 GB"),
    "a mixture with active experts": ("vllm serve Qwen/Qwen3-30B-A3B", "L40S", "about 60 GB"),
    "TGI": ("text-generation-launcher --model-id meta-llama/Llama-2-13b-hf", "T4", "about 26 GB"),
    "DeepSeek": ("vllm serve deepseek-ai/DeepSeek-V3 -tp 8", "L40S:8", "about 671 GB"),
    "a variable of the file": ("vllm serve $MODEL --port 8000", "L4", "about 141 GB"),
    "underscores": ("vllm serve meta-llama/Llama-3.1-70B --tensor_parallel_size 2", "L4:2", "2 x L4 have 48 GB"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "gpu", "shown"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_weights_that_cannot_fit(run: str, gpu: str, shown: str | None) -> None:
    envs = "envs: {MODEL: meta-llama/Llama-3.1-70B-Instruct}"
    found = warned(
        run, f"{AWS}, ports: [8000, 30000, 3000], accelerators: '{gpu}'", more=envs, service="ports: 8000"
    )
    found = [each for each in found if not each.startswith("service.ports")]
    assert len(found) == (shown is not None)
    for warning in found:
        assert warning.startswith("resources.accelerators: ")
        assert shown is not None
        assert shown in warning


FITS = {
    "7B on an L4": ("vllm serve Qwen/Qwen2.5-7B-Instruct", "L4"),
    "70B on 8 x L4 with 8 shards": ("vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 8", "L4:8"),
    "70B, shards in a variable": ("vllm serve meta-llama/Llama-3.1-70B-Instruct -tp $N", "L4:8"),
    "70B AWQ on 48 GB": ("vllm serve org/Llama-3.1-70B-Instruct-AWQ", "L40S"),
    "quantization in a variable": ("vllm serve meta-llama/Llama-3.1-70B-Instruct $ARGS", "L4"),
    "offloaded": ("vllm serve meta-llama/Llama-3.1-70B-Instruct --cpu-offload-gb 200", "L4"),
    "gpt-oss, whose weights have 4 bits": ("vllm serve openai/gpt-oss-120b", "H100"),
    "R1 distilled": ("vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "L4"),
    "a name without a size": ("vllm serve org/finest-model", "T4"),
    "a path that is not here": ("vllm serve /models/llama-70b", "L4"),
    "an accelerator that is not known": ("vllm serve meta-llama/Llama-3.1-70B-Instruct", "Gaudi2"),
    "experts by name": ("vllm serve google/gemma-3n-E4B-it", "T4"),
    "8 GB more than there is, within the margin": ("vllm serve org/Some-26B-model --dtype bfloat16", "L40S"),
    "GGUF": ("vllm serve org/Llama-3.1-70B-GGUF", "L4"),
    "a revision that may be quantized": ("vllm serve org/Model-70B --revision awq", "L40S"),
    "llama.cpp": ("llama-server -hf org/Llama-3.1-70B-GGUF --port 8000", "L4"),
}


@pytest.mark.parametrize(("run", "gpu"), FITS.values(), ids=FITS.keys())
def test_what_may_fit_is_no_warning(run: str, gpu: str) -> None:
    assert warned(run, f"infra: gcp, ports: 8000, accelerators: '{gpu}'") == []


def test_an_alternative_that_does_not_fit_is_named_by_its_path() -> None:
    resources = "ports: 8000, any_of: [{infra: aws, accelerators: L4}, {infra: gcp, accelerators: 'H100:2'}]"
    (warning,) = warned("vllm serve meta-llama/Llama-3.1-70B -tp 2 --port 8000", resources)
    assert (
        warning == "resources.any_of[0].accelerators: run splits the model over 2 GPUs; a replica has 1 (L4)"
    )


def test_an_a100_of_unknown_size_is_taken_for_the_larger_one() -> None:
    assert [memory_gb("A100", cloud) for cloud in ("aws", "gcp", None, "kubernetes")] == [40, 40, 80, 80]
    assert [memory_gb(name, "aws") for name in ("A100-80GB", "RTX 4090", "nvidia-L4", "TPU-v5")] == [80, 24, 24, None]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("32k", 32000), ("32K", 32768), ("1m", 1_000_000), ("auto", None), ("-1", None)]
)  # fmt: skip
def test_lengths_of_contexts(text: str, tokens: int | None) -> None:
    assert tokens_of(text) == tokens


@pytest.mark.parametrize(
    ("name", "quantization", "gb"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", None, 16.06),
        ("Qwen/Qwen2.5-0.5B-Instruct", None, 1.0),
        ("Qwen/Qwen3-235B-A22B", "gptq", 117.5),
        ("org/Model-13B-4bit", None, 6.5),
        ("org/Model-13B-W8A8", None, 13.0),
        ("org/model", None, None),
        ("org/Model-7B-lora", None, None),
    ],
)
def test_weights_of_names(name: str, quantization: str | None, gb: float | None) -> None:
    found = weights_of_name(name, quantization)
    assert (None if found is None else round(found.gb, 2)) == gb


# --- a model in a folder ---

CONFIG = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 16 GB, of which the disk has nothing but its size."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16_000_000_000)
    return tmp_path


CACHES = {
    "all positions of the model": ("", "L4", "a context of 131,072 tokens"),
    "a length": ("--max-model-len 120000", "L4", "a context of 120,000 tokens"),
    "thousands": ("--max-model-len 120k", "L4", "16 GB of KV cache"),
    "a length that fits": ("--max-model-len 8192", "L4", None),
    "a cache of 8 bits": ("--max-model-len 65536 --kv-cache-dtype fp8", "L4", None),
    "two GPUs": ("--max-model-len 131072 -tp 2", "L4:2", None),
    "weights alone": ("--max-model-len 100", "M60", "about 16 GB of weights at bfloat16; 1 x M60 has 8 GB"),
    "a length beyond its positions": ("--max-model-len 200000", "H100", "beyond the 131072 positions"),
    "positions that are scaled": ("--max-model-len 200000 --hf-overrides '{}'", "H100", None),
}


@pytest.mark.parametrize(("options", "gpu", "shown"), CACHES.values(), ids=CACHES.keys())
def test_the_context_of_a_model_in_a_folder(model: Path, options: str, gpu: str, shown: str | None) -> None:
    run = f"vllm serve /model {options} --port 8000"
    resources = f"{AWS}, ports: 8000, accelerators: '{gpu}'"
    found = warned(run, resources, more=f"file_mounts: {{/model: {model}}}")
    assert [shown in each for each in found if shown] == ([True] if shown else [])
    assert len(found) == (shown is not None)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},
        {"layer_types": ["linear"]},
        {"kv_lora_rank": 512},
        {"num_hidden_layers": None},
    ],
)
def test_a_cache_of_another_kind_is_not_judged(model: Path, change: dict[str, object]) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    resources = f"{AWS}, ports: 8000, accelerators: L4"
    assert warned("vllm serve /model --port 8000", resources, more=f"file_mounts: {{/model: {model}}}") == []


def test_a_folder_that_is_no_model_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    resources = f"{AWS}, ports: 8000, accelerators: T4"
    assert (
        warned("vllm serve /model --port 8000", resources, more=f"file_mounts: {{/model: {tmp_path}}}") == []
    )
