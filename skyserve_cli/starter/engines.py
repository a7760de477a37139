"""The engines that are known by the commands that start them, and what such a command says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from skyserve_cli.starter.words import Command, Word, commands


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its image, whose `entrypoint` its arguments follow, and the options that its command has.

    `port` is the one it takes without an option or a variable. `probe` responds 200 once the model is loaded.
    """

    name: str
    title: str
    image: str
    repositories: tuple[str, ...]
    entrypoint: str
    port: int
    image_port: int
    probe: str
    host_option: str | None
    port_options: tuple[str, ...]
    model_options: tuple[str, ...]
    tensor_options: tuple[str, ...] = ()
    pipeline_options: tuple[str, ...] = ()
    context_options: tuple[str, ...] = ()
    port_variables: tuple[str, ...] = ()
    #: Options without a value. Any other option that has none behind it has none either.
    flags: frozenset[str] = frozenset()


VLLM = Engine(
    name="vllm",
    title="vLLM",
    image="vllm/vllm-openai:latest",
    repositories=("vllm/vllm-openai", "rocm/vllm"),
    entrypoint="vllm serve",
    port=8000,
    image_port=8000,
    probe="/health",
    host_option="--host",
    port_options=("--port",),
    model_options=("--model",),
    tensor_options=("--tensor-parallel-size", "-tp"),
    pipeline_options=("--pipeline-parallel-size", "-pp"),
    context_options=("--max-model-len",),
    flags=frozenset(
        (
            "--trust-remote-code",
            "--enforce-eager",
            "--enable-prefix-caching",
            "--enable-chunked-prefill",
            "--enable-auto-tool-choice",
            "--disable-log-requests",
            "--disable-log-stats",
            "--enable-lora",
            "--enable-expert-parallel",
            "--async-scheduling",
            "--enable-reasoning",
            "--no-enable-prefix-caching",
            "--disable-custom-all-reduce",
            "--language-model-only",
        )
    ),
)
SGLANG = Engine(
    name="sglang",
    title="SGLang",
    image="lmsysorg/sglang:latest",
    repositories=("lmsysorg/sglang",),
    entrypoint="python3 -m sglang.launch_server",
    port=30000,
    image_port=30000,
    probe="/health",
    host_option="--host",
    port_options=("--port",),
    model_options=("--model-path", "--model"),
    tensor_options=("--tp", "--tp-size", "--tensor-parallel-size"),
    pipeline_options=("--pp-size", "--pipeline-parallel-size"),
    context_options=("--context-length",),
)
LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    image="ghcr.io/ggml-org/llama.cpp:server-cuda",
    repositories=("ghcr.io/ggml-org/llama.cpp", "ghcr.io/ggerganov/llama.cpp"),
    entrypoint="/app/llama-server",
    port=8080,
    image_port=8080,
    probe="/health",
    host_option="--host",
    port_options=("--port",),
    model_options=("--hf-repo", "-hf", "-hfr", "--model-url", "-mu", "--model", "-m"),
    context_options=("--ctx-size", "-c"),
    port_variables=("LLAMA_ARG_PORT",),
)
TGI = Engine(
    name="tgi",
    title="Text Generation Inference",
    image="ghcr.io/huggingface/text-generation-inference:latest",
    repositories=("ghcr.io/huggingface/text-generation-inference",),
    entrypoint="text-generation-launcher",
    port=3000,
    image_port=80,
    probe="/health",
    host_option="--hostname",
    port_options=("--port", "-p"),
    model_options=("--model-id",),
    tensor_options=("--num-shard",),
    context_options=("--max-total-tokens",),
    port_variables=("PORT",),
)
OLLAMA = Engine(
    name="ollama",
    title="Ollama",
    image="ollama/ollama:latest",
    repositories=("ollama/ollama",),
    entrypoint="ollama",
    port=11434,
    image_port=11434,
    probe="/api/tags",
    host_option=None,
    port_options=(),
    model_options=(),
    port_variables=("OLLAMA_HOST",),
)
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (VLLM, SGLANG, LLAMA_CPP, TGI, OLLAMA)}

_MODULES = {
    "vllm.entrypoints.openai.api_server": VLLM,
    "vllm.entrypoints.api_server": VLLM,
    "sglang.launch_server": SGLANG,
}
_PROGRAMS = {"llama-server": LLAMA_CPP, "text-generation-launcher": TGI}
_VERBS = {
    ("vllm", "serve"): VLLM,
    ("sglang", "serve"): SGLANG,
    ("ollama", "serve"): OLLAMA,
    ("ollama", "run"): OLLAMA,
}
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
#: Commands that only name the program of another.
_TALK = frozenset(
    (
        "echo",
        "printf",
        "pip",
        "pip3",
        "uv",
        "which",
        "command",
        "apt",
        "apt-get",
        "docker",
        "podman",
        "pkill",
        "kill",
        "grep",
        "export",
    )
)
#: Options whose value is one word, whatever a variable in it is.
_PLAIN = (
    "--served-model-name",
    "--api-key",
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--alias",
    "--dtype",
    "--quantization",
)
#: How a word begins that may become several.
_WHOLE = ("$", '"$@', '"${@', '"$*')
_SHELLS = ("sh", "bash", "dash", "zsh")
#: An option: negative numbers are values.
OPTION = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True)
class Launch:
    """A command that starts a known engine: `program` are the words up to the engine's own, `arguments` those behind."""

    engine: Engine
    program: tuple[Word, ...]
    arguments: tuple[Word, ...]
    assignments: tuple[tuple[str, Word], ...] = ()

    @cached_property
    def options(self) -> dict[str, Word | None]:
        """Return the options with their values; None for those that have none. Underscores are dashes, the last one counts."""
        options = _options(self.arguments, self.engine.flags)
        return {name: value for _, name, value in options if name is not None}

    @property
    def positional(self) -> list[Word]:
        return [word for word, name, _ in _options(self.arguments, self.engine.flags) if name is None]

    @property
    def is_open(self) -> bool:
        """Return whether there may be options that cannot be seen: in a variable, or in a file."""
        engine = self.engine
        plain = {
            *(engine.host_option or "", *engine.port_options, *engine.model_options, *engine.tensor_options),
            *(*engine.pipeline_options, *engine.context_options, *_PLAIN),
        }
        options = [word for name, word in self.options.items() if word is not None and name not in plain]
        # Behind a flag, a variable may be the options that follow it.
        unseen = any(word.expands and word.raw.startswith(_WHOLE) for word in options)
        return (
            unseen
            or any(word.expands for word in self.positional[self._named_model :])
            or "--config" in self.options
        )

    @property
    def _named_model(self) -> int:
        return 1 if self.engine in (VLLM, SGLANG) and self.program[-1].text == "serve" else 0

    def value(self, names: Sequence[str]) -> Word | None:
        """Return the value of an option by any of its names."""
        return next((value for name in names if (value := self.options.get(name)) is not None), None)

    @property
    def model(self) -> Word | None:
        """Return the model: by option, or of `vllm serve MODEL` and `ollama run MODEL` the first argument."""
        named = self.value(self.engine.model_options)
        positional = self.positional
        if named is not None or not positional:
            return named
        by_place = self._named_model or self.program[-1].text == "run"
        return positional[0] if by_place else None

    @property
    def port(self) -> int | None:
        """Return the port that the engine listens on; None if that cannot be seen."""
        word = self.value(self.engine.port_options)
        for name, value in self.assignments:
            if word is None and name in self.engine.port_variables:
                word = value._replace(text=value.text.rpartition(":")[2])
        if word is not None:
            return int(word.text) if word.text.isdecimal() and not word.expands else None
        return None if self.is_open else self.engine.port

    @property
    def says_port(self) -> bool:
        """Return whether the port is in the command, not the engine's default."""
        variables = {name for name, _ in self.assignments} & set(self.engine.port_variables)
        return self.value(self.engine.port_options) is not None or bool(variables)

    def count(self, names: Sequence[str]) -> int | None:
        """Return the number of an option, 1 without it, None if it cannot be seen."""
        word = self.value(names)
        if word is None:
            return None if self.is_open else 1
        return int(word.text) if word.text.isdecimal() and not word.expands else None


def launches(script: str) -> list[Launch]:
    """Return the commands of a script that start known engines. Exported variables count for those behind them."""
    exported: dict[str, Word] = {}
    found = []
    for command in commands(script):
        if command.words and command.words[0].text == "export":
            pairs = [word for word in command.words[1:] if "=" in word.text]
            exported |= {
                word.text.partition("=")[0]: Word(word.raw, word.text.partition("=")[2], word.expands)
                for word in pairs
            }
        launch = launch_of(command, exported)
        if launch is not None:
            found.append(launch)
    return found


def launch_of(command: Command, exported: Mapping[str, Word] | None = None) -> Launch | None:
    """Return what the command starts, behind whatever it is wrapped in; None if that is no known engine."""
    texts = command.texts
    if not texts or texts[0].rpartition("/")[2] in _TALK - {"uv"} or texts[:2] == ["uv", "pip"]:
        return None
    if texts[0].rpartition("/")[2] in _SHELLS and len(texts) > 2 and re.fullmatch(r"-[a-z]*c", texts[1]):
        return next(iter(launches(texts[2])), None)
    assignments = [*(exported or {}).items(), *command.assignments]
    for index, text in enumerate(texts):
        engine, length = _engine_at(texts, index)
        if engine is not None:
            end = index + length
            return Launch(engine, command.words[:end], command.words[end:], tuple(assignments))
        if "=" in text and texts[0] == "env":
            name, _, value = text.partition("=")
            assignments.append((name, command.words[index]._replace(text=value)))
    return None


def _engine_at(texts: Sequence[str], index: int) -> tuple[Engine | None, int]:
    """Return the engine whose program begins at this word, and of how many words that is."""
    program = texts[index].rpartition("/")[2]
    following = texts[index + 1] if index + 1 < len(texts) else ""
    if engine := _VERBS.get((program, following)):
        return engine, 2
    if engine := _PROGRAMS.get(program):
        return engine, 1
    if program in _MODULES and index and texts[index - 1] == "-m":
        return _MODULES[program], 1
    return None, 0


def engine_of_image(image: str) -> Engine | None:
    """Return the engine whose image this is, by its repository."""
    name = image.removeprefix("docker:").removeprefix("docker.io/").partition("@")[0]
    repository = name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name
    return next((engine for engine in ENGINES.values() if repository in engine.repositories), None)


def _options(words: Sequence[Word], flags: frozenset[str]) -> Iterator[tuple[Word, str | None, Word | None]]:
    """Yield each option with its name and value, and each other argument with None for both."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not OPTION.match(word.text):
            yield word, None, None
            continue
        name, equals, value = word.text.partition("=")
        name = normal(name)
        if equals:
            yield word, name, Word(word.raw.partition("=")[2], value, word.expands)
        elif name not in flags and index < len(words) and not OPTION.match(words[index].text):
            yield word, name, words[index]
            index += 1
        else:
            yield word, name, None


def normal(option: str) -> str:
    """Return the option with dashes: engines take ``--max_model_len`` as well."""
    return option.replace("_", "-") if option.startswith("--") else option
