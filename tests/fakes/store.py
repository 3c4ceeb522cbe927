"""Small stores whose bytes a test can tell apart."""

from pathlib import Path

import numpy as np

from strataflux.proto.store_format import SectionSpec, StoreManifest
from strataflux.proto.store_writer import StoreWriter


def make_store(folder: Path, *, records: int, record_bytes: int, name: str = "test", layers: int = 1) -> StoreManifest:
    """A published store: ``layers`` sections of ``records`` random records, the same for the same arguments."""
    sections = [SectionSpec(f"{n}.qkv", "weight_channel", n, "qkv", records, record_bytes) for n in range(layers)]
    data = np.random.default_rng(len(name)).integers(0, 256, (layers, records, record_bytes)).astype(np.uint8)
    with StoreWriter(folder, {"model": name}, sections) as writer:
        for layer in range(layers):
            writer.write(layer, 0, data[layer])
        return writer.publish()
