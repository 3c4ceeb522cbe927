"""``stratafluxd``: parse, start, serve, and the only place that turns an end into an exit code.

0: served and stopped, or did what was asked. 1: failed while serving. 2: refused to start; nothing was left behind.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from strataflux import __version__
from strataflux.daemon.config import Config
from strataflux.daemon.errors import ConfigError, DaemonError
from strataflux.daemon.flags import parse_flags
from strataflux.daemon.logs import configure_logging
from strataflux.proto.errors import ContractError

__all__ = ["main"]

_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the service; returns its exit code."""
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        invocation = parse_flags(words, __version__)
        configure_logging(invocation.config.log)
        if invocation.action == "check":
            print("configuration is right")
        elif invocation.action == "compile":
            _load_assembly().compile_everything(invocation.config)
        else:
            _serve(invocation.config, lambda: parse_flags(words, __version__).config)
    except (DaemonError, ContractError) as error:
        _explain(error)
        return _REFUSED
    return 0


def _serve(config: Config, read_config: Callable[[], Config]) -> None:
    from strataflux.daemon.server import Server

    assembly = _load_assembly()
    server = Server(config, os.environ, assembly.open_stores, assembly.make_reader, read_config=read_config)
    asyncio.run(server.run())


def _load_assembly() -> ModuleType:
    """Import compiled code; late, because whoever mistyped a key need not wait for it.

    Raises:
        ConfigError: its folder cannot be trusted or used.
    """
    try:
        from strataflux.daemon import assembly
    except RuntimeError as error:
        from strataflux.proto.compiled import CompiledCacheError

        if not isinstance(error, CompiledCacheError):
            raise
        remedy = "mend it, or set STRATAFLUX_COMPILED_DIR"
        raise ConfigError("compiled code", str(error), "a folder that is private to this user", remedy) from error
    return assembly


def _explain(error: DaemonError | ContractError) -> None:
    """Say what stands in the way: subject, found, expected, remedy."""
    lines = (
        f"stratafluxd: error: {error.subject}",
        f"  found:    {error.found}",
        f"  expected: {error.expected}",
        f"  remedy:   {error.remedy}",
    )
    print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
