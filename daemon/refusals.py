"""Errors as refusals, and refusals as what a client is told."""

from typing import Final

from strataflux.daemon.errors import DaemonError, Refusal
from strataflux.proto import messages
from strataflux.proto.errors import ContractError

__all__ = ["limit_of", "message_of"]

_TEXT_MAX: Final = 2_000


def limit_of(error: DaemonError | ContractError) -> Refusal:
    """A refusal for want of what ``error`` names; one that is a refusal already as it is."""
    if isinstance(error, Refusal):
        return error
    return Refusal("limit", error.subject, error.found, error.expected, error.remedy)


def message_of(refusal: Refusal, request: int = 0) -> messages.Refuse:
    """The message, each text cut to 2,000 characters. ``request`` is the number of the question; 0: of none."""
    found = f"{refusal.subject}: {refusal.found}"[:_TEXT_MAX]
    return messages.Refuse(refusal.code, found, refusal.expected[:_TEXT_MAX], refusal.remedy[:_TEXT_MAX], request)
