"""A step captured as one CUDA graph and replayed for each token; on a device without graphs, queued anew each time."""

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cache import check_truncation
from strataflux.client.runtime.cuda.step import Step
from strataflux.client.runtime.decoder import ContextFull

__all__ = ["GraphDecoder"]


class GraphDecoder:
    """Decodes one sequence. Not safe for use from two threads.

    Pairs: :meth:`launch` / :meth:`wait`; what a launch leaves in the step's buffers is there after the wait.
    """

    def __init__(self, step: Step) -> None:
        """Run the step once, which compiles its kernels, and capture it. The step's refinement must reach nobody yet:
        the first run is no step of any session.
        """
        # fixed after construction
        self.step = step
        self._cuda = step.model.device.type == "cuda"
        self._graph = self._capture() if self._cuda else None
        # changed by launches
        self.position = 0
        self.reset()

    @torch.inference_mode()
    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self.step.sampler.random is not None:
            graph.register_generator_state(self.step.sampler.random)
        # Other threads may register memory meanwhile, which has nothing to do with what is captured.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step.run()
        return graph

    def reset(self, position: int = 0) -> None:
        """Forget all tokens from ``position`` on.

        Raises:
            MisuseError: it is not within 0…``self.position``, or the cache cannot go back there.
        """
        check_truncation(position, self.position)
        self.step.attention.truncate(position)
        self.position = position
        self.step.position.fill_(position)

    @torch.inference_mode()
    def launch(self, token: int | None = None) -> None:
        """Queue a step that appends ``token``, or else the one that the step before chose. Does not wait for it.

        Raises:
            ContextFull: all positions are taken. MisuseError: no such token. Nothing has changed in either case.
        """
        if self.position == self.step.attention.context:
            raise ContextFull("decoder cache", f"position {self.position}", f"less than {self.position}", "--context")
        vocabulary = self.step.model.config.vocabulary
        if token is not None:
            if not 0 <= token < vocabulary:
                raise MisuseError("token", f"{token}", f"0 to {vocabulary - 1}", "use the model's tokenizer")
            self.step.token.fill_(token)
        self.step.attention.begin_step(self.position)
        self.position += 1
        if self._graph is None:
            self.step.run()
        else:
            self._graph.replay()

    def wait(self) -> None:
        """Wait until everything that was launched has ended."""
        if self._cuda:
            torch.cuda.synchronize()

    @property
    def token(self) -> int:
        """The token that the last step chose; waits for it."""
        return int(self.step.token)

    @property
    def logits(self) -> Tensor:
        """Of the last step: [vocabulary] float32 on the host, a new tensor; waits for it."""
        return self.step.logits.float().cpu()
