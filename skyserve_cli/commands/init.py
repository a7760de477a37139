"""`serve init`: a service file from answers to four questions, from a command, or from a file of SkyPilot or compose."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from skyserve_cli.commands import files
from skyserve_cli.commands.options import Yes, home
from skyserve_cli.config import load_config
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put
from skyserve_cli.spec.infra import CLOUDS
from skyserve_cli.spec.problems import SpecError
from skyserve_cli.spec.whole_file import NAME
from skyserve_cli.starter import compose
from skyserve_cli.starter.command import NotKnown, from_choices, from_command, split
from skyserve_cli.starter.container import NoContainer
from skyserve_cli.starter.draft import LOCAL, Draft, memory_for, text_of
from skyserve_cli.starter.engines import ENGINES
from skyserve_cli.starter.skypilot import from_skypilot

EngineName = Enum("EngineName", {name: name for name in ENGINES}, type=str)  # type: ignore[misc]
DEFAULT_MODELS = {
    "vllm": "Qwen/Qwen2.5-7B-Instruct",
    "sglang": "Qwen/Qwen2.5-7B-Instruct",
    "tgi": "Qwen/Qwen2.5-7B-Instruct",
    "llama.cpp": "Qwen/Qwen2.5-3B-Instruct-GGUF",
    "ollama": "qwen2.5:7b",
}
NO_GPU = "none"
_STDOUT = Path("-")


class _Asker(NamedTuple):
    """Asks on a terminal; without one, or with --yes, the defaults count."""

    here: bool
    yes: bool

    def __call__(self, option: str, question: str, default: str) -> str:
        if self.yes:
            return default
        if not self.here:
            raise WrongUsage(f"pass {option}, or --yes to take {default}: stdin is not a terminal")
        try:
            return str(typer.prompt(question, default=default, err=True)).strip()
        except (typer.Abort, KeyboardInterrupt):
            raise CommandFailed("\ninterrupted; nothing was written", 130) from None


def init(
    output: Annotated[
        Path,
        typer.Option("--output", metavar="FILE", help="Where to write; - is stdout. Default: service.yaml."),
    ] = Path("service.yaml"),
    engine: Annotated[EngineName | None, typer.Option("--engine", help="The server of the model.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model, as its engine takes it.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME[:COUNT]",
            help="Accelerators of a replica, or none. Default: by the model's size.",
        ),
    ] = None,
    cloud: Annotated[
        list[str] | None,
        typer.Option(
            "--cloud", metavar="NAME", help="Where replicas may run; repeatable. Default: the enabled ones."
        ),
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Spot instances.")] = False,
    name: Annotated[
        str | None, typer.Option("-n", "--name", help="Name of the service. Default: by the model.")
    ] = None,
    from_command_: Annotated[
        str | None,
        typer.Option(
            "--from-command", metavar="COMMAND", help="A command that starts the server on one machine."
        ),
    ] = None,
    from_skypilot_: Annotated[
        Path | None, typer.Option("--from-skypilot", metavar="FILE", help="A service file of SkyPilot.")
    ] = None,
    from_compose_: Annotated[
        Path | None, typer.Option("--from-compose", metavar="FILE", help="A compose file.")
    ] = None,
    service: Annotated[
        str | None,
        typer.Option("--service", metavar="NAME", help="With --from-compose: which of its services."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    yes: Yes = False,
) -> None:
    """Write a service file.

    Asks for the engine, the model, the GPU and the clouds; each question is an option, too. --from-command takes a command line of vLLM,
    SGLang, llama.cpp, Text Generation Inference or Ollama, also behind `docker run`, and --from-compose a service of a compose file. --from-skypilot keeps
    the text of the file. What is not carried over is listed on stderr and in a comment.

    \b
    serve init --from-command "vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 8192"
    serve init --engine vllm --model Qwen/Qwen2.5-7B-Instruct --gpu L4 --cloud aws --cloud gcp
    """
    sources = [each for each in (from_command_, from_skypilot_, from_compose_) if each is not None]
    if len(sources) > 1:
        raise WrongUsage("choose one of --from-command, --from-skypilot and --from-compose")
    if service is not None and from_compose_ is None:
        raise WrongUsage("--service is for --from-compose")
    if sources and (engine or model):
        raise WrongUsage("--engine and --model are questions; the command or the file names them already")
    if output != _STDOUT and output.exists() and not force:
        raise WrongUsage(f"{output} exists; pass --force to overwrite it, or --output FILE")
    if from_skypilot_ is not None:
        _insist_on_none(gpu=gpu, cloud=cloud, spot=spot, name=name)
        _write(output, _of_skypilot(from_skypilot_))
        return
    ask = _asker(yes)
    draft = _draft(ask, engine, model, from_command_, from_compose_, service)
    _choose(draft, ask, gpu, cloud, spot=spot, name=name)
    for note in draft.notes:
        inform(f"note: {note}")
    _write(output, text_of(draft))


def _asker(yes: bool) -> _Asker:
    return _Asker(sys.stdin.isatty(), yes)


def _insist_on_none(**given: object) -> None:
    used = [f"--{key}" for key, value in given.items() if value]
    if used:
        raise WrongUsage(f"{' and '.join(used)}: --from-skypilot keeps what the file says; change it there")


def _of_skypilot(file: Path) -> str:
    """Return our file for one of SkyPilot, and print what is not carried over. Raises SpecError."""
    text = _read("--from-skypilot", file)
    try:
        carried = from_skypilot(text, str(file))
    except SpecError as error:
        raise CommandFailed("\n".join(f"{file}: {each}" for each in error.problems), 2) from None
    for line in carried.dropped:
        inform(f"not carried over: {line}")
    for line in carried.idle:
        inform(f"carried over without an effect: {line}")
    return carried.text


def _draft(
    ask: _Asker,
    engine: EngineName | None,
    model: str | None,
    command: str | None,
    file: Path | None,
    service: str | None,
) -> Draft:
    if command is not None:
        return _known("--from-command", lambda: from_command(command, Path()))
    if file is not None:
        text = _read("--from-compose", file)
        return _known(
            str(file), lambda: compose.from_compose(text, _service(ask, text, service), _folder_of(file))
        )
    chosen = engine.value if engine else ask("--engine", f"Engine ({', '.join(ENGINES)})", "vllm")
    if chosen not in ENGINES:
        raise WrongUsage(f"{chosen!r} is no engine that is known: {', '.join(ENGINES)}")
    wanted = model or ask("--model", "Model", DEFAULT_MODELS[chosen])
    return from_choices(ENGINES[chosen], wanted)


def _known(where: str, make: Callable[[], Draft]) -> Draft:
    try:
        return make()
    except (NotKnown, NoContainer, compose.ComposeError) as error:
        raise WrongUsage(f"{where}: {error}") from None


def _folder_of(file: Path) -> Path:
    """Return where paths in the file begin; the folder of the command if it is that one."""
    return Path() if file.resolve().parent == Path.cwd() else file.resolve().parent


def _service(ask: _Asker, text: str, given: str | None) -> str:
    names = compose.service_names(text)
    if given is not None:
        return given
    if len(names) == 1:
        return names[0]
    if not names:
        raise compose.ComposeError("no service has an image")
    if ask.yes or not ask.here:
        raise WrongUsage(f"--from-compose: pass --service, one of {', '.join(names)}")
    return ask("--service", f"Service ({', '.join(names)})", names[0])


def _choose(
    draft: Draft, ask: _Asker, gpu: str | None, cloud: Sequence[str] | None, *, spot: bool, name: str | None
) -> None:
    """Ask for what neither the command nor an option says, and note it in the draft."""
    clouds = list(cloud or ())
    enabled = load_config(home().config).enabled
    if not clouds:
        said = ask("--cloud", f"Clouds ({', '.join(CLOUDS)})", ",".join(enabled) or LOCAL)
        clouds = [each.strip() for each in said.split(",") if each.strip()]
    unknown = [each for each in clouds if each.partition("/")[0] not in {*CLOUDS, *enabled}]
    if unknown:
        raise WrongUsage(f"--cloud {unknown[0]}: no such cloud; there are {', '.join(CLOUDS)}")
    draft.clouds = tuple(dict.fromkeys(clouds))
    if draft.clouds == (LOCAL,):  # whose replicas see the paths of this machine
        draft.file_mounts = {at: source for at, source in draft.file_mounts.items() if at != source}
    if gpu is None and draft.accelerators:
        default = "by size" if len(draft.accelerators) > 1 else draft.accelerators[0]
        answer = ask("--gpu", f"GPU, such as L4 or H100:8, or {NO_GPU}", default)
        gpu = None if answer == default else answer
    if gpu == NO_GPU:
        draft.accelerators, draft.memory_gb = (), memory_for(None)
    elif gpu is not None:
        draft.accelerators = (_gpu(gpu),)
    split(draft)
    draft.use_spot = spot
    if name is not None:
        draft.name = name
    if not NAME.fullmatch(draft.name):
        raise WrongUsage(
            f"--name {draft.name}: letters, digits and dashes, beginning with a letter, at most 63"
        )


def _gpu(text: str) -> str:
    """Return the accelerator of an option or an answer. Raises WrongUsage."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[1-9][0-9]{0,2})?", text):
        raise WrongUsage(f"--gpu takes an accelerator such as L4 or H100:8, or {NO_GPU} (got {text})")
    return text


def _read(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise WrongUsage(f"{option} {file}: {reason}") from None


def _write(output: Path, text: str) -> None:
    if output == _STDOUT:
        put(text.rstrip("\n"))
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"cannot write {output}: {error.strerror}") from None
    try:
        loaded = files.read(output, to_run=False)
    except SpecError as error:
        problems = "\n".join(map(str, error.problems))
        raise CommandFailed(f"{output} is written, and is not right yet:\n{problems}") from None
    for warning in loaded.warnings:
        inform(f"warning: {warning}")
    inform(f"wrote {output}; next: serve validate {output}")
