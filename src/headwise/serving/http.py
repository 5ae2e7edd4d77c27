"""The application behind `headwise serve`: transformers' handlers of OpenAI's requests around one loaded model."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import torch
from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState
from uvicorn.config import LOGGING_CONFIG
from uvicorn.logging import DefaultFormatter

from headwise.base.printable import printable

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "suffix": ("",),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "previous_response_id": (),
    "background": (False,),
    "text": ({"format": {"type": "text"}},),
}
"""Fields of which transformers' server ignores what changes the answer, or means another thing by it (a frequency
penalty is a penalty of repetition there, a suffix is put behind the answer), with the values that change nothing."""

_TEMPLATE_ARGUMENTS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
"""What a request cannot hand to a chat template as a variable of its own: above all another template, which would run
in the server."""

_SETTINGS = frozenset(name for name in GenerationConfig().to_dict() if not name.startswith("_"))
"""The fields of a generation config; by any other name a request would set what belongs to Python's object."""

_OF_REQUESTS = (
    *(HTTPException, TemplateError, ImportError),
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
)
"""Errors that follow from what a request holds, and are told to its client."""

_MOST_TOKENS = 1024
"""New tokens where a request does not say how many, as transformers' server has it."""


def application(name: str, model: Any, tokenizer: Any) -> Any:
    """The ASGI application that serves a loaded model.

    For example ``uvicorn.run(application("half", headwise.load("./half"), load_tokenizer(Path("./half"))))``.

    Args:
        name: the name by which requests may ask for the model.
        model: what `headwise.load` gives of a decoder.
        tokenizer: its tokenizer.
    """
    manager, state = _OneModel(name, model, tokenizer), _Generations()
    chat, completions, responses = (kind(manager, state) for kind in (_Chat, _Completions, _Responses))
    app = build_server(manager, chat, completions, responses, _Refused("audio"), _Refused("decisions"), state)
    for error in _OF_REQUESTS:
        app.add_exception_handler(error, _said)
    app.add_middleware(_StopsWithClient)
    return app


async def _said(_request: Request, error: Exception) -> JSONResponse:
    """An error in OpenAI's form: of transformers' handlers, or because what was asked for cannot be done."""
    status, text = getattr(error, "status_code", 400), str(getattr(error, "detail", error))
    if isinstance(error, KeyError):
        text = f"{error.args[0]} is missing"
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status)


class _PrintableLines(DefaultFormatter):
    """Lines of a log without control characters, which a request may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


LOGS: dict[str, Any] = {
    **LOGGING_CONFIG,
    "formatters": {
        **LOGGING_CONFIG["formatters"],
        "default": {"()": _PrintableLines, "fmt": "%(levelprefix)s %(message)s", "use_colors": False},
    },
}
"""uvicorn's ``log_config`` for `application`."""


class _OneModel(ModelManager):
    """A loaded model in place of those that transformers' server would load by the name in a request."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        super().__init__(device=str(model.device))
        self.force_model, self._loaded = name, (model, tokenizer)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._loaded

    async def load_model_streaming(self, *_: Any, **__: Any) -> Any:
        yield 'data: {"status": "ready", "cached": true}\n\n'

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}]

    def shutdown(self) -> None:
        """Nothing: requests cannot unload the model."""


class _Strict(BaseHandler):
    """A handler that refuses what it would ignore though it changes the answer, and samples as it is asked to.

    transformers' own reads a temperature and uses it only where the model's settings sample already, and it sets a
    seed when a request comes, which may be before the requests in front of it have drawn.
    """

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        for field, neutral in _NEUTRAL.items():
            if (value := body.get(field)) is not None and value not in neutral:
                raise HTTPException(400, f"{field} = {value!r} is not supported")
        for field, most in (("temperature", 2), ("top_p", 1)):
            if (value := body.get(field)) is not None and not 0 <= float(value) <= most:
                raise HTTPException(400, f"{field} = {value!r} must be 0 to {most}")
        _refuse_keys("chat_template_kwargs", body.get("chat_template_kwargs"), lambda key: key in _TEMPLATE_ARGUMENTS)
        if (settings := body.get("generation_config")) is not None:
            try:
                value = json.loads(settings)
            except (ValueError, TypeError, RecursionError):
                value = settings
            _refuse_keys("generation_config", value, lambda key: key not in _SETTINGS)

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        settings = super()._build_generation_config({**body, "seed": None}, *args, **kwargs)
        if body.get("generation_config") is not None:
            settings.validate(strict=True)
        temperature, top_p = body.get("temperature"), body.get("top_p")
        if (temperature is None and top_p is not None) or float(temperature or 0) > 0:
            settings.do_sample = True
        settings.seed = body.get("seed")
        return settings


def _refuse_keys(field: str, value: Any, is_refused: Callable[[str], bool]) -> None:
    """Refuse a field of a request that is no object, or one with a key of these.

    Raises:
        HTTPException: it is.
    """
    if value is None:
        return
    if not isinstance(value, dict):
        raise HTTPException(400, f"{field} = {value!r} must be an object")
    if keys := sorted(filter(is_refused, value)):
        raise HTTPException(400, f"{field}.{keys[0]} is not supported")


class _Chat(_Strict, ChatCompletionHandler):
    pass


class _Completions(_Strict, CompletionHandler):
    pass


class _Responses(_Strict, ResponseHandler):
    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        return await super().handle_request({"stream": False, **body}, request_id)  # as OpenAI's default is


class _Refused:
    """A handler of requests that a text decoder cannot answer."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def handle_request(self, *_: Any) -> None:
        raise HTTPException(501, f"a text model is served here: no {self._kind}")


class _Generations(GenerationState):
    """One queue of requests."""

    def __init__(self) -> None:
        super().__init__()
        self._queue = _Queue()

    def get_manager(self, model_id: str, use_cb: bool = False) -> GenerateManager:
        return self._queue


class _Queue(GenerateManager):
    """Generates for one request at a time; a request whose client is gone stops at its next token."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kw: Any
    ) -> Any:
        settings = _within(model, inputs, gen_config)
        return super().generate_streaming(_Seeded(model), processor, inputs, settings, *args, **kw)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        settings, gone = _within(model, inputs, gen_config), threading.Event()

        def generate() -> Any:
            if gone.is_set():
                return inputs["input_ids"]
            stop = StoppingCriteriaList([lambda ids, scores, **_: ids.new_full(ids.shape[:1], gone.is_set()).bool()])
            given = {**inputs, "generation_config": settings, "tokenizer": processor}
            return _Seeded(model).generate(**given, stopping_criteria=stop)

        answer = self.async_submit(generate)
        try:
            ids = await asyncio.shield(answer)
        except asyncio.CancelledError:
            gone.set()
            raise
        count = inputs["input_ids"].shape[-1]
        return processor.decode(ids[0, count:], skip_special_tokens=True), count, ids[0, count:]


class _Seeded:
    """A model that sets the seed of a request when its turn to generate has come."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, *, generation_config: Any, **kwargs: Any) -> Any:
        if (seed := generation_config.seed) is not None:
            torch.manual_seed(seed)
        return self._model.generate(generation_config=generation_config, **kwargs)


def _within(model: Any, inputs: Any, settings: Any) -> Any:
    """Settings that end generation at the model's last position.

    Raises:
        HTTPException: the prompt alone is longer, or has no tokens.
    """
    positions, count = getattr(model.config, "max_position_embeddings", None), inputs["input_ids"].shape[-1]
    if count == 0:
        raise HTTPException(400, "the prompt has no tokens")
    if not isinstance(positions, int):
        return settings
    if count >= positions:
        raise HTTPException(400, f"the prompt has {count} tokens, and prompt and answer must fit {positions}")
    settings = copy.deepcopy(settings)
    settings.max_new_tokens = min(settings.max_new_tokens or _MOST_TOKENS, positions - count)
    return settings


_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _StopsWithClient:
    """ASGI middleware that cancels the handling of a request when its client closes the connection.

    Starlette cancels streams alone.
    """

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        handling = asyncio.ensure_future(self._app(scope, messages.get, send))

        async def listen() -> None:
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "http.disconnect":
                    handling.cancel()
                    return

        listening = asyncio.ensure_future(listen())
        try:
            await asyncio.wait([handling])
            if not handling.cancelled():
                handling.result()
        finally:
            listening.cancel()
            handling.cancel()
