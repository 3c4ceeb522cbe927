"""Errors of the contracts between processes, raised on either side.

ContractError
├── SegmentError        shared memory that cannot be made, mapped or trusted
├── RingRightTaken      a ring's one Producer or one Consumer is already handed out
├── MessageError        an attach message that is too long, malformed or out of bounds
└── StoreError          a store of refinement bits that cannot be used
    ├── StoreMissing        no such folder, or no manifest in it
    ├── StoreTruncated      a file is shorter or longer than the manifest says
    ├── StoreCorrupt        bytes that do not match their checksum or digest, or do not parse
    ├── StoreVersionError   written by a newer format than this program knows
    ├── StoreIdentityError  a store of another model, quantizer or layout
    └── StoreGeometryError  records that overlap, leave holes, overflow or exceed a limit
"""

__all__ = [
    "ContractError",
    "MessageError",
    "RingRightTaken",
    "SegmentError",
    "StoreCorrupt",
    "StoreError",
    "StoreGeometryError",
    "StoreIdentityError",
    "StoreMissing",
    "StoreTruncated",
    "StoreVersionError",
]


class ContractError(Exception):
    """Base of this tree. ``subject`` is the file, segment or field; the message says what was found, what was expected
    and what to do about it.
    """

    def __init__(self, subject: object, found: str, expected: str, remedy: str) -> None:
        self.subject = str(subject)
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{subject}: found {found}; expected {expected}; {remedy}")


class SegmentError(ContractError):
    """Shared memory that cannot be made, mapped or trusted."""


class RingRightTaken(ContractError):
    """A ring's one Producer or one Consumer is already handed out."""


class MessageError(ContractError):
    """An attach message that is too long, malformed or out of bounds."""


class StoreError(ContractError):
    """A store of refinement bits that cannot be used."""


class StoreMissing(StoreError):
    """No such folder, or no manifest in it."""


class StoreTruncated(StoreError):
    """A file is shorter or longer than the manifest says."""


class StoreCorrupt(StoreError):
    """Bytes that do not match their checksum or digest, or do not parse."""


class StoreVersionError(StoreError):
    """Written by a newer format than this program knows."""


class StoreIdentityError(StoreError):
    """A store of another model, quantizer or layout."""


class StoreGeometryError(StoreError):
    """Records that overlap, leave holes, overflow or exceed a limit."""
