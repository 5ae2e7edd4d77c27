"""A model behind OpenAI's HTTP interface, asked by the official client."""

from __future__ import annotations

import json
import logging
import logging.config
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

import headwise
from headwise.models.checkpoints import load_tokenizer
from headwise.runtime.caches import HeadwiseCache
from headwise.serving.http import LOGS, application
from headwise.serving.serve import serve

PROMPT = "the cat sat on"


@dataclass
class Served:
    name: str
    client: openai.OpenAI
    model: Any
    caches: list[Any] = field(default_factory=list)
    wait: float = 0.0

    def complete(self, **settings: Any) -> Any:
        wanted = {"model": self.name, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, **settings}
        return self.client.completions.create(**wanted)

    def lengths(self) -> list[int]:
        return [cache.get_seq_length() for cache in self.caches]


@pytest.fixture(scope="module", params=["mla", "same"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path
) -> Iterator[Served]:
    """A converted model with a cache in codes that answers on a port of its own, and the caches that it makes."""
    place = tmp_path_factory.mktemp("served")
    source = shutil.copytree(tiny_llama_folder, place / "llama")
    (source / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    text = place / "text.txt"
    text.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(4000)))
    folder = place / "mla@0.5"  # transformers' own server would cut this name at its @
    settings: dict[str, Any] = {"kv_budget": 0.5} if request.param == "mla" else {}
    settings |= {
        "bits": 4,
        "calibrate": text,
        "calibration_tokens": 512,
        "evaluate": False,
        "without": ["refine", "refit"],
    }
    headwise.convert(source, folder, to=request.param, **settings)

    model = headwise.load(folder)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    served = Served(str(folder), openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=60), model)

    def step(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        time.sleep(served.wait)
        if not any(named["past_key_values"] is cache for cache in served.caches):
            served.caches.append(named["past_key_values"])

    hook = model.register_forward_pre_hook(step, with_kwargs=True)
    server = uvicorn.Server(
        uvicorn.Config(application(served.name, model, load_tokenizer(folder)), log_level="warning")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield served
    served.client.close()
    server.should_exit = True
    thread.join(30)
    hook.remove()
    assert not thread.is_alive()


@pytest.fixture
def served(running: Served) -> Served:
    running.caches.clear()
    running.wait = 0.0
    return running


def test_answers_are_those_of_generate_and_caches_are_in_codes(served: Served) -> None:
    wanted = headwise.generate(served.name, PROMPT, max_new_tokens=20)
    answer = served.complete()
    assert answer.choices[0].text == wanted.text
    assert answer.usage.prompt_tokens == wanted.prompt_tokens
    assert answer.usage.completion_tokens == wanted.new_tokens
    streamed = "".join(part.choices[0].text for part in served.complete(stream=True))
    assert streamed == wanted.text
    assert [type(cache) for cache in served.caches] == [HeadwiseCache] * 2
    assert all(layer.codec is not None for cache in served.caches for layer in cache.layers)


def test_chat_and_responses_are_answered(served: Served) -> None:
    text = served.complete().choices[0].text
    ask = [{"role": "user", "content": PROMPT}]
    chat = served.client.chat.completions.create(model=served.name, messages=ask, max_tokens=20, temperature=0)
    assert chat.choices[0].message.content == text
    response = served.client.responses.create(model=served.name, input=PROMPT, max_output_tokens=20, temperature=0)
    assert response.output_text == text
    parts = served.client.responses.create(
        model=served.name, input=PROMPT, max_output_tokens=20, temperature=0, stream=True
    )
    assert "".join(part.delta for part in parts if part.type == "response.output_text.delta") == text


def test_the_model_is_listed_and_stays(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == [served.name]
    served.client.post("/../reset", cast_to=object)
    assert served.complete().choices[0].text


def _until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stream_that_is_closed_stops(served: Served) -> None:
    served.wait = 0.02
    with served.complete(max_tokens=100, stream=True) as stream:
        next(iter(stream))
    served.complete(max_tokens=1)  # waits for its turn
    assert served.lengths()[0] < 100
    assert len(served.caches) == 2


def test_a_request_whose_client_is_gone_stops_and_one_that_waits_never_begins(served: Served) -> None:
    served.wait = 0.02
    hurried = served.client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        hurried.completions.create(model=served.name, prompt=PROMPT, max_tokens=100)
    served.complete(max_tokens=1)
    assert served.lengths()[0] < 100
    assert len(served.caches) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n": 2}, "n = 2"),
        ({"logprobs": 3}, "logprobs = 3"),
        ({"echo": True}, "echo"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"suffix": "."}, "suffix"),
        ({"model": "another"}, "pinned"),
        ({"prompt": "a" * 200}, "128"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"extra_body": {"generation_config": '{"do_sample": true, "temperature": -1.0}'}}, "temperature"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_line(served: Served, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        served.complete(**settings)
    assert not served.caches


@pytest.mark.parametrize("running", ["same"], indirect=True)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"chat_template_kwargs": {"chat_template": "{{ 'a' * 9 }}"}}, "chat_template_kwargs.chat_template is not"),
        ({"chat_template_kwargs": {"tokenizer_kwargs": {}}}, "chat_template_kwargs.tokenizer_kwargs is not"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs = 5 must be an object"),
        ({"generation_config": '{"custom_generate": "owner/name"}'}, "generation_config.custom_generate is not"),
        ({"generation_config": '{"__class__": 5}'}, "generation_config.__class__ is not"),
        ({"generation_config": "[" * 5000}, "must be an object"),
        ({"generation_config": '{"cache_implementation": "quantized"}'}, "optimum-quanto"),
        ({"messages": [{"role": "user", "content": ""}]}, "the prompt has no tokens"),
    ],
    ids=str,
)
def test_a_request_brings_no_template_and_no_code(served: Served, asked: dict[str, Any], said: str) -> None:
    """What a client writes is data: the template is the model's, and so are the parts of Python's objects."""
    messages = asked.pop("messages", [{"role": "user", "content": PROMPT}])
    with pytest.raises(openai.BadRequestError, match=said):
        served.client.chat.completions.create(model=served.name, messages=messages, extra_body=asked)
    assert not served.caches


def test_a_log_has_no_control_characters() -> None:
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "\x1b[31m %s", ("\x9b\u202e",), None)
    formatter = logging.config.DictConfigurator(LOGS).configure_formatter(LOGS["formatters"]["default"])
    assert formatter.format(record).endswith(r"\x1b[31m \x9b\u202e")


def test_a_temperature_samples_and_a_seed_counts_from_the_turn_of_its_request(served: Served) -> None:
    def sampled(seed: int, **settings: Any) -> str:
        return str(served.complete(**{"temperature": 1, "seed": seed, "max_tokens": 30, **settings}).choices[0].text)

    alone = sampled(7)
    assert sampled(7) == alone != sampled(8)
    assert sampled(7, temperature=None, top_p=1) == alone
    assert sampled(7, temperature=0) == sampled(8, temperature=0) != alone
    served.wait = 0.01
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(sampled, (3, 7, 4, 7)))
    assert at_once[1] == at_once[3] == alone


def test_an_answer_ends_at_the_last_position(served: Served) -> None:
    answer = served.complete(max_tokens=1000)
    assert answer.usage.total_tokens <= 128


def test_a_text_model_hears_nothing(served: Served) -> None:
    with pytest.raises(openai.InternalServerError, match="no audio"):
        served.client.audio.transcriptions.create(model=served.name, file=b"RIFF")


def test_what_cannot_be_served_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(headwise.ArgumentError, match="port"):
        serve(tmp_path, port=70000)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(headwise.ArgumentError, match="in use"):
        serve(tmp_path, port=taken.getsockname()[1])
    with pytest.raises(headwise.ArgumentError, match="host"):
        serve(tmp_path, host="no.such.host.invalid", port=0)


def test_continuous_batching_is_refused_by_its_name(served: Served) -> None:
    with pytest.raises(headwise.HeadwiseError, match="continuous batching"):
        served.model.generate_batch([[5, 6, 7]])


@pytest.mark.parametrize("running", ["mla"], indirect=True)
def test_the_command_answers_until_it_is_interrupted(running: Served) -> None:
    command = [sys.executable, "-m", "headwise", "serve", running.name, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads("".join(process.stdout.readline() for _ in range(4)))
        assert said["model"] == running.name
        client = openai.OpenAI(base_url=said["url"], api_key="-", max_retries=0)
        answer = client.completions.create(model=running.name, prompt=PROMPT, max_tokens=20, temperature=0)
        assert answer.choices[0].text == running.complete().choices[0].text
        client.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
