"""Times on a device: medians of replays of a captured graph, or of a decoder's steps."""

import statistics
import time
from collections.abc import Callable

import torch

from strataflux.client.runtime.cuda.decoder import GraphDecoder

__all__ = ["microseconds", "tokens_per_second"]


def microseconds(body: Callable[[], object], *, replays: int = 15) -> float:
    """Median time of one replay of ``body``'s graph; ``body`` runs once before it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    for _ in range(2):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events))


def tokens_per_second(
    decoder: GraphDecoder, tokens: int, rounds: int, start: int = 0, between: Callable[[], object] = lambda: None
) -> float:
    """Median over rounds of ``tokens`` steps, each appending what the one before chose, from position ``start`` on;
    ``between`` is called after each is queued, and its time counts.
    """
    rates = []
    for _ in range(rounds + 1):  # the first round warms up and does not count
        decoder.position = max(decoder.position, start)
        decoder.reset(start)
        decoder.wait()
        began = time.perf_counter()
        for _ in range(tokens):
            decoder.launch()
            between()
        decoder.wait()
        rates.append(tokens / (time.perf_counter() - began))
    return statistics.median(rates[1:])
