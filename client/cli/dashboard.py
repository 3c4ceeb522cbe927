"""``strataflux dashboard``: a page about a daemon, for a browser on this machine."""

import os
from typing import Annotated

import typer

from strataflux.client.cli.options import JsonOption, RuntimeDirOption
from strataflux.client.cli.output import Output, print_note
from strataflux.proto.runtime import runtime_folder

__all__ = ["dashboard", "register"]


def dashboard(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8765,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve one page that shows a daemon live, until a signal: hit rates, tokens/s, misses by layer, the cache.

    The page needs nothing from elsewhere and can change nothing. From another machine: ssh -L 8765:127.0.0.1:8765 HOST.
    """
    from strataflux.client.dashboard.sampler import Sampler
    from strataflux.client.dashboard.server import DashboardServer
    from strataflux.client.serve.listen import address_of, listen

    output = Output(as_json)
    sampler = Sampler(runtime_folder(runtime_dir, os.environ), interval)
    with listen(host, port) as bound, DashboardServer(bound, sampler) as server:
        try:
            sampler.start()
            if not server.loopback:
                print_note(f"whoever reaches {address_of(bound)} may look at it")
            output.print(f"the page is at {address_of(bound)}/")
            output.result({"url": f"{address_of(bound)}/"})
            server.serve_forever()
        finally:
            sampler.stop()


def register(app: typer.Typer) -> None:
    """Add ``dashboard``."""
    app.command()(dashboard)
