"""``strataflux bench decode`` and ``bench kernels``: what a GPU does with them, baselines in the same run."""

import shlex
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strataflux.client.cli.kv_options import (
    FractionOption,
    GroupOption,
    KvOption,
    KvSelectOption,
    RefineKvOption,
    parse_kv,
)
from strataflux.client.cli.options import HotTierOption, JsonOption, parse_cache
from strataflux.client.cli.output import Output
from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    import torch

    from strataflux.client.kv_options import KvOptions
    from strataflux.client.runtime.cuda.random_model import Base

__all__ = ["decode", "kernels"]

_RandomOption = Annotated[
    str, typer.Option("--random", help="Shape whose weights are drawn: llama-3.1-8b, llama-3.2-1b, qwen3-8b or -0.6b.")
]
_DeviceOption = Annotated[str, typer.Option("--device", help="cuda; these benchmarks have nothing for a CPU.")]


def decode(
    shape: _RandomOption = "llama-3.1-8b",
    device: _DeviceOption = "cuda",
    base: Annotated[list[str] | None, typer.Option(help="Repeatable; 4-bit and 3-bit.")] = None,
    k: Annotated[list[int] | None, typer.Option(help="Budget to measure at every shift; repeatable; 8, 16.")] = None,
    shift: Annotated[list[float] | None, typer.Option(help="Repeatable; 0, 0.5, 1, 1.5 and 2.")] = None,
    context: Annotated[int, typer.Option(min=0, help="Position of the first token.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a round.")] = 64,
    programs: Annotated[int, typer.Option(min=1, help="Programs that read over the link.")] = 64,
    hot_tier: HotTierOption = None,
    kv: KvOption = None,
    refine_kv: RefineKvOption = "4/4",
    group: GroupOption = 4,
    fraction: FractionOption = "1/128",
    kv_select: KvSelectOption = "step",
    as_json: JsonOption = False,
) -> None:
    """Tokens a second of whole decode steps: BF16, gemlite if installed, the base, and the base refined.

    With --kv: the base with keys and values in float16, in low bits, and refined, from --context on.
    """
    from strataflux.client.bench.decode import DecodeSetup, Row, bench_decode
    from strataflux.client.bench.long_context import LongSetup, bench_long_context
    from strataflux.client.runtime.cuda.device import explained
    from strataflux.client.runtime.cuda.random_model import shape_of
    from strataflux.client.runtime.shifted import SHIFTS

    output, bases = Output(as_json), _bases(base)
    options = None if kv is None else parse_kv(kv, refine_kv, group, fraction, False, kv_select)
    hot_bytes = 0 if hot_tier is None else _hot_bytes(hot_tier, shape, options, context + tokens)
    long = None if options is None else LongSetup(options, context, bases, tokens, hot_bytes=hot_bytes)
    setup = DecodeSetup(
        bases=bases,
        budgets=tuple(k) if k else (8, 16),
        shifts=tuple(shift) if shift else SHIFTS,
        start=context,
        tokens=tokens,
        programs=programs,
        hot_bytes=hot_bytes,
    )
    chosen = _cuda(device)

    def told(row: Row) -> None:
        output.print(", ".join(f"{key} {_short(value)}" for key, value in row.items()))

    with explained("bench decode"):
        if long is None:
            rows = bench_decode(shape_of(shape), setup, chosen, told)
        else:
            rows = bench_long_context(shape_of(shape), long, chosen, told)
    output.result({"shape": shape, "rows": rows, **_where(chosen)})


def _bases(asked: list[str] | None) -> "tuple[Base, ...]":
    from strataflux.client.runtime.cuda.random_model import BASES

    for name in asked or ():
        if name not in BASES:
            raise MisuseError("--base", repr(name), ", ".join(BASES), "choose among these")
    return tuple(asked) if asked else ("4-bit", "3-bit")  # type: ignore[arg-type]


def _hot_bytes(asked: str, shape: str, kv: "KvOptions | None", context: int) -> int:
    from strataflux.client.runtime.cuda.random_model import shape_of
    from strataflux.client.runtime.models import SETS
    from strataflux.client.schemes import store_slot_bytes

    config = shape_of(shape)
    whole = store_slot_bytes(config, SETS) if kv is None else kv.slots_of(config, context)
    return parse_cache(asked, whole, "--hot-tier")


def kernels(
    shape: _RandomOption = "llama-3.1-8b",
    device: _DeviceOption = "cuda",
    k: Annotated[int, typer.Option(min=1, max=1024, help="Channels per 1,024 that refinement reads.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Microseconds of each GPU kernel at a model's shapes."""
    from strataflux.client.bench.gpu_kernels import bench_kernels
    from strataflux.client.runtime.cuda.device import explained
    from strataflux.client.runtime.cuda.random_model import shape_of

    output = Output(as_json)
    chosen, rows = _cuda(device), []
    with explained("bench kernels"):
        for row in bench_kernels(shape_of(shape), k, chosen):
            rows.append(row)
            output.print(", ".join(f"{key} {_short(value)}" for key, value in row.items()))
    output.result({"shape": shape, "rows": rows, **_where(chosen)})


def _cuda(device: str) -> "torch.device":
    from strataflux.client.runtime.cuda.device import require_cuda

    if device != "cuda":
        raise MisuseError("--device", repr(device), "cuda", "strataflux bench lookup measures a CPU")
    return require_cuda()


def _where(device: "torch.device") -> dict[str, Any]:
    """Machine, versions, date and command: what a row of results needs beside its numbers."""
    import torch
    import triton

    from strataflux import __version__

    return {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "strataflux": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["strataflux", *sys.argv[1:]]),
    }


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
