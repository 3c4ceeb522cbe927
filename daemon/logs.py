"""Log lines on stderr: text for people and the journal, or one JSON object a line."""

import json
import logging
import sys
import time

from strataflux.daemon.config import LogConfig

__all__ = ["configure_logging"]


class _JsonLines(logging.Formatter):
    """One object a line; what a log collector needs and no more."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body)


def configure_logging(config: LogConfig) -> None:
    """Send this package's log to stderr; other packages speak from warnings up. Call once a process."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(levelname)s %(message)s")
    handler.setFormatter(_JsonLines() if config.json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("strataflux").setLevel(config.level.upper())
