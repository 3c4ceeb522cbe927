"""The HTTP side: OpenAI's routes, answered whole or as a stream, by an engine in a thread of its own."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from strataflux.client.errors import StrataFluxError
from strataflux.client.serve.answers import Answer, ChatAnswer, CompletionAnswer
from strataflux.client.serve.chat import ChatRenderer
from strataflux.client.serve.engine import Engine, Event, Failed, Finished, Job, Piece, Work
from strataflux.client.serve.errors import RequestError, as_request_error
from strataflux.client.serve.guard import check_host, check_key
from strataflux.client.serve.schemas import Message, Settings, read_chat_request, read_completion_request

__all__ = ["Api", "Service", "make_app"]

_LOG: Final = logging.getLogger(__name__)
_MOST_BODY_BYTES: Final = 4 << 20
_COMPLETION_TOKENS: Final = 16
"""OpenAI's default of ``max_tokens`` where it is no chat."""
_GONE: Final = 499
"""Status of an answer that nobody reads."""

_Handler = Callable[[Request], Awaitable[Response]]
_Events = asyncio.Queue[Event]


@dataclass(frozen=True)
class Service:
    """What is served."""

    name: str
    digest: str
    """Of the prepared model's identity."""
    created: int
    context: int
    vocabulary: int
    tokenizer: Tokenizer
    chat: ChatRenderer | None
    engine: Engine
    key: str | None
    loopback: bool
    """Only this machine may ask."""


def make_app(service: Service) -> Starlette:
    """The application; its engine is started and stopped by whoever made it."""
    api = Api(service)

    def route(path: str, handler: _Handler, method: str, *, guarded: bool = True) -> Route:
        async def answer(request: Request) -> Response:
            try:
                if service.loopback:
                    check_host(request.headers)
                if guarded:
                    check_key(request.headers, service.key)
                return await handler(request)
            except Exception as error:
                return _refusal(error)

        return Route(path, answer, methods=[method])

    async def nowhere(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        found = f"{request.method} {request.url.path}"
        return _refusal(
            RequestError("route", found, "POST /v1/chat/completions or another", "see the docs", status=status)
        )

    return Starlette(
        routes=[
            route("/healthz", api.health, "GET", guarded=False),
            route("/v1/models", api.models, "GET"),
            route("/v1/models/{name:path}", api.model, "GET"),
            route("/v1/completions", api.complete, "POST"),
            route("/v1/chat/completions", api.chat, "POST"),
        ],
        exception_handlers={404: nowhere, 405: nowhere},
    )


class Api:
    """The handlers. Event loop only."""

    def __init__(self, service: Service) -> None:
        # fixed after construction
        self._service = service

    async def health(self, _request: Request) -> Response:
        """200 while requests are decoded, with how busy the engine is; else 503."""
        engine = self._service.engine
        status = "ok" if engine.alive else "stopping"
        return JSONResponse({"status": status, **asdict(engine.state())}, 200 if engine.alive else 503)

    async def models(self, _request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The one model, by name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def complete(self, request: Request) -> Response:
        """Go on from a prompt."""
        asked = read_completion_request(await _read_json(request))
        self._check_model(asked.settings.model)
        given = asked.prompt
        tokens = await asyncio.to_thread(self._encode, given) if isinstance(given, str) else given
        work = self._work(tokens, asked.settings, "prompt", _COMPLETION_TOKENS)
        return await self._answer(request, work, asked.settings, CompletionAnswer)

    async def chat(self, request: Request) -> Response:
        """The next turn of a conversation."""
        asked = read_chat_request(await _read_json(request))
        self._check_model(asked.settings.model)
        if self._service.chat is None:
            raise RequestError(
                "model",
                f"{self._service.name} without a chat template",
                "a model with one",
                "use /v1/completions, or serve with --chat-template",
            )
        tokens = await asyncio.to_thread(self._encode_chat, self._service.chat, asked.messages)
        work = self._work(tokens, asked.settings, "messages", self._service.context)
        return await self._answer(request, work, asked.settings, ChatAnswer)

    def _card(self) -> dict[str, object]:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "strataflux",
            "max_model_len": service.context,
        }

    def _check_model(self, name: str) -> None:
        if name != self._service.name:
            remedy = "name that one, see GET /v1/models"
            raise RequestError(
                "model", repr(name), repr(self._service.name), remedy, status=404, parameter="model",
                code="model_not_found",
            )  # fmt: skip

    # These two are called in threads: megabytes of text take seconds, in which streams of others would stand still.

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._service.tokenizer.encode(text).ids)

    def _encode_chat(self, chat: ChatRenderer, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self._service.tokenizer.encode(chat.render(messages), add_special_tokens=False).ids)

    def _work(self, tokens: tuple[int, ...], settings: Settings, field: str, most: int) -> Work:
        """Check that prompt and answer fit; ``most`` tokens unless the request says how many.

        Raises:
            RequestError: they do not, or the prompt is empty or holds tokens that are none.
        """
        context, wanted = self._service.context, settings.max_tokens
        if not tokens or max(tokens) >= self._service.vocabulary:
            found = f"token {max(tokens)}" if tokens else "no tokens"
            expected = f"at least one token, each below {self._service.vocabulary}"
            raise RequestError(field, found, expected, "change the prompt", parameter=field)
        if len(tokens) + (wanted or 1) > context:
            found = f"{len(tokens)} tokens, and {wanted or 'at least 1'} to generate"
            raise RequestError(
                field, found, f"at most {context} together", "shorten it, or lower max_tokens", parameter=field,
                code="context_length_exceeded",
            )  # fmt: skip
        return Work(tokens, wanted or min(most, context - len(tokens)), settings.sampling, settings.stop)

    async def _answer(self, request: Request, work: Work, settings: Settings, kind: type[Answer]) -> Response:
        events: _Events = asyncio.Queue()
        loop = asyncio.get_running_loop()
        engine = self._service.engine

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever listened
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = engine.submit(work, deliver)
        answer = kind(self._service.name, f"sf-{self._service.digest[:12]}", len(work.prompt))
        if settings.stream:
            chunks = _chunks(events, answer, include_usage=settings.include_usage)
            return _EventStream(chunks, engine, job)
        try:
            return await _whole(request, events, answer)
        finally:
            engine.cancel(job)


class _EventStream(StreamingResponse):
    """Server-sent events of a job, which is cancelled when the client goes away, however far the stream is."""

    def __init__(self, chunks: AsyncIterator[str], engine: Engine, job: Job) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._engine = engine
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._engine.cancel(self._job)


async def _chunks(events: _Events, answer: Answer, *, include_usage: bool) -> AsyncIterator[str]:
    for chunk in answer.first():
        yield _event(chunk)
    while True:
        event = await events.get()
        if isinstance(event, Piece):
            yield _event(answer.piece(event.text))
            continue
        if isinstance(event, Failed):
            yield _event(as_request_error(event.error).to_json())
            return
        for chunk in answer.last(event, include_usage=include_usage):
            yield _event(chunk)
        yield "data: [DONE]\n\n"
        return


async def _whole(request: Request, events: _Events, answer: Answer) -> Response:
    """All of it, unless the client hangs up before."""
    text = asyncio.ensure_future(_collect(events))
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((text, gone), return_when=asyncio.FIRST_COMPLETED)
        if not text.done():
            return Response(status_code=_GONE)
        written, end = text.result()
        return JSONResponse(answer.whole(written, end))
    finally:
        text.cancel()
        gone.cancel()


async def _collect(events: _Events) -> tuple[str, Finished]:
    pieces = []
    while isinstance(event := await events.get(), Piece):
        pieces.append(event.text)
    if isinstance(event, Failed):
        raise event.error
    return "".join(pieces), event


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _read_json(request: Request) -> Any:
    """The body.

    Raises:
        RequestError: it is too long, not declared as JSON, or no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type", repr(kind), "application/json", "declare the body so", status=415)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY_BYTES:
            raise RequestError("body", "more bytes", f"at most {_MOST_BODY_BYTES}", "shorten it", status=413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError("body", f"no JSON ({error})", "a JSON object", "mend it") from error


def _event(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _refusal(error: Exception) -> Response:
    if not isinstance(error, StrataFluxError):  # its message sends the reader to the log
        _LOG.error("a request failed", exc_info=error)
    refused = as_request_error(error)
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else {}
    return JSONResponse(refused.to_json(), refused.status, headers)
