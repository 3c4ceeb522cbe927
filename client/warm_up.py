"""Compile a session's whole path before it is needed."""

import numpy as np

from strataflux.client import attach_block, directory
from strataflux.proto import layout

__all__ = ["compile_path"]


def compile_path() -> None:
    """Compile the whole path on private memory, so that neither a step nor a session waits for it."""
    geometry = layout.session_geometry(layout.RING_LOG2_MIN, 0, 0)
    memory = np.zeros(2 * layout.PAGE_HEADER_BYTES + geometry.total_bytes + 8, np.uint8)
    base = layout.round_up(memory.ctypes.data, 8)
    pages = (base, base + layout.PAGE_HEADER_BYTES, base + 2 * layout.PAGE_HEADER_BYTES)
    block = attach_block.make_block(pages, layout.RING_LOG2_MIN, geometry)
    nothing = np.empty(0, np.int64)
    attach_block.announce_renewal(block)
    attach_block.begin_step(block)
    directory.look_up(block, 0, nothing, np.empty(0, np.uint8), np.empty(0, np.uint64), False)
    directory.ask_ahead(block, 0, nothing, np.empty(0, np.uint8), 1)
    directory.find_present(block, 0, nothing, np.empty(0, np.uint64))
    directory.absent_count(block, 0, nothing)
    attach_block.end_step(block)
    attach_block.announce_wait(block, 1)
    attach_block.fills_count(block)
    attach_block.end_wait(block)
    attach_block.load_prefetches(block, np.zeros((4, 2), np.uint64))
    attach_block.is_fenced(block)
    attach_block.announce_put(block, 0, 0)
    attach_block.puts_done(block)
    attach_block.put_result(block, 0)
