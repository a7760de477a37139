"""Drafts of service files: from commands, containers, compose files and files of SkyPilot, and the words of shell scripts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from skyserve_cli.spec import ServiceSpec, SpecError
from skyserve_cli.spec.load import load_text
from skyserve_cli.starter import fit
from skyserve_cli.starter.command import NotKnown, from_choices, from_command, split
from skyserve_cli.starter.compose import ComposeError, from_compose, service_names
from skyserve_cli.starter.container import NoContainer, gpus_of, inner_ports
from skyserve_cli.starter.draft import Draft, slug, text_of
from skyserve_cli.starter.engines import ENGINES, engine_of_image, launches
from skyserve_cli.starter.skypilot import from_skypilot
from skyserve_cli.starter.words import commands
from tests.clouds.schedules import examples
from tests.unit.starter_files import COMMANDS, COMPOSE, SKYPILOT

#: By engine: the port, the path of the probe, the accelerator, and what stands in `run`.
EXPECTED = {
    "vllm": (8005, "/health", ("L4", 2), ["exec vllm serve Qwen/Qwen2.5-7B-Instruct", "--tensor-parallel-size=2", '--served-model-name "qwen 7b" qwen', "'{\"enable_thinking\": false}'", '--api-key "$VLLM_API_KEY"']),
    "sglang": (30000, "/health", ("L4", 2), ['export HF_HOME="$HOME/models"', "exec python3 -m sglang.launch_server", "--host 0.0.0.0"]),
    "llama.cpp": (8080, "/health", ("L4", 1), ["exec llama-server", "-hf bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", "--alias 'llama three'"]),
    "tgi": (80, "/health", ("L4", 1), ["exec text-generation-launcher", "--hostname 0.0.0.0", "--port 80"]),
    "ollama": (11434, "/api/tags", ("L4", 1), ["exec ollama serve"]),
}  # fmt: skip
LOST = {
    "vllm": ["HF_TOKEN", "CUDA_VISIBLE_DEVICES", "--host localhost", "--api-key", "vllm.log"],
    "sglang": ["numactl", "cd ~/sglang", "source .venv/bin/activate", "foreground"],
    "llama.cpp": ["~/.cache/llama.cpp", "--host 127.0.0.1"],
    "tgi": ["$PWD/data", "--shm-size 1g"],
    "ollama": [],
}


def spec_of(draft: Draft) -> ServiceSpec:
    loaded = load_text(text_of(draft), needs_values=False)
    assert [str(each) for each in fit.warnings(loaded)] == []
    return loaded.spec


@pytest.mark.parametrize("engine", COMMANDS)
def test_a_command_becomes_a_file_that_serves_the_same(engine: str, tmp_path: Path) -> None:
    draft = from_command(COMMANDS[engine], tmp_path)
    port, probe, gpu, lines = EXPECTED[engine]
    spec = spec_of(draft)
    assert (spec.port, spec.probe.path) == (port, probe)
    assert (spec.resources[0].accelerator, spec.resources[0].accelerator_count) == gpu
    assert draft.engine is ENGINES[engine]
    assert [line for line in lines if line not in spec.run] == []
    (launch,) = (
        launches(spec.run)
        if engine != "ollama"
        else launches(f"export OLLAMA_HOST={dict(spec.envs)['OLLAMA_HOST']}\n{spec.run}")
    )
    assert launch.port == port
    assert [each for each in LOST[engine] if not any(each in note for note in draft.notes)] == []
    assert len(draft.notes) == len(LOST[engine])
    assert not any(secret in text_of(draft) for secret in ("hf_secret_of_mine", "sk-very-secret"))


@pytest.mark.parametrize("engine", [engine for engine in COMMANDS if engine != "ollama"])
def test_no_argument_of_a_command_is_lost(engine: str, tmp_path: Path) -> None:
    """What the engine is started with is what it was started with, but for its address, its port and its keys."""
    before = launches(
        re.sub(
            r"(?s).*?(docker run.*?)(?= --model-id| -hf)", f"{ENGINES[engine].entrypoint}", COMMANDS[engine]
        )
    )[0]
    (after,) = launches(from_command(COMMANDS[engine], tmp_path).run)
    changed = {"--host", "--hostname", "--port", "--api-key"}
    options = {name: value and value.text for name, value in before.options.items() if name not in changed}
    assert options == {
        name: value and value.text for name, value in after.options.items() if name not in changed
    }
    assert after.model == before.model


def test_secrets_and_variables_of_a_command(tmp_path: Path) -> None:
    spec = spec_of(from_command(COMMANDS["vllm"], tmp_path))
    assert spec.secrets == ("HF_TOKEN", "VLLM_API_KEY")
    assert spec.envs == (("VLLM_LOGGING_LEVEL", "DEBUG"),)
    spec = spec_of(from_command(COMMANDS["tgi"], tmp_path))
    assert spec.secrets == ("HF_TOKEN",)
    assert spec.envs == (("LOG_LEVEL", "info,text=debug"),)


def test_ollama_pulls_its_model_before_it_serves(tmp_path: Path) -> None:
    spec = spec_of(from_command(COMMANDS["ollama"], tmp_path))
    assert "ollama pull llama3.1:8b" in (spec.setup or "")
    assert dict(spec.envs) == {"OLLAMA_HOST": "0.0.0.0:11434", "OLLAMA_KEEP_ALIVE": "24h"}


def test_variables_of_the_shell_are_declared(tmp_path: Path) -> None:
    draft = from_command(
        'vllm serve "$MODEL" --port ${PORT:-8001} --hf-token $HF_TOKEN --download-dir $HOME/x $EXTRA',
        tmp_path,
    )
    assert (draft.port, draft.envs, draft.secrets) == (8001, {"MODEL": None, "EXTRA": None}, ["HF_TOKEN"])
    assert "--port ${PORT:-8001} is 8001 here" in draft.notes[0]
    assert [note.split()[0] for note in draft.notes[1:]] == ["$MODEL", "$HF_TOKEN", "$EXTRA"]


def test_a_model_that_is_a_path_is_copied_or_noted(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    draft = from_command("./llama-server -m m.gguf", tmp_path)
    assert draft.file_mounts == {"m.gguf": str(tmp_path / "m.gguf")}
    draft = from_command("vllm serve /gone/model", tmp_path)
    assert draft.notes == [
        "/gone/model is not here: copy the model to replicas with file_mounts, or download it in setup"
    ]


@pytest.mark.parametrize(
    "command",
    [
        "docker run -d -p 11434:11434 --name ollama ollama/ollama && docker exec -it ollama ollama run llama3.2",
        "ollama serve & sleep 5; ollama pull llama3.2",
        "OLLAMA_HOST=0.0.0.0 ollama run llama3.2",
    ],
)
def test_the_model_of_ollama_may_be_in_another_command(command: str, tmp_path: Path) -> None:
    draft = from_command(command, tmp_path)
    assert draft.model == "llama3.2"
    assert "ollama pull llama3.2" in (draft.setup or "")
    assert not any("ollama run" in note or "ollama pull" in note for note in draft.notes)


@pytest.mark.parametrize(
    ("command", "port", "image"),
    [
        ("vllm serve org/Model-7B", 8000, "vllm/vllm-openai:latest"),
        ("uv run vllm serve org/Model-7B --port=9000", 9000, "vllm/vllm-openai:latest"),
        ("docker run -p 80:8000 vllm/vllm-openai:v1 --model org/Model-7B", 8000, "vllm/vllm-openai:v1"),
        ("docker run -p80:8001 -e A=1 vllm/vllm-openai:v1 serve org/Model-7B --port 8001", 8001, "vllm/vllm-openai:v1"),
        ("podman run --network host docker.io/vllm/vllm-openai org/Model-7B", 8000, "docker.io/vllm/vllm-openai"),
        ("docker run lmsysorg/sglang python3 -m sglang.launch_server --model-path org/Model-7B", 30000, "lmsysorg/sglang"),
        ("docker run --entrypoint vllm my/image:1 serve org/Model-7B", 8000, "my/image:1"),
        ("PORT=3001 text-generation-launcher --model-id org/Model-7B", 3001, "ghcr.io/huggingface/text-generation-inference:latest"),
        ("llama-server -m model.gguf", 8080, "ghcr.io/ggml-org/llama.cpp:server"),
        ("docker run -d -v ollama:/root/.ollama -p 11434:11434 ollama/ollama", 11434, "ollama/ollama"),
        ("docker run --gpus all -p 8080:8080 tabbyml/tabby serve --model TabbyML/StarCoder-1B", 8080, "tabbyml/tabby"),
    ],
)  # fmt: skip
def test_ports_and_images(command: str, port: int, image: str, tmp_path: Path) -> None:
    draft = from_command(command, tmp_path)
    spec = spec_of(draft)
    assert (spec.port, draft.image) == (port, image)
    assert dict(spec.resources[0].images) == {"*": f"docker:{image}"}


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("python3 server.py", NotKnown),
        ("vllm serve org/m\u00a0--port 1", NotKnown),
        ("vllm serve org/m \x08", NotKnown),
        ("", NotKnown),
        ("docker run --rm", NoContainer),
        ("docker run -p 80:80 my/image", NoContainer),
        ("docker run my/image serve", NoContainer),
    ],
)
def test_what_is_not_known_is_an_error(command: str, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        from_command(command, tmp_path)


def test_files_of_a_volume_that_are_here_are_copied(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    command = (
        "docker run -v ./models:/models -v ./gone:/gone ghcr.io/ggml-org/llama.cpp:server -m /models/m.gguf"
    )
    draft = from_command(command, tmp_path)
    assert draft.file_mounts == {"/models": str(tmp_path / "models")}
    assert any("./gone is not here" in note for note in draft.notes)


# --- the answers to questions ---

CHOICES = [
    ("vllm", "Qwen/Qwen2.5-7B-Instruct", ("L4", 1), ()),
    ("vllm", "meta-llama/Llama-3.3-70B-Instruct", ("L40S", 4), ("HF_TOKEN",)),
    ("sglang", "Qwen/Qwen2.5-32B-Instruct", ("A100-80GB", 1), ()),
    ("tgi", "mistralai/Mistral-7B-Instruct-v0.3", ("L4", 1), ("HF_TOKEN",)),
    ("llama.cpp", "Qwen/Qwen2.5-3B-Instruct-GGUF", ("L4", 1), ()),
    ("ollama", "qwen2.5:72b", ("A100-80GB", 1), ()),
    ("vllm", "org/no-size", ("L4", 1), ()),
]


@pytest.mark.parametrize(("engine", "model", "gpu", "secrets"), CHOICES)
def test_the_gpus_follow_from_the_model(
    engine: str, model: str, gpu: tuple[str, int], secrets: tuple[str, ...]
) -> None:
    draft = from_choices(ENGINES[engine], model)
    split(draft)
    spec = spec_of(draft)
    assert (spec.resources[0].accelerator, spec.resources[0].accelerator_count) == gpu
    assert spec.secrets == secrets
    (launch,) = launches(spec.run) if engine != "ollama" else [None]
    if launch is not None and launch.engine.tensor_options:
        assert launch.count(launch.engine.tensor_options) == gpu[1]


# --- compose ---


def test_a_compose_file_with_vllm(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / ".env").write_text("MODEL=Qwen/Qwen2.5-7B-Instruct-AWQ\n")
    text = COMPOSE["vLLM beside a web page"]
    assert service_names(text) == ["vllm", "webui"]
    draft = from_compose(text, "vllm", tmp_path)
    spec = spec_of(draft)
    assert (spec.name, spec.port, spec.probe.path) == ("qwen2-5-7b-instruct-awq", 8000, "/health")
    assert (spec.probe.initial_delay_s, spec.probe.interval_s, spec.probe.timeout_s) == (2400, 30, 10)
    assert dict(spec.envs) == {"VLLM_LOGGING_LEVEL": "DEBUG", "NORWAY": "no"}
    assert spec.secrets == ("HF_TOKEN", "VLLM_API_KEY")
    assert dict(spec.resources[0].images) == {"*": "docker:vllm/vllm-openai:v0.9.2"}
    assert [(mount.path, mount.sources) for mount in spec.file_mounts] == [
        ("/templates", (str(tmp_path / "templates"),))
    ]
    assert spec.run.startswith("exec vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ")
    lost = "\n".join(draft.notes)
    assert [
        word
        for word in ("logging", "restart", "container_name", "ipc", "depends_on", "webui", "huggingface")
        if word not in lost
    ] == []


def test_a_compose_file_with_sglang(tmp_path: Path) -> None:
    draft = from_compose(COMPOSE["SGLang alone"], "sglang", tmp_path)
    spec = spec_of(draft)
    assert (spec.port, spec.probe.path, spec.secrets) == (30000, "/health_generate", ("HF_TOKEN",))
    assert spec.resources[0].accelerator_count == 2
    assert (
        "exec python3 -m sglang.launch_server \\\n  --model-path meta-llama/Llama-3.1-8B-Instruct" in spec.run
    )
    assert len(draft.notes) == 3


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("services: {a: {image: x}}", "b", "there is no service b; there are a"),
        ("services: {a: {build: .}}", "a", "a has no image"),
        ("services: {a: {image: my/x, ports: ['80:80']}}", "a", "its own command is not known"),
        ("version: 3", "a", "this is no compose file"),
        ("services: [", "a", "not valid YAML"),
        ('services: {a: {image: vllm/vllm-openai, command: "--model a\\u2028b"}}', "a", r"U\+2028"),
    ],
)
def test_compose_files_that_cannot_be_carried_over(text: str, name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ComposeError, match=reason):
        from_compose(text, name, tmp_path)


def test_variables_of_compose_without_a_value_stay_variables(tmp_path: Path) -> None:
    text = "services: {a: {image: vllm/vllm-openai, command: '--model $MODEL --hf-token ${HF_TOKEN} --seed ${SEED:-7}'}}"
    draft = from_compose(text, "a", tmp_path)
    assert (draft.envs, draft.secrets) == ({"MODEL": None}, ["HF_TOKEN"])
    assert "vllm serve $MODEL" in draft.run
    assert "--seed 7" in draft.run


def test_what_a_compose_file_says_of_resources_and_health_is_carried_over_or_listed(tmp_path: Path) -> None:
    text = """
services:
  a:
    image: ollama/ollama
    deploy:
      replicas: 2
      resources:
        limits: {memory: 64g}
        reservations: {cpus: "4", devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}
    healthcheck: {test: curl localhost, retries: 3}
"""
    draft = from_compose(text, "a", tmp_path)
    lost = [note.partition(": ")[2] for note in draft.notes if note.startswith("not carried over")]
    assert lost == [
        "deploy.replicas: 2",
        "deploy.resources.limits: {'memory': '64g'}",
        "deploy.resources.reservations.cpus: 4",
        "healthcheck: curl localhost",
    ]
    text = text.replace("curl localhost", "curl http://localhost/x").replace(
        "retries: 3", "retries: 3, start_period: 60s, interval: 5s, timeout: soon"
    )
    draft = from_compose(text, "a", tmp_path)
    assert (draft.probe, draft.probe_settings) == ("/x", {"endpoint_probe_interval_seconds": 5})
    assert [note.split(": ")[1] for note in draft.notes if "healthcheck" in note] == ["healthcheck.retries", "healthcheck.start_period", "healthcheck.timeout"]  # fmt: skip


# --- any text ---

PIECES_OF_SCRIPTS = st.sampled_from(
    ["vllm", "serve", "ollama", "run", "docker", "-e", "A=1", "-m", "sglang.launch_server", "--port", "--port=8", "8001", "$X", "${", "$(", "'",
     '"', "\\", "\n", "&&", ">", "<<EOF", "EOF", "--model", "org/Llama-3.1-70B", "/m", "env", "sh", "-c", "\x00", "é", "--gpus", "all",
     "vllm/vllm-openai", "-tp", "llama-server", "-hf", "text-generation-launcher", "#", "`", "|", "-p", "80:80", "--api-key", "-"]
)  # fmt: skip
SCRIPTS = st.one_of(st.text(max_size=60), st.lists(PIECES_OF_SCRIPTS, max_size=14).map(" ".join))


@given(SCRIPTS)
@settings(max_examples=examples(400), deadline=None)
def test_any_command_is_a_file_or_a_sentence(text: str) -> None:
    try:
        draft = from_command(text, Path("/nowhere"))
    except (NotKnown, NoContainer):
        return
    assert load_text(text_of(draft), needs_values=False).spec.run.rstrip("\n") == draft.run.rstrip("\n")


@given(SCRIPTS, st.sampled_from(["L4", "A100:8", "NoSuch", "L4:0.5"]), st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_no_script_breaks_the_warnings(run: str, gpu: str, has_ports: bool) -> None:
    loaded = load_text(
        "service: {}\nrun: x\nenvs: {X: 8001, M: '$X'}\n",
        set_overrides=[f"resources.accelerators='{gpu}'"] + ["resources.ports=8000"] * has_ports,
    )
    for warning in fit.warnings(replace(loaded, spec=replace(loaded.spec, run=run))):
        assert warning.path
        assert warning.message


TREES = st.recursive(
    st.sampled_from(["", "all", "1", "8000:80", "vllm/vllm-openai", "--model $M", "${A:-b}", "$$", "curl http://a/b", "5s"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["resources", "reservations", "devices", "count", "device_ids", "test", "interval", "source", "target", "<<", "A"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KEYS = [
    "command",
    "entrypoint",
    "environment",
    "env_file",
    "ports",
    "expose",
    "volumes",
    "deploy",
    "healthcheck",
    "gpus",
    "restart",
    "x-a",
    "other",
    "<<",
]


@given(st.dictionaries(st.sampled_from(KEYS), TREES, max_size=6), TREES)
@settings(max_examples=examples(400), deadline=None)
def test_any_compose_file_is_a_draft_or_a_sentence(service: dict[str, object], image: object) -> None:
    text = yaml.safe_dump({"services": {"a": {"image": image, **service}}})
    try:
        draft = from_compose(text, "a", Path("/nowhere"))
    except ComposeError:
        return
    assert load_text(text_of(draft), needs_values=False).spec.run


def test_long_scripts_take_time_in_proportion() -> None:
    """A script of 250 KB, the most that a service file has, is read in one go: no piece of it is looked at again and again."""
    for piece in ("<<A\n", "$(", "'a' ", "vllm serve a --b ", "a=b ", '"'):
        assert isinstance(launches(piece * (250_000 // len(piece))), list)


# --- SkyPilot ---

DROPPED = {
    "a vLLM with a policy": ["service.replica_policy.auto_restart", "resources.job_recovery"],
    "spot in any_of": ["resources.any_of[0].job_recovery", "resources.any_of[1].job_recovery"],
    "mounts and a bucket": [],
    "two nodes": [],
    "TGI with keys of a newer version": ["experimental", "hooks"],
    "ports of a dashboard": [],
    "an image of one's own": [],
}
IDLE = {
    "a vLLM with a policy": [],
    "spot in any_of": ["resources.any_of[2].infra"],
    "mounts and a bucket": ['file_mounts["/data/prompts"]', "resources.autostop", "config"],
    "two nodes": ["resources.network_tier", "resources.priority"],
    "TGI with keys of a newer version": [],
    "ports of a dashboard": [],
    "an image of one's own": [],
}


def pruned(tree: object) -> object:
    """Return the tree without the keys that have no meaning here."""
    if isinstance(tree, dict):
        foreign = ("job_recovery", "auto_restart", "experimental", "hooks")
        return {key: pruned(value) for key, value in tree.items() if key not in foreign}
    return [pruned(each) for each in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("name", SKYPILOT)
def test_a_file_of_skypilot_keeps_what_has_a_meaning_here(name: str) -> None:
    carried = from_skypilot(SKYPILOT[name], "service.yaml")
    assert [line.partition(": ")[0] for line in carried.dropped] == DROPPED[name]
    assert [line.partition(": ")[0] for line in carried.idle] == IDLE[name]
    assert yaml.safe_load(carried.text) == pruned(yaml.safe_load(SKYPILOT[name]))
    head, body = carried.text.splitlines(), SKYPILOT[name].splitlines()
    assert [line for line in body if line.lstrip().startswith("# ") and line not in head] == []
    for path in (*DROPPED[name], *IDLE[name]):
        assert any(path in line for line in head if line.startswith("#"))
    assert load_text(carried.text, needs_values=False).spec.run


PIECES = {
    "the only key": ("resources:\n  job_recovery: x\nrun: a\n", "resources:\nrun: a\n"),
    "a block behind": ("resources:\n  cpus: 2\n  job_recovery:\n    a: 1\n    b: [1,\n      2]\n\n# run\nrun: a\n", "resources:\n  cpus: 2\n\n# run\nrun: a\n"),
    "a text in lines": ("hooks: |\n  a\n\n  b\nrun: a\n", "run: a\n"),
    "the last": ("run: a\nhooks: {a: 1}", "run: a\n"),
    "in a flow, last": ("resources: {cpus: 2, job_recovery: {a: 1}}\nrun: a\n", "resources: {cpus: 2}\nrun: a\n"),
    "in a flow, first": ("resources: {job_recovery: x, cpus: 2}\nrun: a\n", "resources: {cpus: 2}\nrun: a\n"),
    "in a flow, alone": ("resources: {job_recovery: x}\nrun: a\n", "resources: {}\nrun: a\n"),
    "in a list, first": ("resources:\n  any_of:\n    - job_recovery: x\n      cpus: 2\nrun: a\n", "resources:\n  any_of:\n    - cpus: 2\nrun: a\n"),
    "in a list, alone": ("resources:\n  any_of:\n    - job_recovery: x\n    - cpus: 2\nrun: a\n", "resources:\n  any_of:\n    - {}\n    - cpus: 2\nrun: a\n"),
    "nothing": ("run: a\n", "run: a\n"),
    "line ends of Windows": ("hooks: 1\r\nrun: a\r\n", "run: a\n"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), PIECES.values(), ids=PIECES.keys())
def test_a_key_is_taken_out_of_the_text(text: str, expected: str) -> None:
    begin = "service: {}\n"
    body = from_skypilot(begin + text, "a.yaml").text.partition(begin)[2]
    assert body == expected


@pytest.mark.parametrize(
    "text",
    [
        "run: a\n",
        "service: {replicas: many}\nrun: a\n",
        "service: {replica_polisy: {}}\nrun: a\n",
        "pool: {workers: 1}\nrun: a\n",
        "a: [",
        "",
    ],
)
def test_a_file_whose_problems_are_others_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        from_skypilot(text, "a.yaml")


# --- words ---


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a b\tc", [["a", "b", "c"]]),
        ("a 'b c' \"d $X\" e\\ f", [["a", "b c", "d $X", "e f"]]),
        ("a \\\n  b # c\nd", [["a", "b"], ["d"]]),
        ("A=1 B='2 3' a; b && c || d | e & f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a > f 2>&1 < g b", [["a", "b"]]),
        ("a $(b 'c)' d) ${E:-f g}h `i j`", [["a", "$(b 'c)' d)", "${E:-f g}h", "i j"]]),
        ("cat <<EOF > x\nvllm serve\nEOF\nb", [["cat"], ["b"]]),
        ("(a b)", [["a", "b"]]),
        ("a ''", [["a", ""]]),
        ("a 'b", [["a", "b"]]),
        ('a "b', [["a", "b"]]),
        ("a $(b", [["a", "$(b"]]),
        ("a \\", [["a", ""]]),
        ("", []),
    ],
)
def test_words_of_scripts(script: str, words: list[list[str]]) -> None:
    assert [command.texts for command in commands(script) if command.words] == words


def test_small_things() -> None:
    assert [gpus_of(text) for text in ("all", "2", '"device=0,1"', "count=3")] == [None, 2, 2, 3]
    assert inner_ports(["8080:80", "127.0.0.1:8080:81/tcp", "82", "$P"]) == [80, 81, 82]
    assert [slug(name) for name in ("Qwen/Qwen2.5-7B", "/models/1B_x.gguf", "org/m-GGUF:Q4_K_M", "::")] == ["qwen2-5-7b", "b-x", "m", "service"]  # fmt: skip
    assert engine_of_image("docker.io/vllm/vllm-openai:v1@sha256:00") is ENGINES["vllm"]
    assert engine_of_image("localhost:5000/x") is None
