"""``strataflux simulate``: recorded selections through every cache policy, and through the optimum."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from strataflux.client.cli.options import JsonOption
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import MisuseError
from strataflux.proto.extras import install_command

if TYPE_CHECKING:
    from strataflux.cache_policy.base import Policy
    from strataflux.cache_policy.simulate import Rates, Trace

__all__ = ["register", "simulate"]

_Results = dict[str, dict[str, dict[str, "Rates"]]]
"""Trace, capacity, policy."""


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Recorded selections (.npz).")],
    policy: Annotated[str, typer.Option(help="all, or names separated by commas; lru and belady are added.")] = "all",
    capacity: Annotated[str, typer.Option(help="Shares of the store's records, as in 5%,10%.")] = "2%,5%,10%,25%",
    fill: Annotated[str, typer.Option(help="When a miss is filled: immediate, or next-step.")] = "immediate",
    lru: Annotated[str, typer.Option(help="How LRU learns of hits: exact, or lazy (by stamps).")] = "exact",
    plot: Annotated[Path | None, typer.Option(help="Write the hit rates as a plot (needs matplotlib).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hit rates of recorded selections under each cache policy, with Belady's optimum beside them."""
    from strataflux.cache_policy.errors import UnknownPolicyError
    from strataflux.cache_policy.policies import DEFAULT, POLICIES, find_policies
    from strataflux.client.traces import load_traces

    try:
        policies = {"lru": POLICIES["lru"]} | find_policies(policy)
    except UnknownPolicyError as error:
        raise MisuseError("--policy", policy, f"all, or some of {', '.join(POLICIES)}", "separate by commas") from error
    shares = _parse_shares(capacity)
    next_step = _choice("--fill", fill, ("immediate", "next-step")) == "next-step"
    lazy = _choice("--lru", lru, ("exact", "lazy")) == "lazy"
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise MisuseError("--plot", "no matplotlib", "the extra bench", install_command("bench"))
    loaded = [trace for path in traces for trace in load_traces(path)]
    names = [trace.name for trace in loaded]
    if len(set(names)) < len(names):
        raise MisuseError("TRACE", f"files named {', '.join(names)}", "a name of its own each", "rename one")
    output = Output(as_json)
    results: _Results = {}
    with progress("simulating", len(loaded) * len(shares) * (len(policies) + 1)) as advance:
        for trace in loaded:
            results[trace.name] = {}
            for text, share in shares.items():
                slots = max(1, int(share * trace.n_keys))
                found = results[trace.name][text] = {}
                for name in [*policies, "belady"]:
                    found[name] = _rates(name, policies, trace, slots, next_step, lazy)
                    advance()
    rates = {name: _pick(found, "hit_rate") for name, found in results.items()}
    scored = [trace.name for trace in loaded if trace.scores is not None]
    weighted = {name: _pick(results[name], "weighted_hit_rate") for name in scored}
    for name in results:
        output.print(_table(f"{name}: hit rate", rates[name]))
        if name in weighted:
            output.print(_table(f"{name}: share of the selection score served", weighted[name]))
    if plot is not None:
        _plot(plot, rates)
    output.result({**rates, "weighted": weighted, "default": DEFAULT})


def register(app: typer.Typer) -> None:
    """Add ``simulate`` to the command."""
    app.command()(simulate)


def _rates(
    name: str, policies: Mapping[str, "Policy"], trace: "Trace", slots: int, next_step: bool, lazy: bool
) -> "Rates":
    from strataflux.cache_policy.simulate import lru_lazy, optimum, run

    if name == "belady":
        return optimum(trace, slots)
    if name == "lru" and lazy:
        return lru_lazy(trace, slots, next_step)
    return run(policies[name], trace, slots, next_step)


def _parse_shares(text: str) -> dict[str, float]:
    """``5%,10%`` → each text and its share."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d+)?) ?%\s*", part)
        if match is None or not 0 < float(match[1]) <= 100:
            raise MisuseError("--capacity", part, "shares above 0% and at most 100%", "write them as in 5%,10%")
        shares[part.strip()] = float(match[1]) / 100
    return shares


def _choice(option: str, text: str, known: Sequence[str]) -> str:
    if text not in known:
        raise MisuseError(option, text, " or ".join(known), "choose one of them")
    return text


def _table(title: str, by_capacity: Mapping[str, Mapping[str, float]]) -> Table:
    """Rates, in brackets the share of the gap between LRU and the optimum that a policy closes."""
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("")
    for capacity in by_capacity:
        table.add_column(capacity, justify="right")
    for policy in next(iter(by_capacity.values())):
        table.add_row(policy, *(_cell(policy, rates) for rates in by_capacity.values()))
    return table


def _cell(policy: str, rates: Mapping[str, float]) -> str:
    gap = rates["belady"] - rates["lru"]
    if gap <= 0 or policy in ("lru", "belady"):
        return f"{rates[policy]:.3f}"
    return f"{rates[policy]:.3f} ({(rates[policy] - rates['lru']) / gap:+.0%})"


def _pick(found: Mapping[str, Mapping[str, "Rates"]], rate: str) -> dict[str, dict[str, float]]:
    """One rate of each policy, by capacity."""
    return {text: {policy: getattr(r, rate) for policy, r in rates.items()} for text, rates in found.items()}


def _plot(path: Path, results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(results), 5), layout="constrained")
    for axes, (name, by_capacity) in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True
    ):
        for policy in next(iter(by_capacity.values())):
            axes.plot([*by_capacity], [rates[policy] for rates in by_capacity.values()], "o-", label=policy)
        axes.set(title=name, xlabel="capacity, share of all records", ylabel="hit rate")
        axes.legend()
    figure.savefig(path)
