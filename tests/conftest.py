"""What every test starts from: a clean environment, two threads, compiled code that is kept between runs, and kernels
through Triton's interpreter where there is no GPU.
"""

import os

import pytest

from strataflux.proto.compiled import cache_root

# Settings of the person at the keyboard, and of a service manager that may run the tests, must not reach a test.
_FOREIGN = ("XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
_KEPT = "STRATAFLUX_COMPILED_DIR"

# Named once for this process and all it starts: tests may point HOME elsewhere, and compiling anew takes minutes.
os.environ[_KEPT] = str(cache_root().absolute())

# Read by torch and OpenMP when they are first imported, here and in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "2")


def _interpret_without_gpu() -> None:
    """Triton reads this where kernels are decorated: before any module that has one is imported, whichever test is
    first.
    """
    import torch  # after the number of threads is set

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


_interpret_without_gpu()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables that would steer StrataFlux."""
    for name in list(os.environ):
        if name in _FOREIGN or (name.startswith("STRATAFLUX_") and name != _KEPT):
            monkeypatch.delenv(name)
