"""The service file for a command that starts a server on one machine, with or without `docker run`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skyserve_cli.spec.references import NAME
from skyserve_cli.starter.container import Container, NoContainer, docker_run, mounts_of
from skyserve_cli.starter.draft import GATED, Draft, gpus_for, memory_for, slug
from skyserve_cli.starter.engines import (
    LLAMA_CPP,
    OLLAMA,
    OPTION,
    SGLANG,
    TGI,
    VLLM,
    Engine,
    Launch,
    engine_of_image,
    launch_of,
    normal,
)
from skyserve_cli.starter.sizes import Weights, weights_of_name
from skyserve_cli.starter.words import Command, Word, commands, unusable, word_of

SECRET = re.compile(r"(?:TOKEN|SECRET|PASSWORD|API_?KEY|_KEY|CREDENTIALS)$", re.IGNORECASE)
#: What the library of Hugging Face reads, too, by its present name.
_OLD_NAMES = {"HUGGING_FACE_HUB_TOKEN": "HF_TOKEN", "HUGGINGFACE_HUB_TOKEN": "HF_TOKEN"}
_ANYWHERE = "0.0.0.0"  # noqa: S104, other machines send the requests
_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_OF_SHELLS = frozenset(
    ("HOME", "PATH", "PWD", "USER", "HOSTNAME", "SHELL", "UID", "RANDOM", "LD_LIBRARY_PATH", "PYTHONPATH")
)
_KEY_OPTIONS = ("--api-key",)
_SILENT = frozenset(("sudo", "exec", "nohup", "time", "env", "uv", "run", "-m", "python", "python3"))
_PULL = """\
ollama serve &
server=$!
until ollama list > /dev/null 2>&1; do sleep 1; done
ollama pull {model} && pulled=0 || pulled=1
kill "$server"
wait "$server" || true
exit "$pulled"
"""


class NotKnown(ValueError):
    """The command starts nothing that is known; the message says what is."""


def from_command(text: str, folder: Path) -> Draft:
    """Return the draft for a command. Local paths are below `folder`. Raises NotKnown and NoContainer."""
    if (letter := unusable(text)) is not None:
        raise NotKnown(f"the command has a character that no shell should get, {letter}")
    found = commands(text)
    exported = {name: value for command in found for name, value in _exports(command)}
    for index, command in enumerate(found):
        others = [each for each in (*found[:index], *found[index + 1 :]) if not _exports(each)]
        pulled = next((word for each in others if (word := _pulled(each)) is not None), None)
        inner = _docker_words(command)
        if inner is not None:
            draft = from_container(docker_run(inner), folder, pulled)
        elif (launch := launch_of(command, exported)) is not None:
            draft = _from_launch(_with_model(launch, pulled), None, [], folder)
            _note_wrapping(draft, command, launch)
        else:
            continue
        for other in others:
            if draft.engine is not OLLAMA or _pulled(other) is None:
                draft.notes.append(f"not carried over: {' '.join(word.raw for word in other.words)}")
        return draft
    raise NotKnown(
        "the command starts none of: vllm serve, python3 -m sglang.launch_server, llama-server, text-generation-launcher, "
        "ollama, docker run"
    )


def _pulled(command: Command) -> Word | None:
    """Return the model of `ollama pull MODEL` or `ollama run MODEL`, also behind `docker exec`."""
    texts = command.texts
    index = next(
        (at for at, text in enumerate(texts) if text in ("pull", "run") and at and texts[at - 1] == "ollama"),
        None,
    )
    return command.words[index + 1] if index is not None and index + 1 < len(texts) else None


def _with_model(launch: Launch, pulled: Word | None) -> Launch:
    """Return the launch of Ollama with the model that another command of the script pulls."""
    if launch.engine is not OLLAMA or launch.model is not None or pulled is None:
        return launch
    program = (*launch.program[:-1], word_of("run"))
    return replace(launch, program=program, arguments=(pulled, *launch.arguments))


def from_container(container: Container, folder: Path, pulled: Word | None = None) -> Draft:
    """Return the draft for a container, of Ollama with the model `pulled`. Raises NoContainer if the command in it is not known."""
    mounts, notes = mounts_of(container.volumes, folder)
    notes += [f"not carried over: {each}" for each in container.dropped]
    words = _inner_words(container)
    launch = launch_of(Command(tuple(words), tuple((k, v) for k, v in container.envs.items() if v)))
    if launch is not None:
        draft = _from_launch(_with_model(launch, pulled), container, notes, folder)
    else:
        draft = _of_unknown(container, words, notes)
    draft.image = container.image
    draft.file_mounts |= mounts
    draft.probe = container.probe or draft.probe
    draft.probe_settings = container.probe_settings
    return draft


def _docker_words(command: Command) -> Sequence[Word] | None:
    texts = [text for text in command.texts if text != "sudo"]
    if texts[:2] not in (["docker", "run"], ["podman", "run"]) and texts[:3] != [
        "docker",
        "container",
        "run",
    ]:
        return None
    return command.words[command.texts.index("run") + 1 :]


def _inner_words(container: Container) -> list[Word]:
    """Return the command that runs inside: the entrypoint of the image, which is known of engines, and the arguments."""
    engine = engine_of_image(container.image)
    if container.entrypoint is not None:
        return [*container.entrypoint, *container.arguments]
    arguments = list(container.arguments)
    if engine is None or engine is SGLANG:  # whose image starts what it is given
        return arguments
    if engine is OLLAMA:
        return [word_of("ollama"), *(arguments or [word_of("serve")])]
    if launch_of(Command(tuple(arguments))) is not None:
        return arguments  # the program is named once more
    program = [word_of(word) for word in engine.entrypoint.split()]
    if engine is VLLM and arguments:
        if arguments[0].text == "serve":
            del arguments[0]
        return [*program, *_model_first(arguments)]
    return [*program, *arguments]


def _model_first(arguments: list[Word]) -> list[Word]:
    """Return the arguments with ``--model NAME`` as the first one: `vllm serve` rejects the option in some versions."""
    for index, word in enumerate(arguments):
        name, equals, value = word.text.partition("=")
        if name == "--model" and equals:
            first = Word(word.raw.partition("=")[2], value, word.expands)
            return [first, *arguments[:index], *arguments[index + 1 :]]
        if name == "--model" and index + 1 < len(arguments):
            return [arguments[index + 1], *arguments[:index], *arguments[index + 2 :]]
    return arguments


def _from_launch(launch: Launch, container: Container | None, notes: list[str], folder: Path) -> Draft:
    engine = launch.engine
    model = launch.model
    name = None if model is None else model.text
    port = _port(launch, container)
    draft = Draft(
        name=slug(name) if name and not model_is_hidden(model) else engine.name.replace(".", "-"),
        run="",
        port=port,
        engine=engine,
        model=name,
        probe=engine.probe,
        image=engine.image,
        notes=notes,
    )
    given: dict[str, Word | None] = {
        **dict(launch.assignments),
        **({} if container is None else container.envs),
    }
    exports = variables_of(draft, list(given.items()))
    if engine in (VLLM, SGLANG, TGI) and (name or "").startswith(GATED):
        _add_secret(draft, "HF_TOKEN")
    arguments = _arguments(launch, draft)
    if engine is not OLLAMA:
        _declare(draft, [*arguments, *(word for word in given.values() if word)], set(given))
        _find_files(draft, model, [] if container is None else container.volumes, folder)
    _choose_gpus(draft, launch, container)
    draft.run = _run_of(launch, draft, arguments, exports)
    return draft


def _declare(draft: Draft, words: Sequence[Word], given: set[str]) -> None:
    """Declare the variables that words refer to and that nothing sets: they come from the user's environment."""
    names = [
        match[1] or match[2] for word in words if word.expands for match in _REFERENCE.finditer(word.text)
    ]
    for name in dict.fromkeys(names):
        if (
            name in {*given, *draft.envs, *draft.secrets}
            or name in _OF_SHELLS
            or name.startswith(("SKYSERVE_", "SKYPILOT_"))
        ):
            continue
        variables_of(draft, [(name, None)])
        option = "--secret" if name in draft.secrets else "--env"
        draft.notes.append(f"${name} is a variable of your shell: export it, or pass {option} {name}=VALUE")


def _find_files(draft: Draft, model: Word | None, volumes: Sequence[str], folder: Path) -> None:
    """Copy a model that is a path of this machine, and note one that is not there."""
    path = "" if model is None or model.expands else model.text
    if not path.startswith(("/", "./", "../", "~")) and not path.endswith(".gguf"):
        return
    if any(path.startswith(volume.split(":")[1]) for volume in volumes if ":" in volume):
        return  # which is copied, or noted
    if not path.startswith("~") and (folder / path).exists():
        draft.file_mounts[path] = path if path.startswith("/") or folder == Path() else str(folder / path)
    else:
        draft.notes.append(
            f"{path} is not here: copy the model to replicas with file_mounts, or download it in setup"
        )


def model_is_hidden(model: Word | None) -> bool:
    """Return whether the name of the model is in a variable."""
    return model is not None and model.expands


def _of_unknown(container: Container, words: Sequence[Word], notes: list[str]) -> Draft:
    if not words:
        raise NoContainer(
            f"{container.image}: its own command is not known here, because run has to name it; give the command behind the image"
        )
    if not container.ports:
        raise NoContainer(
            f"{container.image}: no port is published, so it is not known where the server listens"
        )
    name = container.image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    draft = Draft(name=slug(name), run="", port=container.ports[0], notes=notes)
    exports = variables_of(draft, list(container.envs.items()))
    draft.run = "\n".join([*exports, f"exec {' '.join(word.raw for word in words)}"])
    if container.wants_gpu:
        draft.accelerators, draft.why_accelerators = (
            (f"L4:{container.gpus or 1}",),
            "change it to what the server needs",
        )
    return draft


# --- variables ---


def variables_of(draft: Draft, given: Sequence[tuple[str, Word | None]]) -> list[str]:
    """Put variables into `envs`, and names of credentials into `secrets`. Return exports for those that refer to others."""
    exports = []
    for given_name, word in given:
        name = _OLD_NAMES.get(given_name, given_name)
        if name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            draft.notes.append(f"not carried over: {name}; a replica has the GPUs that resources name")
        elif not NAME.fullmatch(name) or name.startswith("SKYSERVE_"):
            draft.notes.append(f"not carried over: the variable {name!r}, whose name no service file takes")
        elif name == "OLLAMA_HOST":
            continue
        elif SECRET.search(name):
            _add_secret(draft, name)
            of = None if word is None else re.fullmatch(r"\$\{?(\w+)(?::?[-?][^}]*)?\}?", word.text)
            if word is not None and not word.expands:
                draft.notes.append(
                    f"the value of {name} is not in this file: export {name}, or pass --secret {name}"
                )
            elif of is not None and of[1] != name:
                draft.notes.append(f"{name} was ${of[1]}: export {name}, or pass --secret {name}=…")
        elif word is None:
            draft.envs[name] = None
        elif word.expands:
            exports.append(
                f"export {name}={word.raw if word.raw.startswith(chr(34)) else word_of(word.text, keep_variables=True).raw}"
            )
        else:
            draft.envs[name] = word.text
    return exports


def _add_secret(draft: Draft, name: str) -> None:
    if name not in draft.secrets:
        draft.secrets.append(name)


def _exports(command: Command) -> list[tuple[str, Word]]:
    if not command.words:
        return list(command.assignments)
    if command.words[0].text != "export":
        return []
    pairs = [(word, word.text.partition("=")) for word in command.words[1:]]
    return [(name, Word(value, value, word.expands)) for word, (name, equals, value) in pairs if equals]


# --- the command ---


def _port(launch: Launch, container: Container | None) -> int:
    """Return the port that the command will listen on: its own, else the container's, else the engine's."""
    if launch.says_port and launch.port:
        return launch.port
    word = launch.value(launch.engine.port_options)
    default = None if word is None else re.search(r":?-(\d+)\}", word.text)
    if default is not None:
        return int(default[1])
    if container is None:
        return launch.engine.port
    return container.ports[0] if container.ports else launch.engine.image_port


def _arguments(launch: Launch, draft: Draft) -> list[Word]:
    """Return the arguments with the address and the port of the draft, and no key in the clear."""
    engine, words = launch.engine, list(launch.arguments)
    if engine is OLLAMA:
        return words
    found: list[Word] = []
    index = 0
    while index < len(words):
        name, equals, value = words[index].text.partition("=")
        option = normal(name)
        has_value = not equals and index + 1 < len(words) and not OPTION.match(words[index + 1].text)
        if option in (engine.host_option, *engine.port_options):
            old = value if equals else words[index + 1].text if has_value else ""
            if option != engine.host_option and "$" in old:
                draft.notes.append(f"{option} {old} is {draft.port} here, which ports has to name")
            if option == engine.host_option and old not in (_ANYWHERE, "::"):
                draft.notes.append(f"{option} {old} is {_ANYWHERE} here: requests come from other machines")
            index += 2 if has_value else 1
            continue
        if option in _KEY_OPTIONS and (equals or has_value):
            secret = f"{engine.name.upper().replace('.', '_')}_API_KEY"
            _add_secret(draft, secret)
            draft.notes.append(
                f"{option} comes from the secret {secret}: export it, or pass --secret {secret}"
            )
            found += [word_of(option), Word(f'"${secret}"', f"${secret}", True)]
            index += 2 if has_value else 1
            continue
        found.append(words[index])
        index += 1
    host = engine.host_option or ""
    return [*found, word_of(host), word_of(_ANYWHERE), word_of("--port"), word_of(str(draft.port))]


def _run_of(launch: Launch, draft: Draft, arguments: Sequence[Word], exports: Sequence[str]) -> str:
    lines = list(exports)
    if launch.engine is OLLAMA:
        draft.envs = {"OLLAMA_HOST": f"{_ANYWHERE}:{draft.port}", **draft.envs}
        if draft.model is not None:
            draft.setup = _PULL.format(model=word_of(draft.model).raw)
        else:
            draft.notes.append(
                "no model is named: clients request what was pulled; add `ollama pull MODEL` to setup"
            )
        return "\n".join([*lines, "exec ollama serve"])
    if launch.engine is LLAMA_CPP:
        lines.append("PATH=$PATH:/app   # where the image has it")
    program = {
        SGLANG: "python3 -m sglang.launch_server",
        TGI: "text-generation-launcher",
        LLAMA_CPP: "llama-server",
    }
    start = program.get(launch.engine) or " ".join(_program(launch))
    first, *others = _groups(arguments)
    if not OPTION.match(first):
        start, first = f"{start} {first}", ""
    return "\n".join([*lines, " \\\n  ".join([f"exec {start}", *filter(None, (first, *others))])])


def _program(launch: Launch) -> list[str]:
    """Return the words that start the engine itself, by the names that its image has."""
    last = launch.program[-1].text
    return ["vllm", "serve"] if last == "serve" else ["python3", "-m", last]


def _groups(words: Sequence[Word]) -> list[str]:
    """Return each option with its values, as one line."""
    groups: list[list[str]] = []
    for word in words:
        if OPTION.match(word.text) or not groups:
            groups.append([word.raw])
        else:
            groups[-1].append(word.raw)
    return [" ".join(group) for group in groups]


def _note_wrapping(draft: Draft, command: Command, launch: Launch) -> None:
    """Note what was around the command and is not in the file."""
    own = {"vllm": 2, "sglang": 2, "ollama": 2}.get(
        launch.program[-2].text.rpartition("/")[2] if len(launch.program) > 1 else "", 1
    )
    around = [word.text for word in launch.program[: len(launch.program) - own]]
    kept = [text for text in around if text.rpartition("/")[2] not in _SILENT and "=" not in text]
    if kept:
        draft.notes.append(f"not carried over: {' '.join(kept)}")
    if command.end == "&" or "nohup" in around:
        draft.notes.append("the server stays in the foreground: a replica whose run ends is replaced")
    if command.redirections:
        draft.notes.append(
            f"not carried over: {' '.join(command.redirections)}; `serve logs` shows what the server prints"
        )


# --- GPUs ---


def _choose_gpus(draft: Draft, launch: Launch, container: Container | None) -> None:
    """Choose accelerators by the size of the model and by over how many the command splits it."""
    weights = weights_for(launch.engine, None if model_is_hidden(launch.model) else draft.model, launch)
    on_cpu = launch.engine is LLAMA_CPP and not _offloads(launch, container)
    if on_cpu:
        draft.memory_gb = memory_for(weights)
        draft.image = "ghcr.io/ggml-org/llama.cpp:server" if container is None else draft.image
        return
    tensor, pipeline = (
        launch.count(launch.engine.tensor_options),
        launch.count(launch.engine.pipeline_options),
    )
    said = launch.value((*launch.engine.tensor_options, *launch.engine.pipeline_options)) is not None
    visible = dict(launch.assignments).get("CUDA_VISIBLE_DEVICES")
    devices = len(visible.text.split(",")) if visible is not None and not visible.expands else None
    wanted = (tensor or 1) * (pipeline or 1) if said else (container.gpus if container else None) or devices
    set_gpus(draft, weights, wanted)
    if not draft.accelerators:
        draft.accelerators = (f"H100:{wanted or 8}",)
        draft.notes.append(f"{draft.model} is larger than the GPUs that are common; check accelerators")


def set_gpus(draft: Draft, weights: Weights | None, count: int | None) -> None:
    """Set the accelerators for a model, `count` of each, or as many as it needs."""
    names, number = gpus_for(weights, count)
    draft.accelerators = tuple(f"{name}:{number}" for name in names)
    draft.why_accelerators = str(weights) if weights else "the size of the model is not known"
    if weights is None:
        draft.accelerators = draft.accelerators[:1]


def weights_for(engine: Engine, model: str | None, launch: Launch | None = None) -> Weights | None:
    """Return what the weights take, by the name of the model; of engines that quantize by default about that."""
    if model is None:
        return None
    if engine in (OLLAMA, LLAMA_CPP):
        plain = weights_of_name(re.sub(r"(?i)[-_.:]?(gguf|q\d\w*|iq\d\w*|it|instruct)", "", model))
        return None if plain is None else Weights(plain.gb * 0.3, "4 to 5 bits")
    given = None if launch is None else launch.value(("--quantization", "-q", "--quantize"))
    dtype = None if launch is None else launch.value(("--dtype",))
    return weights_of_name(model, given and given.text, dtype and dtype.text)


def _offloads(launch: Launch, container: Container | None) -> bool:
    layers = launch.value(("-ngl", "--gpu-layers", "--n-gpu-layers"))
    if layers is not None:
        return layers.text != "0"
    return container is not None and (container.wants_gpu or "cuda" in container.image)


# --- from the answers to questions ---


def from_choices(engine: Engine, model: str) -> Draft:
    """Return the draft for an engine and a model that the user named."""
    word = word_of(model).raw
    text = {
        VLLM: f"vllm serve {word}",
        SGLANG: f"python3 -m sglang.launch_server --model-path {word}",
        TGI: f"text-generation-launcher --model-id {word}",
        OLLAMA: f"ollama run {word}",
        LLAMA_CPP: f"llama-server {'-m' if model.endswith('.gguf') else '-hf'} {word} -ngl 99",
    }[engine]
    draft = from_command(text, Path())
    if engine in (VLLM, SGLANG, TGI):
        set_gpus(draft, weights_for(engine, model), None)
        draft.is_split = True
    return draft


def split(draft: Draft) -> None:
    """Let the engine use all GPUs of a replica, where the command is ours."""
    count = int(draft.accelerators[0].partition(":")[2] or 1) if draft.accelerators else 1
    if draft.is_split and draft.engine is not None and count > 1:
        draft.run += f" \\\n  {draft.engine.tensor_options[0]} {count}"
