"""Take the picture of the page that the docs show: a real model that decodes through a daemon, in a headless Chromium.

    python bench/page.py PREPARED docs/img/page.png

PREPARED is a prepared model (``strataflux prepare``). It decodes Python's own help with a cache of a quarter of its
records and a KV cache in two bits, and reads ahead, for as long as the page's charts are wide.
"""

import argparse
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from strataflux.client.dashboard.sampler import Sampler
from strataflux.client.dashboard.server import DashboardServer
from strataflux.client.evaluate.text import python_prose
from strataflux.client.kv_options import KvOptions
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.schemes import store_slot_bytes
from strataflux.client.serve.listen import address_of, listen

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
CONTEXT, PREFILLED = 2048, 512
MOST_BYTES = 200_000
KV = KvOptions(2, 2)


def decode(prepared: PreparedModel, runtime_dir: Path, ended: threading.Event) -> None:
    """Until ``ended``, one window of text after the other."""
    weights = DecoderWeights.read(prepared)
    tokens = prepared.tokenizer().encode(python_prose()).ids
    with (
        decoding_threads(),
        RefinedModel.attach(prepared, weights, context=CONTEXT, runtime_dir=runtime_dir, kv=KV, ahead=1.0) as model,
    ):
        for first in range(0, len(tokens) - CONTEXT, CONTEXT):
            model.reset()
            model.prefill(tokens[first : first + PREFILLED])
            for token in tokens[first + PREFILLED : first + CONTEXT - 1]:
                if ended.is_set():
                    return
                model.step(token)


def photograph(url: str, out: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--window-size=1200,1220", "--virtual-time-budget=3000", f"--user-data-dir={profile}"]
        subprocess.run([*command, f"--screenshot={out}", url], check=True, capture_output=True)
    if out.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{out}: {out.stat().st_size} bytes; at most {MOST_BYTES} are kept in the repository")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=75.0)
    arguments = parser.parse_args()
    prepared = open_prepared(arguments.prepared)
    ended = threading.Event()
    daemon = PrivateDaemon(
        [prepared.store],
        weight_cache_bytes=store_slot_bytes(prepared.config, prepared.sets) // 4,
        kv_cache_bytes=KV.daemon_bytes(prepared.config, KV.slots_of(prepared.config, CONTEXT) // 10),
    )
    with daemon, listen("127.0.0.1", 0) as bound:
        sampler = Sampler(daemon.runtime_dir, 1.0)
        with DashboardServer(bound, sampler) as server:
            sampler.start()
            threads = [
                threading.Thread(target=server.serve_forever),
                threading.Thread(target=decode, args=(prepared, daemon.runtime_dir, ended)),
            ]
            for thread in threads:
                thread.start()
            try:
                ended.wait(arguments.seconds)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                photograph(f"{address_of(bound)}/", arguments.out)
            finally:
                ended.set()
                server.shutdown()
                for thread in threads:
                    thread.join()
                sampler.stop()
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
