"""What `strataflux prepare` costs: seconds and peak memory for each base, as a user runs it.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/prepare_cost.py --model MODEL > rows.jsonl

Each base is a process of its own; its peak memory is the kernel's count of resident bytes. Prints one JSON object a
base.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = "from strataflux.client.cli.main import main; main()"
BASES = ("rtn", "awq", "sqllm", "lnq")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--bases", nargs="+", default=list(BASES))
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--fit", default="auto")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="passed on to prepare; comes last")
    return parser.parse_args()


def prepare(words: list[str]) -> dict[str, Any]:
    """Run the command; its JSON, with seconds and peak memory of its process."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"prepare {' '.join(words)} failed: {said}")
    found: dict[str, Any] = json.loads(said)
    return found | {
        "seconds": time.monotonic() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": 1024 * usage.ru_maxrss,
    }


def main() -> None:
    arguments = parse()
    for base in arguments.bases:
        with tempfile.TemporaryDirectory() as folder:
            words = ["prepare", str(arguments.model), f"{folder}/out", "--base", base, "--bits", str(arguments.bits)]
            found = prepare([*words, "--fit", arguments.fit, "--json", *arguments.more])
        kept = ("base", "bits", "fit", "sets", "ladder", "bits_per_weight", "seconds", "cpu_seconds", "peak_bytes")
        row = {name: found[name] for name in kept} | {"cores": os.cpu_count(), "machine": platform.machine()}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
