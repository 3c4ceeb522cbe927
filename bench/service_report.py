"""What the scripts that measure the service write beside their figures, and where."""

import datetime
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """When and on what a figure was taken."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load_average": os.getloadavg()[0],
    }


def write_report(found: Mapping[str, Any], out: Path | None) -> None:
    """One JSON object: into the file, or to stdout."""
    text = json.dumps(found, indent=1)
    if out is None:
        print(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
