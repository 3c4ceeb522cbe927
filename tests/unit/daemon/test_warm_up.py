"""What ``stratafluxd --compile`` leaves to be compiled while it serves: nothing that the reader thread runs."""

import subprocess
import sys

_LIFE = """
from strataflux.daemon import generation, requests, segments
from strataflux.daemon.warm_up import warm_up
late = [generation.empty_table, generation.release_class, requests.drop_table, segments.drain_segment]
assert not any(function.signatures for function in late)
warm_up()
print([function.__name__ for function in late if not function.signatures])
"""


def test_giving_stores_and_memory_back_is_compiled_before() -> None:
    said = subprocess.run([sys.executable, "-c", _LIFE], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
