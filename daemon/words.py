"""The reader's own words: one row, in which compiled code keeps what belongs to no table."""

import numpy as np

__all__ = ["READER"]

READER = np.dtype(
    [
        # fixed while the loop runs
        ("page", "i8"),
        ("doorbell", "i8"),
        ("window_bytes", "i8"),
        ("depth", "i8"),
        ("sampled_hashes", "i8"),  # a record is followed if its hash is below
        ("grace_us", "i8"),
        ("idle_timeout_us", "i8"),
        ("n_tables", "i8"),
        ("n_classes", "i8"),
        ("range_pages", "i8"),
        ("kv_page", "i8"),  # first page of the KV places
        ("place_shift", "i8"),  # log2 of the policy's numbers a page of weights
        ("learns", "i8"),  # 1: the policy wants to be told of every use, and may refuse a record
        # written by Python, read by the loop
        ("commands", "i8"),
        ("intake", "i8"),  # 0: take no more requests (drain)
        # reader thread only
        ("clock", "i8"),
        ("now_us", "i8"),
        ("tick_us", "i8"),
        ("last_work_us", "i8"),
        ("in_flight", "i8"),  # reads
        ("in_flight_writes", "i8"),
        ("free_window", "i8"),
        ("queued", "i8"),
        ("free_queued", "i8"),
        ("turn", "i8"),  # of the tenant served last
        ("fullest", "i8"),  # lane that holds most of the queue,
        ("fullest_turn", "i8"),  # as found in this turn of the loop
        ("sampled", "i8"),  # rows of the sample in use
        ("sample_next", "i8"),  # row to look at next
        ("batch_first", "i8"),  # position of the oldest grace batch; MAX_BATCHES a lap
        ("batch_last", "i8"),  # position after the newest
        ("open_chain", "i8"),  # slots retired since the last fence
        ("open_count", "i8"),
        ("prefetches", "i8"),  # that wait, of all sessions; void ones included
        ("prefetch_turn", "i8"),  # of stamp_owner: who is served next
        ("unseen", "i8"),  # prefetched records that are resident and were not used yet
        ("hand_page", "i8"),  # to be looked at next for uses
        ("starved", "i8"),  # a fill had to wait or drop for want of a free slot since the last free
        ("filled_now", "i8"),  # fills published in this sweep
        # counters since start
        ("turns", "i8"),
        ("completions", "i8"),
        ("sleeps", "i8"),
        ("reads", "i8"),
        ("merged", "i8"),
        ("short_reads", "i8"),
        ("dropped_queue", "i8"),
        ("dropped_grace", "i8"),
        ("fences", "i8"),
        ("page_moves", "i8"),
        ("warmed", "i8"),  # reads of records that were resident before the start
        ("read_us_sum", "i8"),
        ("write_us_sum", "i8"),
        ("depth_sum", "i8"),
    ]
)
