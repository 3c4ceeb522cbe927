"""The attach socket against rubbish: whatever a client sends is answered, counted and harmless."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strataflux.proto import messages
from strataflux.proto.messages import Refuse, StoreRef, Welcome
from tests.unit.daemon.conftest import Bench, refusal, until


async def test_descriptors_from_a_client_are_closed_and_refused(bench: Bench) -> None:
    client = bench.client()
    read, write = os.pipe()
    messages.send(client.socket, bench.hello(), [write])
    os.close(write)
    refusal(await client.hear(), "malformed")
    assert os.read(read, 1) == b""  # no copy of the write end is left
    os.close(read)


async def test_a_second_hello_ends_the_session(bench: Bench) -> None:
    client = bench.client()
    await client.ask(bench.hello())
    refusal(await client.ask(bench.hello()), "malformed")
    await until(lambda: not bench.reader.open)
    assert bench.server.counters.ended["malformed"] == 1


async def test_deeply_nested_identity_is_refused(bench: Bench) -> None:
    identity = "[" * 400 + "]" * 400
    hello = json.loads(messages.encode(bench.hello(stores=[StoreRef("f" * 64, {"weights": "a"})])))
    raw = json.dumps(hello).replace('{"weights": "a"}', f'{{"weights": {identity}}}')
    client = bench.client()
    client.socket.send(raw.encode())
    assert isinstance(await client.hear(), Refuse)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def mutations(hello: dict[str, object]) -> st.SearchStrategy[bytes]:
    fields = sorted(hello)
    changed = st.dictionaries(st.sampled_from(fields), _JSON, min_size=1, max_size=3)
    bodies = changed.map(lambda change: {**hello, **change}) | _JSON
    return st.binary(min_size=1, max_size=200) | bodies.map(lambda body: json.dumps(body).encode())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_rubbish_is_answered_and_harmless(bench: Bench, data: st.DataObject) -> None:
    """Whatever the first message is, the answer is a refusal or, if by chance it is a right hello, a welcome."""
    raw = data.draw(mutations(json.loads(messages.encode(bench.hello()))))
    client = bench.client()
    client.socket.send(raw)
    assert isinstance(await client.hear(), Refuse | Welcome)
    client.close()
    good = bench.client()
    assert isinstance(await good.ask(bench.hello()), Welcome)
    good.close()
    await until(lambda: not bench.server.holders and not bench.reader.open)


@pytest.mark.parametrize("size", [messages.MESSAGE_MAX_BYTES + 1, 2 * messages.MESSAGE_MAX_BYTES])
async def test_a_message_that_is_too_long_is_refused(bench: Bench, size: int) -> None:
    client = bench.client()
    client.socket.send(b" " * size)
    refusal(await client.hear(), "malformed")
    assert bench.server.counters.malformed == 1
