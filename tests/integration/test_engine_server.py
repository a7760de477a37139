"""The engine over real sockets: OpenAI's own client, raw HTTP, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from openai import BadRequestError, NotFoundError

from skyserve_cli.engine.profiles import L4_8B, assumed
from skyserve_cli.engine.text import EOS
from tests.integration.engine_harness import USER, Engine, serving

ONE_SLOT = replace(L4_8B, max_num_seqs=assumed(1, "sequences", "test"))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with serving() as one:
        yield one


async def eventually(true: Callable[[], Awaitable[bool]], turns: int = 500) -> None:
    """Poll with a bound: the test defines the condition, not the time."""
    for _ in range(turns):
        if await true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not become true")


# OpenAI's client


async def test_openai_chat(engine: Engine) -> None:
    answer = await engine.openai.chat.completions.create(
        model="llama", messages=[USER], max_completion_tokens=8
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_openai_stream_says_what_the_whole_answer_says(engine: Engine) -> None:
    whole = await engine.openai.chat.completions.create(model="llama", messages=[USER])
    stream = await engine.openai.chat.completions.create(
        model="llama", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    text, reasons, usages = "", [], []
    async for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert whole.usage is not None
    assert [usage.completion_tokens for usage in usages] == [whole.usage.completion_tokens]


async def test_openai_completions_and_models(engine: Engine) -> None:
    answer = await engine.openai.completions.create(model="llama", prompt="Once upon a time", max_tokens=5)
    assert answer.choices[0].finish_reason in ("length", "stop")
    models = [model async for model in engine.openai.models.list()]
    assert [model.id for model in models] == ["llama"]


async def test_an_adapter_is_served_while_it_is_loaded(engine: Engine) -> None:
    async def change(verb: str, **body: str) -> int:
        async with engine.http.post(f"{engine.url}/v1/{verb}_lora_adapter", json=body) as response:
            return response.status

    assert await change("load", lora_name="sql") == 400
    assert await change("load", lora_name="sql", lora_path="/adapters/sql") == 200
    assert await change("load", lora_name="sql", lora_path="/adapters/sql") == 400
    models = [model async for model in engine.openai.models.list()]
    assert [(model.id, model.to_dict()["parent"]) for model in models] == [("llama", None), ("sql", "llama")]
    answer = await engine.openai.chat.completions.create(model="sql", messages=[USER], max_tokens=2)
    assert answer.model == "sql"
    assert await change("unload", lora_name="sql") == 200
    assert await change("unload", lora_name="sql") == 404


async def test_openai_errors(engine: Engine) -> None:
    with pytest.raises(NotFoundError, match="'gpt'") as missing:
        await engine.openai.chat.completions.create(model="gpt", messages=[USER])
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError, match="maximum context length") as too_long:
        await engine.openai.completions.create(model="llama", prompt=[5] * 20_000)
    assert too_long.value.code == "context_length_exceeded"


# The shapes


async def test_the_same_prompt_again_is_found_in_the_cache(engine: Engine) -> None:
    body = {"prompt": "word " * 200, "max_tokens": 1}
    _, cold = await engine.post("/v1/completions", body)
    _, warm = await engine.post("/v1/completions", body)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (warm["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert await engine.metric("vllm:prefix_cache_hits_total") == cached
    assert await engine.metric("vllm:prefix_cache_queries_total") == 2 * cold["usage"]["prompt_tokens"]
    assert await engine.metric("vllm:time_to_first_token_seconds_count") == 2
    assert await engine.metric("vllm:generation_tokens_total") == 2


async def test_token_ids_come_in_vllms_shape(engine: Engine) -> None:
    chat = {"messages": [USER], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    _, whole = await engine.post("/v1/chat/completions", chat)
    chunks = await engine.events("/v1/chat/completions", chat)
    _, asked = await engine.post("/tokenize", {"messages": [USER]})
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == asked["tokens"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    deltas = [token for chunk in chunks[1:] for token in chunk["choices"][0]["token_ids"]]
    assert deltas == whole["choices"][0]["token_ids"]
    assert len(deltas) == 6

    completion = {"prompt": asked["tokens"]} | chat
    del completion["messages"]
    _, whole = await engine.post("/v1/completions", completion)
    chunks = await engine.events("/v1/completions", completion)
    assert (
        whole["choices"][0]["prompt_token_ids"]
        == chunks[0]["choices"][0]["prompt_token_ids"]
        == asked["tokens"]
    )
    assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == deltas
    assert whole["choices"][0]["token_ids"] == deltas


@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_a_broken_stream_is_continued_exactly_by_another_engine(engine: Engine, cut: int) -> None:
    chat = {"messages": [USER], "max_tokens": 24, "return_token_ids": True, "min_tokens": 12, "seed": 3}
    _, whole = await engine.post("/v1/chat/completions", chat)
    ids, text = whole["choices"][0]["token_ids"], whole["choices"][0]["message"]["content"]
    _, said = await engine.post("/detokenize", {"tokens": ids[:cut]})
    limits = {"max_tokens": 24 - cut, "min_tokens": 12 - cut, "seed": 3}
    async with serving() as other:
        _, from_ids = await other.post(
            "/v1/completions",
            {"prompt": whole["prompt_token_ids"] + ids[:cut], "return_token_ids": True} | limits,
        )
        half = [USER, {"role": "assistant", "content": said["prompt"]}]
        flags = {"continue_final_message": True, "add_generation_prompt": False}
        _, from_text = await other.post("/v1/chat/completions", {"messages": half} | flags | limits)
    assert ids[:cut] + from_ids["choices"][0]["token_ids"] == ids
    assert said["prompt"] + from_ids["choices"][0]["text"] == text
    assert said["prompt"] + from_text["choices"][0]["message"]["content"] == text
    ends = {answer["choices"][0]["finish_reason"] for answer in (whole, from_ids, from_text)}
    assert len(ends) == 1


async def test_usage_in_every_chunk_if_asked(engine: Engine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await engine.events(
        "/v1/chat/completions",
        {"messages": [USER], "max_tokens": 5, "ignore_eos": True, "stream_options": options},
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert chunks[-1]["choices"] == []


async def test_a_stream_without_options_has_no_usage(engine: Engine) -> None:
    chunks = await engine.events("/v1/chat/completions", {"messages": [USER], "max_tokens": 3})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_several_choices_and_prompts(engine: Engine) -> None:
    body = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 4, "ignore_eos": True, "echo": True}
    _, whole = await engine.post("/v1/completions", body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [text[:3] for text in texts] == ["One", "One", "Two", "Two"]
    assert len(set(texts)) == 4
    assert whole["usage"]["completion_tokens"] == 16
    streamed = dict.fromkeys(range(4), "")
    for chunk in await engine.events("/v1/completions", body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts


async def test_a_stop_string_ends_the_answer_and_frees_the_engine(engine: Engine) -> None:
    asked = {"messages": [USER], "max_tokens": 15_000, "ignore_eos": True}
    _, probe = await engine.post("/v1/chat/completions", asked | {"max_tokens": 10})
    text = probe["choices"][0]["message"]["content"]
    stop = text[12:16]
    _, whole = await engine.post("/v1/chat/completions", asked | {"stop": [stop]})
    assert whole["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", stop)
    assert await engine.metric("vllm:num_requests_running") == 0
    chunks = await engine.events("/v1/chat/completions", asked | {"stop": [stop]})
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == text[: text.index(stop)]


async def test_answers_end_by_themselves(engine: Engine) -> None:
    body = {"prompt": "Hello", "max_tokens": 2_000, "return_token_ids": True}
    _, whole = await engine.post("/v1/completions", body)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["token_ids"][-1] == EOS
    assert "<|" not in whole["choices"][0]["text"]


async def test_tokenize_and_back(engine: Engine) -> None:
    text = "Grüße, 世界! <|im_end|> done"
    _, answer = await engine.post("/tokenize", {"prompt": text, "return_token_strs": True, "model": "llama"})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert await engine.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})


# HTTP


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        pytest.param("POST", "/v1/chat/completions", b"{", 400, id="broken JSON"),
        pytest.param("POST", "/v1/chat/completions", b"{}", 400, id="no messages"),
        pytest.param("POST", "/v1/completions", b'{"prompt":"a","model":"b"}', 404, id="another model"),
        pytest.param("POST", "/tokenize", b"{}", 400, id="nothing to tokenize"),
        pytest.param("POST", "/detokenize", b'{"tokens":[-1]}', 400, id="no such token"),
        pytest.param("GET", "/v1/nothing", b"", 404, id="no such path"),
        pytest.param("GET", "/v1/completions", b"", 405, id="another method"),
        pytest.param("POST", "/v1/completions", b" " * 5000, 413, id="too large a body"),
    ],
)
async def test_errors_have_openais_shape(method: str, path: str, body: bytes, status: int) -> None:
    await assert_refused(method, path, body, status)


async def test_a_body_that_does_not_unpack_is_400() -> None:
    await assert_refused("POST", "/v1/completions", b"not gzip", 400, {"Content-Encoding": "gzip"})


async def assert_refused(
    method: str, path: str, body: bytes, status: int, headers: dict[str, str] | None = None
) -> None:
    async with (
        serving(max_body_bytes=4096) as engine,
        engine.http.request(method, engine.url + path, data=body, headers=headers) as response,
    ):
        assert response.status == status
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/v1/models"])
async def test_what_probes_ask(engine: Engine, path: str) -> None:
    async with engine.http.get(engine.url + path) as response:
        assert response.status == 200


async def test_a_request_id_that_is_no_text_is_not_used(engine: Engine) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: caf\xe9\r\n"
    )
    writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"X-Request-Id" not in answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_request_id_comes_back(engine: Engine, stream: bool) -> None:
    async with engine.http.post(
        engine.url + "/v1/completions",
        json={"prompt": "a", "max_tokens": 2, "stream": stream},
        headers={"X-Request-Id": "mine"},
    ) as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert '"id":"cmpl-mine"' in await response.text()


async def test_a_connection_outlives_its_streams(engine: Engine) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(5):
        writer.write(head + body)
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]" in answer
        assert b"connection: close" not in answer.lower()
    writer.close()
    await writer.wait_closed()


async def test_many_streams_at_once_all_end(engine: Engine) -> None:
    bodies = [{"prompt": f"Story {n}.", "max_tokens": 40, "ignore_eos": True} for n in range(60)]
    streams = await asyncio.gather(*(engine.events("/v1/completions", body) for body in bodies))
    texts = ["".join(chunk["choices"][0]["text"] for chunk in chunks) for chunks in streams]
    assert all(chunks[-1]["choices"][0]["finish_reason"] == "length" for chunks in streams)
    assert len(set(texts)) == 60
    assert await engine.metric("vllm:generation_tokens_total") == 60 * 40
    assert await engine.metric("vllm:num_requests_running") == 0


# Clients that leave


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_frees_its_blocks(stream: bool) -> None:
    async with serving(speed=1.0) as engine:  # 10,000 tokens would take ten minutes
        body = {"prompt": "word " * 100, "max_tokens": 10_000, "ignore_eos": True, "stream": stream}
        call = asyncio.create_task(engine.post("/v1/completions", body))

        async def is_running() -> bool:
            return await engine.metric("vllm:num_requests_running") == 1

        async def is_idle() -> bool:
            return await engine.metric("vllm:num_requests_running") == 0

        await eventually(is_running)
        assert await engine.metric("vllm:kv_cache_usage_perc") > 0
        call.cancel()
        await eventually(is_idle)
        assert await engine.metric("vllm:kv_cache_usage_perc") == 0
        assert await engine.metric("vllm:request_success_total") == 1


async def test_a_pending_client_that_leaves_is_no_longer_pending() -> None:
    async with serving(profile=ONE_SLOT, speed=1.0) as engine:
        body = {"prompt": "word " * 10, "max_tokens": 10_000, "ignore_eos": True}
        calls = [asyncio.create_task(engine.post("/v1/completions", body)) for _ in range(2)]

        async def counts(running: int, waiting: int) -> bool:
            return (
                await engine.metric("vllm:num_requests_running"),
                await engine.metric("vllm:num_requests_waiting"),
            ) == (running, waiting)

        await eventually(lambda: counts(1, 1))
        calls[1].cancel()
        await eventually(lambda: counts(1, 0))
        calls[0].cancel()
        await eventually(lambda: counts(0, 0))
