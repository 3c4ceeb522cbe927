"""Who may talk to the server."""

import pytest

from strataflux.client.serve.errors import RequestError
from strataflux.client.serve.guard import check_host, check_key, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "::", "example.com", "localhost.example.com", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:8000", "[::1]"])
def test_names_of_this_machine_pass(host: str) -> None:
    check_host({"host": host})


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "[2001:db8::1]:80", "", "127.0.0.1.evil.example"]
)
def test_rebound_names_are_refused(host: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_host({"host": host})
    assert refused.value.status == 403


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "Bearer  secret "])
def test_the_key_opens(given: str) -> None:
    check_key({"authorization": given}, "secret")
    check_key({}, None)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer secre", "Bearer secret2", "Basic secret", "Bearer gehéim"]
)
def test_anything_else_does_not(given: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        check_key({} if given is None else {"authorization": given}, "secret")
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
