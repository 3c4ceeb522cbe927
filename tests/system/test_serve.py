"""The server as its users have it: a process, a real daemon, and OpenAI's own client."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import OpenAI

from strataflux.client.prepare.chat import ChatTemplate
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.generation import Sampling, generate_tokens, special_tokens
from strataflux.client.runtime.models import DecoderWeights
from strataflux.proto import control_pb2
from tests.system.conftest import STOP_SECONDS, Start
from tests.system.test_demo import PROGRAM, tiny_source
from tests.unit.client.conftest import TOKENS, TinySource

pytestmark = pytest.mark.system

CONTEXT = 4000
"""A request for as many tokens is under way for as long as a test needs it to be."""
TEMPLATE = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ")
KEY = "sesame"


@dataclass
class Server:
    """A ``strataflux serve`` that takes requests."""

    process: "subprocess.Popen[str]"
    url: str
    refined: bool

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=self.url, api_key=key, max_retries=0)

    def health(self) -> dict[str, Any]:
        status, _, body = self.raw("GET", "/healthz")
        assert status == 200
        return body

    def raw(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, dict[str, Any]]:
        host = self.url.removeprefix("http://").removesuffix("/v1")
        connection = http.client.HTTPConnection(host)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.headers, json.loads(answer.read())
        finally:
            connection.close()

    def stop(self) -> tuple[int, str, str]:
        """Exit code, and what it said since it was ready."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=STOP_SECONDS)
        return self.process.returncode, out, err


@contextmanager
def serve(*words: object) -> Iterator[Server]:
    command = [sys.executable, "-P", "-c", PROGRAM, "serve", *map(str, words), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # nothing at all if it ends before
            assert line, process.communicate()[1]
            said = json.loads(line)
            yield Server(process, said["url"], said["refined"])
        finally:
            process.kill()


class Talkative(TinySource):
    """Has no token that ends a text, so that answers are as long as was asked for."""

    def tokenizer_metadata(self) -> dict[str, object]:
        return super().tokenizer_metadata() | {"tokenizer.ggml.token_type": [1] * len(TOKENS)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    source = Talkative(tiny_source().with_config(context=CONTEXT).config, chat=TEMPLATE)
    return prepare(source, tmp_path_factory.mktemp("m") / "tiny", PrepareSettings())


@pytest.fixture(scope="module")
def alone(prepared: PreparedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One without a daemon, with a key, for one request at a time and none waiting."""
    nowhere = tmp_path_factory.mktemp("n")
    key = nowhere / "key"
    key.write_text(f"{KEY}\n")
    words = ("--runtime-dir", nowhere, "--api-key-file", key, "--sequences", 1, "--queue", 0)
    with serve(prepared.folder, *words) as server:
        yield server
        code, out, err = server.stop()
    assert (code, out, err.count("not refined")) == (128 + signal.SIGTERM, "", 1)


def greedy(prepared: PreparedModel, tokens: Sequence[int], count: int) -> str:
    """What the decoder says on its own, after a prompt in one pass."""
    decoder = Decoder(DecoderWeights.read(prepared), CONTEXT)
    decoder.prefill(list(tokens[:-1]))
    tokenizer = prepared.tokenizer()
    said = generate_tokens(decoder.step, tokens[-1:], count, Sampling(), special_tokens(tokenizer))
    return str(tokenizer.decode(list(said)))


def test_two_clients_stream_at_once_and_one_hangs_up(start: Start, prepared: PreparedModel) -> None:
    """The pool has KV blocks for two full sequences, so two more can begin only if nothing was kept."""
    daemon = start("--store", str(prepared.store))
    daemon.expect(b"READY=1")
    stub = daemon.control()
    where = ("--runtime-dir", daemon.folder, "--sequences", 2, "--context", CONTEXT)
    with serve(prepared.folder, *where, "--kv", "2/2", "--fraction", "1/8") as server, server.client() as client:
        assert server.refined
        gone, stays = ask(client, CONTEXT - 5), ask(client, 300)
        for _ in range(5):
            assert next(gone).object == next(stays).object == "text_completion"
        gone.close()
        *_, last, usage = stays
        assert (last.choices[0].finish_reason, usage.usage.completion_tokens) == ("length", 300)
        assert last.model_extra["strataflux"]["refined"]
        for full in [ask(client, CONTEXT - 5) for _ in range(2)]:
            next(full)
            full.close()
        while (state := server.health())["active"]:
            pass
        assert (state["waiting"], state["cancelled"], state["jobs"]) == (0, 3, 4)
        (session,) = stub.ListSessions(control_pb2.ListSessionsRequest()).sessions
        assert session.pid == server.process.pid
        assert session.stats.hits > 0
        code, out, said = server.stop()
        assert (code, out) == (128 + signal.SIGTERM, "")
        assert said.endswith(f"serving tiny at {server.url}\n")  # after a note, if reading the model took long
    assert list(stub.ListSessions(control_pb2.ListSessionsRequest()).sessions) == []
    assert daemon.stop(signal.SIGTERM) == 0


def ask(client: OpenAI, tokens: int) -> Any:
    return client.completions.create(
        model="tiny", prompt="hello", max_tokens=tokens, stream=True, stream_options={"include_usage": True}
    )


def test_answers_are_the_decoders(alone: Server, prepared: PreparedModel) -> None:
    prompt = "hello there"
    expected = greedy(prepared, prepared.tokenizer().encode(prompt).ids, 12)
    with alone.client(KEY) as client:
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        assert found.choices[0].text == expected
        assert found.usage is not None
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
        assert found.system_fingerprint == f"sf-{prepared.manifest.digest[:12]}"
        streamed = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == expected
        stop = expected[3:5]
        cut = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stop=stop)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (expected[: expected.index(stop)], "stop")


def test_chat_follows_the_models_template_and_seeds_repeat(alone: Server, prepared: PreparedModel) -> None:
    text = "[user] hello\n[assistant] "
    expected = greedy(prepared, prepared.tokenizer().encode(text).ids, 8)
    messages: Any = [{"role": "user", "content": "hello"}]
    with alone.client(KEY) as client:
        found = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, temperature=0)
        assert (found.choices[0].message.content, found.choices[0].message.role) == (expected, "assistant")
        sampled = [
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=5).choices[0].message
            for _ in range(2)
        ]
        assert sampled[0] == sampled[1]
        chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models_are_listed(alone: Server) -> None:
    with alone.client(KEY) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "strataflux"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")


def test_what_is_refused_and_how(alone: Server) -> None:
    with alone.client(KEY) as client:
        complete = client.completions.create
        with pytest.raises(openai.NotFoundError) as wrong:
            complete(model="gpt-4", prompt="x")
        assert wrong.value.code == "model_not_found"
        assert "tiny" in wrong.value.message
        with pytest.raises(openai.BadRequestError) as long:
            complete(model="tiny", prompt="x" * CONTEXT)
        assert long.value.code == "context_length_exceeded"
        assert f"at most {CONTEXT} together" in long.value.message
        with pytest.raises(openai.BadRequestError) as bad:
            complete(model="tiny", prompt="x", temperature=9)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="token 999"):
            complete(model="tiny", prompt=[999])
        with complete(model="tiny", prompt="x", max_tokens=CONTEXT - 1, stream=True) as busy:
            next(iter(busy))
            with pytest.raises(openai.RateLimitError) as full:
                complete(model="tiny", prompt="x")
        assert full.value.code == "queue_full"
    with alone.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_web_pages_are_kept_out(alone: Server) -> None:
    authorization = f"Bearer {KEY}"
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    post = ("POST", "/v1/completions", body)
    assert alone.raw(*post, Authorization=authorization, Content_Type="text/plain")[0] == 415
    rebound = alone.raw("GET", "/v1/models", Authorization=authorization, Host="evil.example")
    assert (rebound[0], rebound[2]["error"]["code"]) == (403, "wrong_host")
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        found, headers, answer = alone.raw("GET", path, Authorization=authorization)
        assert (found, list(answer)) == (status, ["error"])
        assert "Access-Control-Allow-Origin" not in headers
    code, _, answer = alone.raw(*post[:2], b"{", Authorization=authorization, Content_Type="application/json")
    assert (code, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_client_that_hangs_up_on_a_whole_answer_ends_it(alone: Server) -> None:
    """The one place is free again for whoever comes next."""
    before = alone.health()["cancelled"]
    host, port = alone.url.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": CONTEXT - 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        while alone.health()["active"] == 0:
            pass
    while (state := alone.health())["active"]:
        pass
    assert state["cancelled"] == before + 1
