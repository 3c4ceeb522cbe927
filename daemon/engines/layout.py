"""State of an engine, io_uring's structures and the job board's, as structured dtypes."""

from typing import Final

import numpy as np

__all__ = ["BOARD", "CQE", "ENGINE", "JOB", "JOB_DONE", "JOB_FREE", "JOB_READY", "SQE", "URING"]

URING: Final = 0
BOARD: Final = 1

ENGINE = np.dtype(
    [
        ("kind", "i8"),
        ("doorbell", "i8"),  # eventfd that ends a wait
        ("depth", "i8"),
        ("unflushed", "i8"),  # submitted, not started
        ("system_calls", "i8"),
        # uring: addresses in the kernel's rings
        ("ring", "i8"),
        ("fixed", "i8"),  # reads go into registered buffer 0
        ("deferred", "i8"),  # DEFER_TASKRUN: completions appear only inside enter(GETEVENTS)
        ("armed", "i8"),  # a poll of the doorbell is in the ring
        ("sq_tail", "i8"),
        ("sq_mask", "i8"),
        ("sqes", "i8"),
        ("cq_head", "i8"),
        ("cq_tail", "i8"),
        ("cq_mask", "i8"),
        ("cqes", "i8"),
        # board: addresses of the job board
        ("done", "i8"),  # eventfd: some job is done
        ("running", "i8"),  # reads started and not reaped
        ("jobs", "i8"),  # JOB a window
        ("order", "i8"),  # u32 [order_mask + 1], windows in the order they were flushed
        ("order_mask", "i8"),
        ("flushed", "i8"),  # positions of `order` that workers may claim
        ("claimed", "i8"),  # address of the u64 that workers add to
        ("tokens", "i8"),  # eventfd (semaphore): one token a claimable job
        ("stop", "i8"),  # address of the u64 that tells workers to leave
    ]
)

# include/uapi/linux/io_uring.h
SQE = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("off", "<u8"),
        ("addr", "<u8"),
        ("len", "<u4"),
        ("rw_flags", "<u4"),
        ("user_data", "<u8"),
        ("buf_index", "<u2"),
        ("personality", "<u2"),
        ("splice_fd_in", "<i4"),
        ("pad", "<u8", (2,)),
    ]
)
CQE = np.dtype([("user_data", "<u8"), ("res", "<i4"), ("flags", "<u4")])
assert (SQE.itemsize, CQE.itemsize) == (64, 16)

JOB = np.dtype(
    [
        ("state", "<u4"),  # FREE → READY (flush) → DONE (worker) → FREE (reap)
        ("descriptor", "<i4"),
        ("address", "<i8"),
        ("length", "<i8"),
        ("offset", "<i8"),
        ("result", "<i8"),
        ("write", "<i8"),  # 0: read
        ("pad", "<u8", (2,)),
    ]
)
assert JOB.itemsize == 64
JOB_FREE, JOB_READY, JOB_DONE = 0, 1, 2
