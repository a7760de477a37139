"""Rules for what a replica printed, and for how its `setup` or `run` ended. The first that fits is the cause. Pure.

Errors of machines and of models come before errors of programs: the latter are often what follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from skyserve_cli.causes.facts import Facts
from skyserve_cli.causes.rule import Found, Rule, line_with, logs, short, update

_ENDED = ("RUN_EXITED", "SETUP_FAILED")
_CODE = re.compile(r"exit(?:ed with)? code (\d+)")
_SIGNAL = re.compile(r"by signal (SIG\w+)")
_IMAGE = re.compile(
    r"step 'image' failed|ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|pull access denied|manifest unknown"
    r"|manifest for \S+ not found|toomanyrequests"
)
_MOUNT = re.compile(r"`([^`]*)` could not be fetched")
_LOGIN = re.compile(r"no login in time|step 'ssh' failed|login was refused")
_BACKGROUND = re.compile(r"`([^`]+)` runs? on in the background")


class Pattern(NamedTuple):
    """A cause that a line of the log shows.

    `sentence` and `change` may have {0}, {1} for the groups of `pattern`; `change` is one of the service file. `also_alive`: the
    program may hang after such a line, in place of ending.
    """

    cause: str
    pattern: re.Pattern[str]
    sentence: str
    change: str
    options: tuple[str, ...] = ()
    also_alive: bool = True


def _p(text: str) -> re.Pattern[str]:
    return re.compile(text)


PATTERNS = (
    Pattern(
        "disk_full", _p(r"No space left on device|Errno 28\b|ENOSPC|Disk quota exceeded"),
        "the disk of its machine is full", "raise resources.disk_size",
    ),
    Pattern(
        "cache_refused", _p(r"cache: (\S+) cannot be written by the user (\d+)"),
        "the user {1} of its container cannot write the folder of `cache`",
        "have the folder given to that user, or write cache: {{kind: pvc, claim: NAME}} with spec.securityContext.fsGroup in kubernetes.pod",
        also_alive=False,
    ),
    Pattern(
        "gpu_missing",
        _p(
            r"no CUDA-capable device|NVIDIA-SMI has failed|No CUDA GPUs are available|Found no NVIDIA driver|Failed to infer device type"
            r"|could not select device driver|nvidia-smi: (?:command )?not found"
        ),
        "its program finds no GPU with a working driver",
        "set resources.accelerators if it has none; else choose an image (resources.image_id) whose NVIDIA driver works",
    ),
    Pattern(
        "gpu_driver",
        _p(
            r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|no kernel image is available for execution"
            r"|unsupported display driver / cuda driver|unsatisfied condition: cuda"
        ),
        "the NVIDIA driver of its machine does not fit the CUDA of its program",
        "use a build for an older CUDA, or an image (resources.image_id) with a newer driver",
    ),
    Pattern(
        "gpu_memory",
        _p(r"(?i)CUDA out of memory|OutOfMemoryError: CUDA|CUDA_ERROR_OUT_OF_MEMORY|cudaMalloc failed: out of memory|No available memory for the cache"),
        "the memory of the GPU ran out",
        "choose a larger resources.accelerators, or a shorter context, a smaller model or less memory per engine in `run`",
    ),
    Pattern(
        "model_missing",
        _p(r"RepositoryNotFound|Repository Not Found|not a valid model identifier|RevisionNotFoundError|EntryNotFoundError"),
        "its model is not found on Hugging Face, or is private", "correct the model's name in `run`, or list the HF_TOKEN of a user with access in secrets",
        ("--secret HF_TOKEN",),
    ),
    Pattern(
        "model_gated",
        _p(r"GatedRepoError|[Cc]annot access gated repo|access a gated repo|Access to model .{1,100} is restricted|(?:401|403) Client Error.{0,200}(?:huggingface|hf\.co)|Invalid user token"),
        "Hugging Face refuses its model: the token is missing, or has no access", "once the model's page says that you have access, list HF_TOKEN in secrets",
        ("--secret HF_TOKEN",),
    ),
    Pattern(
        "port_in_use", _p(r"(?i)address already in use|EADDRINUSE|Errno 98\b"),
        "its port is in use on its machine", "let the server listen on $SKYSERVE_REPLICA_PORT, and start it once",
    ),
    Pattern(
        "command_missing", _p(r"(?:^|[: ])([^\s:]+): (?:command )?not found\b"),
        "the program {0} is not found", "install {0} in `setup`, or correct its name", also_alive=False,
    ),
    Pattern(
        "module_missing", _p(r"ModuleNotFoundError: No module named ['\"]?([\w.]+)"),
        "the Python module {0} is not installed", "install {0} in `setup` (pip install …)", also_alive=False,
    ),
    Pattern(
        "import_failed", _p(r"ImportError: (.+)"),
        "its program cannot import what it needs: {0}", "install fitting versions in `setup`", also_alive=False,
    ),
    Pattern(
        "library_missing", _p(r"error while loading shared libraries: ([^\s:]+)"),
        "the shared library {0} is missing", "install it in `setup`, or use an image that has it", also_alive=False,
    ),
    Pattern(
        "wrong_arguments", _p(r"error: (unrecognized arguments: .+|argument .+: .+|the following arguments are required: .+)"),
        "its program refuses its arguments: {0}", "correct the command in `run`", also_alive=False,
    ),
    Pattern(
        "file_missing", _p(r"can't open file ['\"]([^'\"]+)|(?:cannot (?:access|open|stat)|sh: \d+: \S+) ['\"]?([^'\":]+)['\"]?: No such file"),
        "the file {0} is not on its machine", "set workdir or file_mounts", also_alive=False,
    ),
    Pattern(
        "out_of_memory", _p(r"MemoryError\b|Cannot allocate memory|std::bad_alloc|[Oo]ut of memory: Killed|OOMKilled|DefaultCPUAllocator: (?:can't|not enough)"),
        "its machine has too little memory (of the host, not of the GPU)", "raise resources.memory", also_alive=False,
    ),
)  # fmt: skip


def _by_pattern(row: Pattern) -> Callable[[Facts], Found | None]:
    def recognise(facts: Facts) -> Found | None:
        is_alive = facts.reason not in _ENDED
        if is_alive and not (
            row.also_alive and (facts.state == "STARTING" or facts.reason == "START_TIMEOUT")
        ):
            return None
        in_log = line_with(row.pattern, facts.log)
        hit = in_log or (None if is_alive else line_with(row.pattern, facts.message))
        if hit is None:
            return None
        words = [short(group, 60) for group in hit[0].groups() if group]
        sentence = f"{_began(facts)}: {row.sentence.format(*words)}"
        return Found(
            sentence, update(facts, row.change.format(*words), *row.options), in_log[1] if in_log else ""
        )

    return recognise


def _began(facts: Facts) -> str:
    """Return the beginning of a sentence about a replica: ``replica 3: `run` ended with exit code 1``."""
    if facts.reason not in _ENDED:
        return f"{facts.who} does not become ready"
    what = "`setup` failed" if facts.reason == "SETUP_FAILED" else "`run` ended"
    code, signal = _CODE.search(facts.message), _SIGNAL.search(facts.message)
    how = f" with exit code {code[1]}" if code else f" by signal {signal[1]}" if signal else ""
    return f"{what}{how} on {facts.who}"


def _code(facts: Facts) -> int | None:
    found = _CODE.search(facts.message)
    return int(found[1]) if found and facts.reason in _ENDED else None


def _killed(facts: Facts) -> Found | None:
    is_killed = facts.reason in _ENDED and ("SIGKILL" in facts.message or _code(facts) == 137)
    if not is_killed and "out of memory?" not in facts.message:
        return None
    return Found(
        f"{_began(facts)}: it was killed, probably for lack of memory (of the host, not of the GPU)",
        update(facts, "raise resources.memory"),
    )


def _not_found(facts: Facts) -> Found | None:
    if _code(facts) not in (126, 127):
        return None
    what = "a program in it is not found" if _code(facts) == 127 else "a program in it is not executable"
    return Found(f"{_began(facts)}: {what}", update(facts, "install it in `setup`, or correct its name"))


def _image(facts: Facts) -> Found | None:
    hit = line_with(_IMAGE, facts.message)
    if hit is None or facts.reason != "SETUP_FAILED":
        return None
    change = (
        "correct resources.image_id, or give SKYPILOT_DOCKER_USERNAME and SKYPILOT_DOCKER_PASSWORD in secrets"
    )
    return Found(f"{facts.who} could not pull its container image: {short(hit[1])}", update(facts, change))


def _mount(facts: Facts) -> Found | None:
    found = _MOUNT.search(facts.message) if facts.reason == "SETUP_FAILED" else None
    if found is None:
        return None
    return Found(
        f"{facts.who} could not copy {short(found[1])}",
        update(facts, "correct file_mounts, or give access to it"),
    )


def _login(facts: Facts) -> Found | None:
    if facts.reason != "SETUP_FAILED" or not _LOGIN.search(facts.message):
        return None
    return Found(
        f"the controller could not log in to the machine of {facts.who}: {short(facts.message)}",
        "serve check",
    )


def _in_background(facts: Facts) -> Found | None:
    if facts.reason != "RUN_EXITED" or _code(facts) != 0:
        return None
    found = _BACKGROUND.search(facts.message)
    what = (
        f"it left {short(found[1], 40)} in the background"
        if found
        else "it must run for as long as the replica is to serve"
    )
    return Found(
        f"{_began(facts)}: {what}",
        update(
            facts, "start the server with `exec` and without `&`, `nohup` or `-d`, as the last line of `run`"
        ),
    )


def _other_end(facts: Facts) -> Found | None:
    if facts.reason not in _ENDED:
        return None
    said = facts.message.partition(": ")[2]
    return Found(
        f"{_began(facts)}" + (f"; it printed last: {short(said, 120)}" if said else ", and printed nothing"),
        logs(facts),
    )


RULES = (
    Rule("image_pull", _image),
    Rule("copy_failed", _mount),
    Rule("no_login", _login),
    *(Rule(row.cause, _by_pattern(row)) for row in PATTERNS),
    Rule("out_of_memory", _killed),
    Rule("command_missing", _not_found),
    Rule("not_in_foreground", _in_background),
)

#: After all that are more precise.
OTHER_END = Rule("program_ended", _other_end)
