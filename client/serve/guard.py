"""Who may talk to the server: whoever has the key, if there is one, and no web page.

A server on the loopback address is out of reach of other machines, but not of web pages in a browser on this one: they
can send it requests, and read the answers after rebinding a name of theirs to 127.0.0.1. So such a server answers only
to names of this machine, and bodies must be declared as JSON, which a page may send nowhere without being asked for.
"""

import hmac
import ipaddress
from collections.abc import Mapping

from strataflux.client.serve.errors import RequestError

__all__ = ["check_host", "check_key", "is_loopback"]

_NAMES = frozenset({"localhost", "localhost.localdomain"})


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address, in brackets or not) is this machine as seen by itself."""
    name = host.strip("[]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name in _NAMES


def check_host(headers: Mapping[str, str]) -> None:
    """Refuse a request that names another machine; for a server on the loopback address.

    Raises:
        RequestError: 403.
    """
    given = headers.get("host", "")
    name = given.rpartition("]")[0] + "]" if given.startswith("[") else given.partition(":")[0]
    if not is_loopback(name):
        raise RequestError(
            "Host", repr(given), "a name of this machine", "use http://127.0.0.1", status=403, code="wrong_host"
        )


def check_key(headers: Mapping[str, str], key: str | None) -> None:
    """Refuse a request without ``Authorization: Bearer KEY``; takes as long for a near miss as for a wild guess.

    Raises:
        RequestError: 401.
    """
    if key is None:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), key.encode())
    if scheme.lower() != "bearer" or not right:
        found = "another key" if given else "no key"
        raise RequestError(
            "Authorization", found, "Bearer and the server's key", "set it", status=401, code="invalid_api_key"
        )
