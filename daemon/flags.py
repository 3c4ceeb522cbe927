"""Command line of ``stratafluxd``: a few flags over the configuration file.

argparse and not a richer library: what is imported here is paid for before every READY.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strataflux.daemon.config import Config, Override, load_config

__all__ = ["Invocation", "parse_flags"]

_OVERRIDES = {
    "--runtime-dir": ("runtime_dir", "FOLDER", "folder of the sockets"),
    "--weight-cache": ("cache.weight_bytes", "SIZE", "RAM for weight records, such as 128MiB"),
    "--kv-cache": ("cache.kv_bytes", "SIZE", "RAM for KV records"),
    "--engine": ("reader.engine", "uring|threads|liburing", "how records are read"),
    "--direct-io": ("reader.direct_io", "require|prefer|off", "whether reads go past the page cache"),
    "--metrics-listen": ("metrics.listen", "ADDRESS:PORT", "serve Prometheus metrics there"),
    "--log-level": ("log.level", "LEVEL", "debug, info, warning or error"),
}


@dataclass(frozen=True)
class Invocation:
    """What was asked for. ``action`` is ``serve``, ``compile`` or ``check``."""

    action: str
    config: Config


def parse_flags(arguments: Sequence[str], version: str) -> Invocation:
    """Parse flags and the file they name.

    Raises:
        ConfigError: as :func:`load_config`.
        SystemExit: argparse's own, for --help, --version and unknown flags (code 2).
    """
    parser = argparse.ArgumentParser("stratafluxd", description="Serves refinement bits of low-bit language models.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; every key is in stratafluxd.toml")
    parser.add_argument("--store", action="append", default=[], metavar="FOLDER", help="serve this store; repeatable")
    for flag, (_, metavar, text) in _OVERRIDES.items():
        parser.add_argument(flag, metavar=metavar, help=text)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--compile", action="store_true", help="compile everything into the cache and exit")
    action.add_argument("--check-config", action="store_true", help="say whether the configuration is right and exit")
    parser.add_argument("--version", action="version", version=f"stratafluxd {version}")
    found = vars(parser.parse_args(arguments))
    overrides = []
    for flag, (key, _, _) in _OVERRIDES.items():
        value = found[flag.removeprefix("--").replace("-", "_")]
        if value is not None:
            overrides.append(Override(key, flag, value))
    config = load_config(found["config"], overrides, found["store"])
    return Invocation("compile" if found["compile"] else "check" if found["check_config"] else "serve", config)
