"""`serve why`: the cause of a fault in the first line, and in the last one the command that cures it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from policies.brake import HELD_MANY
from policies.budget import Budget, affordable
from policies.crashes import account
from policies.history import Load
from policies.model import EndReason, FailureKind, Preempted, PreemptionNotice, Replica
from policies.placement.base import PlannedLaunch
from policies.placement.fleet import FULL
from policies.rollout import crash_note
from skyserve_cli.app import VERBS, build
from skyserve_cli.causes.explain import MOST_LINES, WELL
from skyserve_cli.causes.facts import Address
from skyserve_cli.causes.log_text import HIDDEN, LINE_CHARS, TAIL_BYTES, cleaned, quoted
from skyserve_cli.controller.balancers.local_fleet import AgentView
from skyserve_cli.controller.balancers.regional_view import RegionalView
from tests.unit.causes_kit import (
    NOW,
    OFFER,
    Fault,
    exited,
    failed,
    lived,
    only_errors,
    ready,
    refused,
    set_up,
    silent,
    starting,
    status,
    too_slow,
)

REFUSED = "probe failed: Connection refused"
UPDATE = "serve update chat FILE"
GIVEN_UP = {"rollout": {"failed": [2], "good": 1}, "version": 2}


def probed(trouble: str, *, log: str = "", at: float = 100.0, **more: object) -> Fault:
    """A replica that is STARTING, whose last readiness probe met `trouble`."""
    return Fault([starting(at=at)], log, {1: failed(trouble)}, **more)  # type: ignore[arg-type]


def noted(*replicas: object, notes: str, **more: object) -> Fault:
    return Fault(list(replicas), stored={"notes": notes, **more})  # type: ignore[arg-type]


def trace(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "/app/serve.py", line 3, in <module>\n    import x\n{last}\n'


CRASHES = {"version": 1, "short": 4, "limit_s": 60.0, "at": [500.0]}
CRASH_NOTE = account(CRASHES)


def crashed(*replicas: Replica, log: str = "") -> Fault:
    """One replica in trial, as the last ones crashed; the next is launched soon."""
    rollout = {
        "crashes": CRASHES,
        "failing": 1,
        "failures": 4,
        "why": "`run` ended",
        "good": 1,
        "retry_at": NOW + 38.0,
    }
    return Fault(replicas, log, stored={"notes": crash_note(1, rollout), "rollout": rollout})


def over_budget(most: float | None) -> str:
    _, note = affordable([PlannedLaunch(OFFER, "")], Budget(most, 0.0, 0.1 if most is None else 9.0))
    return note


#: Fault, cause, words of the first line, words of the last.
FAULTS = {
    "another port, by its log": (
        probed(REFUSED, log="INFO:     Uvicorn running on http://0.0.0.0:8001 (Press CTRL+C to quit)\n"),
        "wrong_port", "listens on 0.0.0.0:8001, but its probes go to port 8080", UPDATE,
    ),
    "another port, by its sockets": (
        probed(REFUSED, listening=[Address("0.0.0.0", 9000)]), "wrong_port", "listens on 0.0.0.0:9000", "ports to 9000",
    ),
    "bound to 127.0.0.1": (
        probed(REFUSED, log="Uvicorn running on http://127.0.0.1:8080 (Press CTRL+C to quit)\n"),
        "loopback_only", "listens on 127.0.0.1:8080 only", "--host 0.0.0.0",
    ),
    "no program listens": (
        probed(REFUSED, log="loading weights: 3 of 12\n"),
        "not_listening", "STARTING for 14m 50s: nothing listens on its port 8080 yet; it printed last: loading weights: 3 of 12", "serve logs chat 1 -f",
    ),
    "key missing": (probed(status(401)), "probe_key_missing", "gets 401: the server wants a key", "readiness_probe.headers"),
    "forbidden": (probed(status(403)), "probe_key_missing", "gets 403", "--secret API_KEY"),
    "probe path": (
        probed(status(404)), "probe_path", "gets 404: its server has no such path", f"{UPDATE} --set readiness_probe.path=/PATH",
    ),
    "redirect": (
        probed(status(302, "https://login.example.com/a?b=c")),
        "probe_redirected", "redirected (302) to https://login.example.com/a", "readiness_probe.path=/PATH",
    ),
    "loads its model": (probed(status(503), log="loading\n"), "probe_server_error", "gets 503", "serve logs chat 1 -f"),
    "loaded": (
        Fault([ready()], probes={1: failed("probe took longer than 15 s", timed_out=True)}),
        "loaded", "replica 1 is loaded", "--set replica_policy.max_replicas=2",
    ),
    "hung": (Fault([silent("probe took longer than 15 s")]), "hung", "takes connections and gives the readiness probe no response", "serve logs chat 1 --tail 50"),
    "unreachable": (Fault([silent("no connection within 7.5 s")]), "hung", "takes no connection at 203.0.113.7:8080", "serve ssh chat --replica 1"),
    "stopped listening": (Fault([silent(REFUSED)]), "not_listening", "refuses connections at 203.0.113.7:8080", "serve logs chat 1"),
    "TLS": (probed("probe failed: [SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1000)"), "probe_tls", "fails on TLS", "plain HTTP"),
    "DNS": (probed("probe failed: Name or service not known"), "probe_dns", "cannot resolve the host of replica 1", "serve controller status"),
    "not HTTP": (probed("probe failed: the response is not HTTP"), "not_http", "speaks no HTTP/1.1", UPDATE),
    "only errors": (Fault([only_errors()]), "only_errors", "nothing but errors (5xx)", "serve logs chat 1"),
    "command not found": (
        Fault([exited(127, "/bin/bash: line 1: vllm: command not found")], "/bin/bash: line 1: vllm: command not found\n"),
        "command_missing", "`run` ended with exit code 127 on replica 1: the program vllm is not found", UPDATE,
    ),
    "command not found, log lost": (Fault([exited(127)]), "command_missing", "a program in it is not found", UPDATE),
    "module missing": (
        Fault([exited(1, trace("ModuleNotFoundError: No module named 'flask'"))], trace("ModuleNotFoundError: No module named 'flask'")),
        "module_missing", "the Python module flask is not installed", "install flask in `setup`",
    ),
    "import fails": (
        Fault([exited(1)], trace("ImportError: cannot import name 'x' from 'torch'")), "import_failed", "cannot import name", UPDATE,
    ),
    "port in use": (Fault([exited(1)], trace("OSError: [Errno 98] Address already in use")), "port_in_use", "its port is in use", UPDATE),
    "GPU memory": (
        Fault([exited(1)], trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.") + "RuntimeError: Engine core initialization failed.\n"),
        "gpu_memory", "the memory of the GPU ran out", "resources.accelerators",
    ),
    "killed": (Fault([exited(137, "loading weights")], "loading weights\n"), "out_of_memory", "exit code 137", "resources.memory"),
    "killed by a signal": (Fault([exited(-9, "loading", oom=True)]), "out_of_memory", "by signal SIGKILL", "resources.memory"),
    "cache refused": (Fault([set_up("setup failed: the folder of `cache` cannot be written (exit code 1)")], "cache: /skyserve-cache/hf_home cannot be written by the user 1000\n"), "cache_refused", "the user 1000 of its container cannot write the folder of `cache`", "write cache: {kind: pvc, claim: NAME}"),
    "disk full": (Fault([set_up("`setup` failed with exit code 1: tar: write error")], "tar: w: Cannot write: No space left on device\n"), "disk_full", "`setup` failed with exit code 1 on replica 1: the disk of its machine is full", "resources.disk_size"),
    "no GPU": (Fault([exited(1)], "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"), "gpu_missing", "finds no GPU", UPDATE),
    "no CUDA device": (Fault([exited(1)], "RuntimeError: no CUDA-capable device is detected\n"), "gpu_missing", "finds no GPU", UPDATE),
    "driver": (Fault([exited(1)], "CUDA driver version is insufficient for CUDA runtime version\n"), "gpu_driver", "does not fit the CUDA", "resources.image_id"),
    "gated model": (
        Fault([exited(1)], "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url https://huggingface.co/m\n"),
        "model_gated", "the token is missing, or has no access", f"{UPDATE} --secret HF_TOKEN",
    ),
    "no such model": (
        Fault([exited(1)], "OSError: meta/lama is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'\n"),
        "model_missing", "not found on Hugging Face", "correct the model's name",
    ),
    "exit code 0": (Fault([exited(0, "started")], "started\n"), "not_in_foreground", "must run for as long as the replica is to serve", "`exec`"),
    "server in the background": (Fault([exited(0, left=["python3"])]), "not_in_foreground", "it left python3 in the background", "`exec`"),
    "wrong arguments": (Fault([exited(2)], "vllm: error: unrecognized arguments: --tp 2\n"), "wrong_arguments", "unrecognized arguments: --tp 2", "correct the command in `run`"),
    "unknown end": (Fault([exited(3, "no weights in /models")], "no weights in /models\n"), "program_ended", "`run` ended with exit code 3 on replica 1; it printed last: no weights", "serve logs chat 1"),
    "setup": (Fault([set_up("`setup` failed with exit code 1: E: Unable to locate package")]), "program_ended", "`setup` failed with exit code 1", "serve logs chat 1"),
    "image": (Fault([set_up("step 'image' failed: pull access denied for private/model")]), "image_pull", "could not pull its container image", "resources.image_id"),
    "image in a cluster": (Fault([set_up("ImagePullBackOff: Back-off pulling image x/y:1")]), "image_pull", "could not pull its container image", UPDATE),
    "start too slow": (
        Fault([too_slow(status(503))], "loading shard 3 of 12\n"), "start_too_slow",
        "replica 1 was not ready within 300 s of starting `run`; it printed last: loading shard 3 of 12",
        "serve update chat FILE --set readiness_probe.initial_delay_seconds=600",
    ),
    "start too slow, nothing listens": (
        Fault([too_slow(REFUSED)], "downloading shard 3 of 12\n"),
        "not_listening", "listened on port 8080 within 300 s of starting `run`", "--set readiness_probe.initial_delay_seconds=600",
    ),
    "set up too slowly": (Fault([replace(too_slow("x"), message="not set up within 1800 s")], "pip install x\n"), "start_too_slow", "longer than 1800 s; it printed last: pip install x", "serve logs chat 1"),
    "no capacity": (
        Fault([refused(FailureKind.CAPACITY, "InsufficientInstanceCapacity")], stored={"notes": "1 more spot wanted, but every zone refused when last asked"}),
        "no_capacity", "no zone has spot capacity", "serve plan FILE",
    ),
    "no capacity, by the note": (noted(notes=f"1 more wanted, but {FULL}"), "no_capacity", "no zone has capacity", "serve plan FILE"),
    "quota": (Fault([refused(FailureKind.QUOTA, "quota L-3819A6DF")]), "quota", "a quota of the account is used up", "serve catalog discover"),
    "credentials": (Fault([refused(FailureKind.AUTH, "AWS does not allow ec2:RunInstances")]), "credentials", "aws refuses the controller's credentials", "serve check"),
    "refused": (Fault([refused(FailureKind.REFUSED, "not sold there")]), "refused", "refuses the launch: not sold there", "serve plan FILE"),
    "budget": (noted(notes=over_budget(0.1)), "budget", "1 replica is not launched: the budget (replica_policy.max_usd_hour) leaves too little", "replica_policy.max_usd_hour=USD"),
    "budget of the home": (noted(notes=over_budget(None)), "budget", "(controller.max_usd_hour) leaves too little", "config.yaml"),
    "quota of a team": (noted(notes="2 replicas are not launched for the quota of the team red (max_gpus, 4): 4 in use"), "budget", "the quota of the team red (max_gpus) is used up", "serve teams"),
    "no offer": (noted(notes="no offer fits version 1"), "no_offer", "no offer fits", "serve plan FILE"),
    "given up, an older one serves": (
        Fault([ready(1)], stored={**GIVEN_UP, "notes": ""}), "version_given_up", "version 2 was given up, and version 1 serves", UPDATE,
    ),
    "given up, for its module": (
        Fault([ready(1), exited(1, "ModuleNotFoundError: No module named 'flask'", 2, version=2)], stored=GIVEN_UP),
        "module_missing", "the Python module flask is not installed", UPDATE,
    ),
    "given up, refused everywhere": (
        noted(notes="version 1 has failed: every machine on offer was refused; update the service", rollout={"failed": [1], "refused": [1]}),
        "version_given_up", "version 1 was given up, and nothing serves: every machine on offer was refused", "serve plan FILE",
    ),
    "held back": (
        noted(ready(), notes=f"this controller may be cut off: {HELD_MANY}; it terminates no replica for that"),
        "held_back", "it may be cut off: most replicas stopped responding", "serve controller status",
    ),
    "controller error": (noted(ready(), notes="its last turn failed (KeyError), and its replicas are left as they are"), "controller_error", "could not decide about the service (KeyError)", "serve logs --controller"),
    "load balancer not synced": (Fault([ready()], agent=AgentView(True, False, 0, 0)), "load_balancer", "does not have the newest table", "--load-balancer"),
    "load balancer dead": (Fault([ready()], agent=AgentView(False, False, 0, 0)), "load_balancer", "does not run", "--load-balancer"),
    "regional load balancer": (Fault([ready()], regional=RegionalView(True, trouble="its port 8000 is in use")), "load_balancer", "load balancer 9 does not serve as it should: its port 8000 is in use", "serve logs chat 9 --load-balancer"),
    "endpoint unreachable": (Fault([ready()], endpoint_trouble="Connection refused"), "endpoint_unreachable", "http://127.0.0.1:30001 takes no connection from here: Connection refused", "serve logs chat --load-balancer"),
    "broken": (Fault([ready()], unreadable="version 1 has no valid spec"), "broken", "what is stored of the service cannot be read: version 1 has no valid spec", UPDATE),
    "asleep": (Fault(stored={"wanted": 0, "target": 0}), "asleep", "scaled to zero, and the first request wakes it", "curl http://127.0.0.1:30001/v1/models"),
    "going": (Fault([ready()], stored={"down": True}), "shutting_down", "the service is being removed", "serve down chat"),
    "updating": (Fault([ready(1), starting(2, version=2)], stored={"version": 2}), "updating", "0 of 1 replicas of version 2 are ready, and version 1 serves", "serve status --watch chat"),
    "the next version fails": (
        Fault([ready(1), lived(exited(1, "", 2, version=2), Preempted(2), at=400.0), starting(3, version=2)], trace("ModuleNotFoundError: No module named 'flask'"), stored={"version": 2}),
        "module_missing", "the Python module flask is not installed", UPDATE,
    ),
    "the next version has another path": (
        Fault([ready(1), starting(2, version=2)], probes={2: failed(status(404))}, stored={"version": 2}),
        "probe_path", "the readiness probe of replica 2 gets 404", "readiness_probe.path",
    ),
    "starting": (Fault([starting(at=NOW - 20.0)], "loading\n", {1: failed(REFUSED)}), "starting", "0 of 1 replicas are ready; replica 1 has been STARTING for 10s", "serve logs chat 1 -f"),
    "queue": (Fault([ready()], load=Load(in_flight=8, queued=37)), "overloaded", "37 requests in the queue (clients get 429 or 503", "--set replica_policy.max_replicas=2"),
    "errors": (Fault([ready()], requests=(200, 50)), "overloaded", "50 of the last 200 requests got an error", "serve test chat"),
    "crashes": (
        crashed(lived(exited(3, "no weights"), Preempted(1), at=400.0), ready(2)),
        "crashes", "version 1 crashes: 4 lives in a row shorter than 60 s", "serve logs chat --previous",
    ),
    "crashes for memory": (
        crashed(lived(exited(137, "loading"), Preempted(1), at=400.0), ready(2), log="loading\n"),
        "out_of_memory", "exit code 137", "resources.memory",
    ),
    "given up for crashes": (
        noted(notes=f"version 1 has failed: {CRASH_NOTE}; update the service", rollout={"failed": [1]}),
        "version_given_up", "version 1 was given up, and nothing serves: 4 lives in a row shorter than 60 s", UPDATE,
    ),
    "preempted": (
        Fault([lived(ready(), PreemptionNotice(1, 960.0), Preempted(1), at=950.0)], stored={"notes": ""}, asked=1),
        "preempted", "replica 1 in aws/us-east-1/us-east-1a was preempted", "serve status --watch chat",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_the_cause_is_in_the_first_line_and_its_cure_in_the_last(name: str) -> None:
    fault, cause, said, cure = FAULTS[name]
    found = fault.explained()
    lines = found.lines("chat")
    assert (found.cause, said in lines[0], cure in lines[-1]) == (cause, True, True), lines
    assert lines[-1].startswith("next: ")
    assert 2 <= len(lines) <= MOST_LINES
    assert all(len(line) <= LINE_CHARS + len("chat: ") for line in lines), lines
    assert json.loads(json.dumps(found.view())).keys() == {"cause", "line", "story", "next"}


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 25
    assert len({cause for _, cause, _, _ in FAULTS.values()}) >= 25


def test_a_service_that_is_well_has_one_line() -> None:
    fault = Fault([ready()], events=[("ProbePassed", "READY", "")])
    assert fault.explained().lines("chat") == [
        "chat: the service is well: 1 of 1 replica ready, version 1 serves; last: replica 1 probe passed -> READY"
    ]
    assert fault.explained().cause == WELL
    (line,) = replace(fault, asked=1).explained().lines("chat/1")
    assert line.startswith("chat/1: replica 1 is well: READY for 13m 20s in aws/us-east-1/us-east-1a; last: ")


def test_one_replica_of_a_service_that_is_well() -> None:
    slow = Fault([ready(1), starting(2)], probes={2: failed(status(404))}, asked=2)
    assert slow.explained().cause == "probe_path"
    gone = lived(exited(1), Preempted(1), at=400.0)
    assert Fault([gone, ready(2)], asked=1).explained().cause == "program_ended"
    replaced = replace(ready(1), state=gone.state, ended_at=500.0, end_reason=EndReason.SCALED_DOWN)
    found = Fault([replaced, ready(2)], asked=1).explained()
    assert (found.cause, "ended on purpose (SCALED_DOWN)" in found.line) == ("replica", True)


def test_a_later_replica_that_got_further_has_the_cause() -> None:
    gone = lived(exited(1), Preempted(1), at=400.0)
    log = "OSError: [Errno 98] Address already in use\n"
    assert Fault([gone, starting(2)], probes={2: failed(status(404))}).explained().cause == "probe_path"
    assert Fault([gone, starting(2)], log, {2: failed(REFUSED)}).explained().cause == "port_in_use"


def test_what_was_overcome_is_no_cause() -> None:
    gone = lived(exited(1), Preempted(1), at=400.0)
    assert Fault([gone, ready(2)], "ModuleNotFoundError: No module named 'x'\n").explained().cause == WELL


def test_a_harmless_line_of_a_program_that_runs_is_no_cause() -> None:
    log = "ModuleNotFoundError: No module named 'flash_attn'\nusing the fallback\nloading\n"
    assert probed(REFUSED, log=log).explained().cause == "not_listening"
    assert probed(REFUSED, log=log, at=NOW - 20.0).explained().cause == "starting"


# --- what may be printed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("using token hf_abcdefghijklmnop", "abcdefghijklmnop"),
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ('{"api_key": "my key"}', "my key"),
        ("OPENAI_API_KEY=sk-proj-abcdefgh", "abcdefgh"),
        ("vllm serve m --api-key swordfish", "swordfish"),
        ("postgres://user:swordfish@db/x", "swordfish"),
        ("GET /models?sig=swordfish&x=1", "swordfish"),
        ("AWS_SECRET_ACCESS_KEY='a b c'", "a b c"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "c2ln"),
        ("key 0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
    ],
)  # fmt: skip
def test_secrets_are_not_printed(line: str, secret: str) -> None:
    assert secret not in quoted(line)
    assert HIDDEN in quoted(line)
    fault = Fault([exited(1, line)], line + "\n")
    assert all(secret not in text for text in fault.explained().lines("chat"))


@pytest.mark.parametrize(
    "line",
    ["max_tokens=4096 tokenizer=auto", "loading /root/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B-Instruct"],
)  # fmt: skip
def test_what_is_no_secret_is_printed(line: str) -> None:
    assert quoted(line) == line


def test_control_characters_are_removed_and_lines_cut() -> None:
    assert cleaned(b"\x1b[31mred\x1b[0m\x07\r50%\r100%\n\n\x1b]0;title\x07end\n") == "red\n50%\n100%\nend"
    assert quoted("a\x1b[2Jb\x00c\nd") == "ab c d"
    assert len(quoted("x " * 300)) == LINE_CHARS
    assert len(cleaned(b"x" * (2 * TAIL_BYTES))) == TAIL_BYTES


# --- the words ----------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"serve [a-z][^;(]*")
#: Words that a reader may look up; each is in the glossary.
TERMS = (
    "service", "service file", "replica", "instance", "machine", "target", "endpoint", "controller", "load balancer agent",
    "offer", "preempt", "probe", "queue", "table", "version", "give up a version", "loaded", "budget", "quota", "cause",
    "spec", "config.yaml", "replica port", "life", "in trial", "start deadline",
)  # fmt: skip


def glossary() -> dict[str, list[str]]:
    """The words, and the other words of the same thing."""
    rows = re.findall(r"^\| ([^|\n]+) \|([^|\n]*)\|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    return {word.strip(): [one.strip() for one in also.split(",") if one.strip()] for word, also in rows[1:]}


def own_words() -> list[str]:
    """The sentences and next steps of all faults, without commands, names of keys and what a program printed."""
    found = []
    for fault, _, _, _ in FAULTS.values():
        one = replace(fault, log=fault.log and "x\n" + fault.log).explained()
        text = COMMAND.sub("", f"{one.line.partition(': ')[0]}. {one.next}")
        found.append(re.sub(r"`[^`]*`|\b\w+[._]\w[\w.]*|\$\w+", "", text))
    return found


def test_terms_are_those_of_the_glossary() -> None:
    known = glossary()
    assert set(TERMS) <= set(known)
    for word, others in known.items():
        for other in others:
            hits = [
                text for text in own_words() if re.search(rf"(?<![\w-]){re.escape(other)}(?![\w-])", text)
            ]
            assert not hits, f"{other!r} where the glossary has {word!r}: {hits}"


def test_commands_are_those_of_the_program() -> None:
    """Each names a verb that there is, and options that it has."""
    import typer

    for name, (fault, _, _, _) in FAULTS.items():
        for command in COMMAND.findall(fault.explained().next):
            verb, *rest = shlex.split(command)[1:]
            assert verb in VERBS, (name, command)
            program = typer.main.get_command(build(verb))
            own = program.get_command(None, verb) if hasattr(program, "get_command") else None  # type: ignore[arg-type]
            assert own is not None
            known = {
                option for parameter in own.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            assert {word for word in rest if word.startswith("-")} <= known, (name, command)
