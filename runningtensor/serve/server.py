"""`runningtensor serve`: OpenAI's API for one model, over HTTP."""

import asyncio
import contextlib
import json
import secrets
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from runningtensor.serve.conversation import Conversation
from runningtensor.serve.engine import Engine, Job
from runningtensor.serve.writing import Sampling, encode, load

CHARACTERS_A_TOKEN = 64  # no prompt has more: what is longer need not be tokenised to be refused
NEUTRAL = {  # what is not offered may be asked for in these words
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "suffix": "",
    "tools": [],
    "top_logprobs": 0,
}
WITHOUT_EFFECT = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store"}
WITHOUT_EFFECT |= {"user"}


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code


class StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: StrictBool | None = None  # no number: of 0, OpenAI gives the tokens' own


class CompletionAsked(Asked):
    prompt: str


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: str
    content: str | list[Part]


class ChatAsked(Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class Service:
    """A model with a name, and what becomes of requests."""

    def __init__(self, model: Any, tokenizer: Any, name: str, context: int, batch: int) -> None:
        self.tokenizer, self.name, self.context = tokenizer, name, context
        self.conversation = Conversation(tokenizer)
        self.engine = Engine(model, tokenizer, batch)

    def completion(self, asked: CompletionAsked) -> "Reply":
        self.check(asked)
        ids = self.encode(asked.prompt, begin=True)
        return Reply("completion", self, ids, self.sampling(asked, ids, asked.max_tokens, 16))  # OpenAI's default

    def chat(self, asked: ChatAsked) -> "Reply":
        self.check(asked)
        messages = [
            {"role": m.role, "content": m.content if isinstance(m.content, str) else "".join(p.text for p in m.content)}
            for m in asked.messages
        ]
        try:
            prompt = self.conversation.prompt(messages)
        except TemplateError as error:  # templates raise them for roles and orders that they do not know
            raise Refused(400, f"messages must be as the model's chat template wants them: {error}") from error
        ids = self.encode(prompt, begin=not self.conversation.has_template)
        limit = asked.max_completion_tokens or asked.max_tokens
        return Reply("chat", self, ids, self.sampling(asked, ids, limit, 1024, self.conversation.stop))

    def check_name(self, name: str) -> None:
        if name != self.name:
            message = f"model must be {self.name!r}, which is served here, but was {name!r}"
            raise Refused(404, message, "model_not_found")

    def check(self, asked: Asked) -> None:
        self.check_name(asked.model)
        if asked.logprobs:
            raise Refused(400, "logprobs is not offered by this server, but was true")
        for option, value in (asked.model_extra or {}).items():
            if value is not None and option not in WITHOUT_EFFECT and value != NEUTRAL.get(option, object()):
                raise Refused(400, f"{option} is not offered by this server, but was {value!r}")

    def encode(self, prompt: str, *, begin: bool) -> list[int]:
        if len(prompt) > CHARACTERS_A_TOKEN * self.context:
            raise self.too_long(f"{len(prompt):,} characters")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            message = "a prompt must be text, but has half of a surrogate pair, which is no character"
            raise Refused(400, message) from error
        begins_with = self.tokenizer.bos_token_id
        ids = encode(self.tokenizer, prompt, begin=begin) or ([] if begins_with is None else [begins_with])
        if not ids:
            raise Refused(400, "prompt must not be empty: the model has no token that begins a text")
        return ids

    def sampling(
        self, asked: Asked, ids: list[int], limit: int | None, default: int, stop: tuple[str, ...] = ()
    ) -> Sampling:
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        if "" in stops:
            raise Refused(400, "stop must be a text or a list of texts, none of them empty")
        room = self.context - len(ids)
        if room < (limit or 1):
            raise self.too_long(f"{len(ids):,} and {limit or 1:,}")
        return Sampling(
            max_new_tokens=limit or min(room, default),
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=asked.seed,
            stop=(*stop, *stops),
        )

    def too_long(self, what: str) -> Refused:
        message = f"a prompt and its answer must be at most {self.context:,} tokens together, but were {what}"
        return Refused(400, message, "context_length_exceeded")


class Reply:
    """An answer in OpenAI's words, whole or in chunks; written when it is asked for, and no longer than it is."""

    def __init__(self, kind: Literal["completion", "chat"], service: Service, ids: list[int], how: Sampling) -> None:
        self.kind, self.service = kind, service
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[tuple[str, str | Exception | None]] = asyncio.Queue()
        self.job = Job(ids=ids, sampling=how, emit=self.emit)
        self.always = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
        }

    def emit(self, text: str, finish: str | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has been stopped
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (text, finish))

    async def pieces(self) -> AsyncGenerator[tuple[str, str | None]]:
        self.service.engine.submit(self.job)
        try:
            finish = None
            while finish is None:
                text, finish = await self.queue.get()
                if isinstance(finish, Exception):
                    raise finish
                yield text, finish
        finally:
            self.job.cancelled = True

    async def whole(self) -> dict[str, Any]:
        said, finish = "", None
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for text, finish in pieces:  # noqa: B007
                said += text
        choice = {"message": {"role": "assistant", "content": said}} if self.kind == "chat" else {"text": said}
        return self.body(choice, finish) | {"usage": self.usage()}

    async def chunks(self, with_usage: bool) -> AsyncIterator[str]:
        """Server-sent events."""
        role = {"role": "assistant"}
        try:
            async with contextlib.aclosing(self.pieces()) as pieces:
                async for text, finish in pieces:
                    choice = {"delta": {**role, "content": text}} if self.kind == "chat" else {"text": text}
                    yield event(self.body(choice, finish, ".chunk"))
                    role = {}
            if with_usage:
                yield event(self.body(None, None, ".chunk") | {"usage": self.usage()})
        except Exception as error:  # too late for a status
            yield event(failure(f"{type(error).__name__}: {error}", "server_error"))
        yield "data: [DONE]\n\n"

    def body(self, choice: dict[str, Any] | None, finish: str | None, chunk: str = "") -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self.kind == "chat" else "text_completion"
        choices = [] if choice is None else [{"index": 0, **choice, "logprobs": None, "finish_reason": finish}]
        return {**self.always, "object": kind, "choices": choices}

    def usage(self) -> dict[str, int]:
        read, written = len(self.job.ids), self.job.written
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def failure(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def build(service: Service, api_key: str | None = None) -> FastAPI:
    app = FastAPI(title="RunningTensor", docs_url=None, redoc_url=None, openapi_url=None)
    if api_key is not None:
        app.add_middleware(KeyRequired, key=api_key)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse(failure(error.message, code=error.code), error.status)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = error.errors()
        if wrong[0]["type"] == "json_invalid":
            return JSONResponse(failure(f"the body must be JSON, but was not: {wrong[0]['ctx']['error']}"), 400)
        told = (f"{'.'.join(map(str, e['loc'][1:])) or 'the body, as application/json'}: {e['msg']}" for e in wrong)
        return JSONResponse(failure("; ".join(told)), 400)

    @app.exception_handler(HTTPException)  # no such path, no such method
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(failure(str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(failure(f"{type(error).__name__}: {error}", "server_error"), 500)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, asked: CompletionAsked) -> Response:
        return await respond(request, asked, service.completion(asked))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, asked: ChatAsked) -> Response:
        return await respond(request, asked, service.chat(asked))

    served = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "runningtensor"}

    @app.get("/v1/models")
    @app.get("/v1/models/")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return served

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


async def respond(request: Request, asked: Asked, reply: Reply) -> Response:
    if asked.stream:
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(reply.chunks(with_usage), media_type="text/event-stream")
    # Nobody is told that a client has gone who does not listen for it.
    whole, gone = asyncio.ensure_future(reply.whole()), asyncio.ensure_future(disconnected(request))
    await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not whole.done():
        whole.cancel()
        return Response(status_code=499)  # which nobody reads
    return JSONResponse(whole.result())


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class KeyRequired:
    """Answers 401 to what does not bring the key, before reading any more of it."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] != "http" or scope["path"] == "/health" or secrets.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        else:
            wrong = failure("the API key is missing or wrong", code="invalid_api_key")
            await JSONResponse(wrong, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


def serve(
    model: str,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    context: int,
    batch: int,
    device: str | None,
) -> None:
    name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
    if api_key == "":
        raise ValueError("api_key must not be empty: leave it out where none is wanted")
    service = Service(*load(model, device), name, context, batch)
    if host not in ("127.0.0.1", "::1", "localhost") and api_key is None:
        print("Others can reach this server, and no --api-key is required of them.", file=sys.stderr)
    config = uvicorn.Config(build(service, api_key), log_level="warning", timeout_graceful_shutdown=5)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening, contextlib.suppress(KeyboardInterrupt):
        at = f"[{host}]" if ":" in host else host
        print(f"{name} at http://{at}:{listening.getsockname()[1]}/v1", flush=True)
        uvicorn.Server(config).run(sockets=[listening])
