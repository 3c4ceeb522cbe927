"""Errors about models that are read, raised before anything is published.

InputError (strataflux.client.errors)
├── UnsupportedModel    a readable file of an architecture, tensor type or tokenizer that is not supported
└── DamagedModel        a file that is truncated, lacks a tensor, or holds numbers that are not finite

Settings outside their range raise ``MisuseError``.
"""

from strataflux.client.errors import InputError

__all__ = ["DamagedModel", "UnsupportedModel"]


class UnsupportedModel(InputError):
    """A readable file of an architecture, tensor type or tokenizer that is not supported."""


class DamagedModel(InputError):
    """A file that is truncated, lacks a tensor, or holds numbers that are not finite."""
