"""The engine behind a port: OpenAI's API and Anthropic's over HTTP/1.1, with vLLM's metrics and helpers.

    POST /v1/chat/completions  /v1/completions  /v1/responses  /v1/messages  /tokenize  /detokenize
    GET  /v1/models  /v1/models/NAME  /health  /ping  /version  /metrics
    POST /v1/load_lora_adapter  /v1/unload_lora_adapter

A client that leaves cancels its handler (also while its request is still pending or is not streamed), and the
`finally` of the handler frees the request's blocks. SIGTERM: /health says 503, no new connections, what runs may
finish within `grace_s`, then it is dropped.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from lb.config.cors import Cors
from skyserve_cli.engine import api
from skyserve_cli.engine.api import Generation, Kind
from skyserve_cli.engine.cors import allow, cors_for
from skyserve_cli.engine.errors import ApiError, BadRequest, ModelNotFound, error_body
from skyserve_cli.engine.messages import MessageReply
from skyserve_cli.engine.metrics import Telemetry
from skyserve_cli.engine.model import EngineModel, RequestRefused, TokenOutput
from skyserve_cli.engine.profiles import Profile, profile_named
from skyserve_cli.engine.replies import Reply, ReplyTranscript
from skyserve_cli.engine.responses import ResponseReply
from skyserve_cli.engine.runner import EngineRunner, Mailbox
from skyserve_cli.engine.style import AS_GENERATED, Style
from skyserve_cli.engine.text import Language, decode

if TYPE_CHECKING:
    from skyserve_cli.engine.cache_events import CachePublisher

MAX_BODY_BYTES = 32 * 2**20
_MAX_REQUEST_ID = 256
_SERVER: web.AppKey[_Server] = web.AppKey("server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AnyReply = Reply | ResponseReply | MessageReply


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine. Durations of the profile are divided by `speed`; replicas of one model share `seed`."""

    profile: Profile
    model: str
    speed: float = 1.0
    seed: int = 0
    mean_output_tokens: float = 200.0
    max_body_bytes: int = MAX_BODY_BYTES
    cors: Cors | None = None  # which web pages may call
    style: Style = AS_GENERATED
    # What a deterministic engine draws from outside: ids that differ between replicas, and the clocks.
    id_prefix: str = field(default_factory=lambda: secrets.token_hex(4))
    clock_s: Callable[[], float] = time.monotonic  # noqa: TID251
    unix_time_s: Callable[[], float] = time.time  # noqa: TID251


def serve(
    profile: str,
    host: str,
    port: int,
    *,
    model: str | None = None,
    speed: float = 1.0,
    seed: int = 0,
    mean_output_tokens: float = 200.0,
    cold_start_s: float = 0.0,
    cors_origins: Sequence[str] = (),
    style: Style = AS_GENERATED,
    grace_s: float = 5.0,
    cache_events: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT. Port 0 takes a free one; the address is said on stderr.

    `model` is the name clients request (default: the profile's); `cold_start_s` passes, divided by `speed`, before
    the port opens; pages of `cors_origins` may call; with `cache_events` the changes of its cache are published. Raises UnknownProfile, WrongOrigin, ValueError for a speed that is
    not positive, OSError if the port is taken.
    """
    chosen = profile_named(profile)
    settings = Settings(
        chosen,
        model or chosen.model,
        speed,
        seed,
        mean_output_tokens,
        cors=cors_for(cors_origins),
        style=style,
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as loop:
        loop.run(_serve(settings, host, port, cold_start_s, grace_s, cache_events))


def create_runner(settings: Settings, *, grace_s: float = 5.0) -> web.AppRunner:
    """Return the engine, ready to be set up and given a site: the same one `serve` runs, for a loop that exists."""
    server = _Server(settings)
    server.app[_SERVER] = server
    return web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=grace_s)


def publish_cache_events(runner: web.AppRunner, host: str, port: int) -> None:
    """Publish the changes of the cache beside this port, until the engine is cleaned up. Raises OSError if a port is in use."""
    runner.app[_SERVER].publish_cache_events(host, port)


async def _serve(
    settings: Settings, host: str, port: int, cold_start_s: float, grace_s: float, cache_events: bool
) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    runner = create_runner(settings, grace_s=grace_s)
    await runner.setup()
    try:
        if cold_start_s > 0 and await _is_set_within(stop, cold_start_s / settings.speed):
            return
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        bound = runner.addresses[0][1]
        if cache_events:
            publish_cache_events(runner, host, bound)
        print(
            f"engine {settings.profile.name} serves {settings.model} on http://{host}:{bound} "
            f"at speed {settings.speed:g}",
            file=sys.stderr,
            flush=True,
        )
        await stop.wait()
    finally:
        await runner.cleanup()


async def _is_set_within(stop: asyncio.Event, delay_s: float) -> bool:
    try:
        await asyncio.wait_for(stop.wait(), delay_s)
    except TimeoutError:
        return False
    return True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # optional: the standard loop serves too, with more CPU per token
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Server:
    """The routes of an engine, its model and its loop."""

    def __init__(self, settings: Settings) -> None:
        self._draining = False
        self._settings = settings
        self._model = EngineModel(settings.profile, Language(settings.seed, settings.mean_output_tokens))
        self._adapters = LoadedAdapters(settings.model)
        self._telemetry = Telemetry(self._model, settings.model)
        self._runner = EngineRunner(self._model, self._telemetry, settings.speed, settings.clock_s)
        self._started_at = int(settings.unix_time_s())
        self._calls = 0
        self._publisher: CachePublisher | None = None
        self.app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[_errors_as_json])
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/v1/responses", self._responses),
                web.post("/v1/messages", self._messages),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._one_model),
                web.post("/v1/load_lora_adapter", self._load_adapter),
                web.post("/v1/unload_lora_adapter", self._unload_adapter),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
            ]
        )
        if settings.cors is not None:
            allow(self.app, settings.cors)
        self.app.on_response_prepare.append(_echo_request_id)
        self.app.on_startup.append(self._start)
        self.app.on_shutdown.append(self._drain)
        self.app.on_cleanup.append(self._stop)

    async def _start(self, _: web.Application) -> None:
        self._runner.start()

    async def _drain(self, _: web.Application) -> None:
        self._draining = True

    async def _stop(self, _: web.Application) -> None:
        await self._runner.stop()
        if self._publisher is not None:
            self._publisher.close()

    def publish_cache_events(self, host: str, port: int) -> None:
        from skyserve_cli.engine.cache_events import CachePublisher  # few engines need ZeroMQ

        # As the names of two processes' blocks in an engine whose hashes have a seed, these have nothing in common.
        first_name = int.from_bytes(self._settings.id_prefix.encode()[-4:], "big") << 28
        publisher = self._publisher = CachePublisher(self._model.cache, host, port, first_name)
        self._runner.on_iteration = lambda: publisher.publish(self._settings.unix_time_s())

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.CHAT)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.COMPLETION)

    async def _responses(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.RESPONSE)

    async def _messages(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.MESSAGE)

    async def _generate(self, http: web.Request, kind: Kind) -> web.StreamResponse:
        body = self._settings.style.read(api.parse_json(await http.read()))
        asked = api.parse_generation(body, kind, self._adapters.served(body), self._model.max_model_len)
        self._calls += 1
        call_id = f"{self._settings.id_prefix}-{self._calls:x}"
        reply = self._reply(asked, body, _request_id(http) or call_id)
        try:
            mailbox = self._runner.submit(asked.requests(call_id))
        except RequestRefused as refused:
            raise BadRequest(str(refused)) from refused
        try:
            if asked.stream:
                return await self._stream(http, reply, mailbox)
            while not _finished(reply):
                self._feed(reply, await mailbox.take(), mailbox)
            return _json(reply.whole())
        finally:
            self._runner.close(mailbox)

    def _reply(self, asked: Generation, body: Mapping[str, Any], id_suffix: str) -> AnyReply:
        created = int(self._settings.unix_time_s())
        if asked.kind is Kind.RESPONSE:
            return ResponseReply(id_suffix, created, asked, body)
        if asked.kind is Kind.MESSAGE:
            return MessageReply(id_suffix, asked)
        return Reply(
            id=f"{'chatcmpl' if asked.kind is Kind.CHAT else 'cmpl'}-{id_suffix}",
            created=created,
            generation=asked,
            transcripts=tuple(ReplyTranscript(asked, self._settings.style) for _ in range(asked.choices)),
        )

    async def _stream(self, http: web.Request, reply: AnyReply, mailbox: Mailbox) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        if opening := reply.opening():
            await response.write(opening)
        started: set[int] = set()
        try:
            while not _finished(reply):
                events = []
                for index in self._feed(reply, await mailbox.take(), mailbox):
                    if index not in started:
                        started.add(index)
                        events.append(reply.first_chunk(index))
                    events.append(reply.chunk(index, reply.transcripts[index].take()))
                if _finished(reply):
                    events.append(reply.last_chunks())
                if payload := b"".join(events):
                    await response.write(payload)
        except ApiError as error:  # the status line is gone: the error travels as an event
            await response.write(reply.failure(error))
        await response.write_eof()
        return response

    def _feed(self, reply: AnyReply, outputs: list[TokenOutput], mailbox: Mailbox) -> list[int]:
        """Hand tokens to their transcripts; returns the choices that got some, in order of arrival."""
        touched: dict[int, None] = {}
        for output in outputs:
            index = mailbox.ids.index(output.request_id)
            transcript = reply.transcripts[index]
            if transcript.finish is not None:
                continue
            if transcript.feed(output):
                self._runner.finish_early(output.request_id)
            touched[index] = None
        return list(touched)

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card(), *self._adapters.cards(self._card())]})

    async def _one_model(self, http: web.Request) -> web.Response:
        asked = http.match_info["name"]
        for card in (self._card(), *self._adapters.cards(self._card())):
            if card["id"] == asked:
                return _json(card)
        raise ModelNotFound(asked, self._settings.model)

    async def _load_adapter(self, http: web.Request) -> web.Response:
        return web.Response(text=self._adapters.load(api.parse_json(await http.read())))

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        return web.Response(text=self._adapters.unload(api.parse_json(await http.read())))

    def _card(self) -> dict[str, object]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "skyserve",
            "root": self._settings.profile.model,
            "parent": None,
            "max_model_len": self._model.max_model_len,
        }

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = self._settings.style.read(api.parse_json(await http.read()))
        ids = api.parse_tokenize(body, self._settings.model)
        strings = [decode((token,)) for token in ids] if body.get("return_token_strs") is True else None
        return _json(
            {
                "count": len(ids),
                "max_model_len": self._model.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def _detokenize(self, http: web.Request) -> web.Response:
        return _json(
            {"prompt": api.parse_detokenize(api.parse_json(await http.read()), self._settings.model)}
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._draining or not self._runner.alive else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": "skyserve-engine", "profile": self._settings.profile.name})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._telemetry.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _finished(reply: AnyReply) -> bool:
    return all(transcript.finish is not None for transcript in reply.transcripts)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _request_id(http: web.Request) -> str | None:
    asked = http.headers.get("X-Request-Id")
    # Bytes that are not UTF-8 come as surrogates, which could not be sent back.
    return asked if asked and len(asked) <= _MAX_REQUEST_ID and asked.isprintable() else None


async def _echo_request_id(http: web.Request, response: web.StreamResponse) -> None:
    if asked := _request_id(http):
        response.headers["X-Request-Id"] = asked


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every refusal in OpenAI's shape, the framework's own (unknown path, body too large) too."""
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error.body(), error.status)
    except web.RequestPayloadError:
        return _json(error_body("the body is not well-formed: broken encoding", "invalid_request_error"), 400)
    except web.HTTPException as error:
        message = f"{error.status} {error.reason}: {request.method} {request.path}"
        return _json(error_body(message, "invalid_request_error"), error.status)


class LoadedAdapters:
    """The adapters by name, and where each is from."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._paths: dict[str, str] = {}

    def load(self, body: Mapping[str, Any]) -> str:
        """Load what the body names; return the response. Raises BadRequest."""
        name, path = (body.get(field) for field in ("lora_name", "lora_path"))
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._paths or name == self._model:
            raise BadRequest(f"The lora adapter '{name}' has already been loaded.")
        self._paths[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: Mapping[str, Any]) -> str:
        """Unload what the body names; return the response. Raises BadRequest or ModelNotFound."""
        name = body.get("lora_name")
        if not isinstance(name, str) or not name:
            raise BadRequest("'lora_name' must be provided.")
        if self._paths.pop(name, None) is None:
            raise ModelNotFound(name, self._model)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def served(self, body: Mapping[str, Any]) -> str:
        """Return the model or adapter that serves the request of this body."""
        asked = body.get("model")
        return asked if isinstance(asked, str) and asked in self._paths else self._model

    def cards(self, card: Mapping[str, object]) -> list[dict[str, object]]:
        """Return the entries of adapters in a list of models, whose entry for the model is `card`."""
        return [
            {**card, "id": name, "root": path, "parent": self._model} for name, path in self._paths.items()
        ]
