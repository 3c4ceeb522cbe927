"""Check every byte of a prepared model: weights against their digest, records against their checksums."""

import numpy as np

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.proto.checksum import crc32c_rows
from strataflux.proto.errors import StoreCorrupt
from strataflux.proto.store_format import load_checksums, open_store

__all__ = ["verify_prepared"]


def verify_prepared(prepared: PreparedModel) -> None:
    """Read all of ``prepared`` once, one section of the store in memory at a time.

    Raises:
        InputError: the resident weights are not those the store was made for.
        ContractError: the store is damaged, or belongs to another model.
    """
    prepared.verify()
    store = open_store(prepared.store, prepared.manifest.digest)
    expected = load_checksums(store)
    records = np.memmap(store.records_path, np.uint8, "r")
    for section in store.sections:
        rows = records[section.offset : section.offset + section.count * section.stride]
        found = np.empty(section.count, np.uint32)
        packed = rows.reshape(section.count, section.stride)[:, : section.record_bytes]
        crc32c_rows(np.ascontiguousarray(packed), found)
        bad = np.flatnonzero(found != expected[section.first_oid : section.first_oid + section.count])
        if bad.size:
            raise StoreCorrupt(
                store.records_path,
                f"{bad.size} records of {section.name} that do not match their checksums",
                "records as they were written",
                "prepare the model again",
            )
