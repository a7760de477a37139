"""Programs that know nothing of us, against an endpoint: the official openai client, and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

FILE = """
service:
  readiness_probe: {path: /v1/models, initial_delay_seconds: 60}
  replicas: 2
resources: {infra: local, use_spot: true}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""
QUESTION: Any = [{"role": "user", "content": "What is a spot instance?"}]


@pytest.fixture
def endpoint(serve: Any, tmp_path: Path) -> str:
    file = tmp_path / "model.yaml"
    file.write_text(FILE)
    return str(serve.ok("up", file, "-y").out.splitlines()[-1])


def test_the_official_client_and_curl_work_unchanged(endpoint: str) -> None:
    import openai  # half a second, which the collection of all tests would take as well

    with openai.OpenAI(base_url=f"{endpoint}/v1", api_key="any", max_retries=0) as client:
        model = client.models.list().data[0].id
        assert client.models.retrieve(model).id == model
        whole = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=12, seed=4, extra_body={"ignore_eos": True}
        )
        text = whole.choices[0].message.content
        assert text
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12

        stream = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=12,
            seed=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = list(stream)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == text, "the seed says what is said, whichever replica says it"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12

        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="another", messages=QUESTION)

    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    answer = _curl(endpoint, model, stream=False)
    assert json.loads(answer)["choices"][0]["message"]["content"] == text
    lines = [line for line in _curl(endpoint, model, stream=True).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(piece.get("content") or "" for piece in pieces) == text


def _curl(endpoint: str, model: str, *, stream: bool) -> str:
    body = {
        "model": model,
        "messages": QUESTION,
        "max_tokens": 12,
        "seed": 4,
        "stream": stream,
        "ignore_eos": True,
    }
    command = ["curl", "-sS", "--fail", "--no-buffer", f"{endpoint}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
