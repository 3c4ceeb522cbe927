"""Errors of ours as gRPC statuses, with their four parts beside the text. The one boundary between the two."""

import errno
from typing import Any, Final, NoReturn

import grpc

from strataflux.daemon import errors
from strataflux.proto import control_pb2
from strataflux.proto import errors as contracts

__all__ = ["BY_CODE", "BY_TYPE", "ERROR_METADATA", "abort", "explain", "status_of"]

ERROR_METADATA: Final = "strataflux-error-bin"

_S: Final = grpc.StatusCode

BY_CODE: Final = {
    "layout": _S.FAILED_PRECONDITION,
    "identity": _S.NOT_FOUND,
    "denied": _S.PERMISSION_DENIED,
    "limit": _S.RESOURCE_EXHAUSTED,
    "busy": _S.UNAVAILABLE,
    "too_large": _S.FAILED_PRECONDITION,
    "malformed": _S.INVALID_ARGUMENT,
    "draining": _S.UNAVAILABLE,
    "unsupported": _S.FAILED_PRECONDITION,
    "quota": _S.RESOURCE_EXHAUSTED,
    "generation": _S.FAILED_PRECONDITION,
}
"""Statuses of refusals, by their codes."""

BY_TYPE: Final = {
    errors.AlreadyServed: _S.ALREADY_EXISTS,
    errors.NotServed: _S.NOT_FOUND,
    errors.ConfigError: _S.INVALID_ARGUMENT,
    errors.DirectIoUnavailable: _S.FAILED_PRECONDITION,
    errors.ReaderFailed: _S.UNAVAILABLE,
    contracts.StoreMissing: _S.NOT_FOUND,
    contracts.StoreTruncated: _S.DATA_LOSS,
    contracts.StoreCorrupt: _S.DATA_LOSS,
    contracts.StoreVersionError: _S.FAILED_PRECONDITION,
    contracts.StoreIdentityError: _S.FAILED_PRECONDITION,
    contracts.StoreGeometryError: _S.DATA_LOSS,
    contracts.SegmentError: _S.RESOURCE_EXHAUSTED,
}
"""Statuses of the other errors; what is of none of these types is INTERNAL."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def status_of(error: Exception) -> grpc.StatusCode:
    """The status of an error that a method raised."""
    if isinstance(error, errors.Refusal):
        return BY_CODE[error.code]
    if isinstance(error, OSError):
        return _S.RESOURCE_EXHAUSTED if error.errno in _FULL else _S.INTERNAL
    return next((status for kind, status in BY_TYPE.items() if isinstance(error, kind)), _S.INTERNAL)


async def explain(context: Any, method: str, error: Exception) -> NoReturn:
    """End a call with what a method raised."""
    if isinstance(error, errors.DaemonError | contracts.ContractError):
        await abort(context, status_of(error), error.subject, error.found, error.expected, error.remedy)
    found = f"{type(error).__name__}: {error}"
    await abort(context, status_of(error), method, found, "an answer", "see the log of the service")


async def abort(context: Any, code: grpc.StatusCode, subject: str, found: str, expected: str, remedy: str) -> NoReturn:
    """End a call with a typed error."""
    detail = control_pb2.ErrorDetail(subject=subject, found=found, expected=expected, remedy=remedy)
    text = f"{subject}: found {found}; expected {expected}; {remedy}"
    await context.abort(code, text, trailing_metadata=((ERROR_METADATA, detail.SerializeToString()),))
    raise AssertionError("abort returned")
