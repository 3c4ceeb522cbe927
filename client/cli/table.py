"""One table for all commands that compare ways to decode."""

from collections.abc import Mapping

from rich.table import Table

from strataflux.client.evaluate.compare import COLD_TOKENS, Row

__all__ = ["comparison_table"]


def comparison_table(rows: Mapping[str, Row]) -> Table:
    """Perplexity, divergence, speed, hit rates and bytes read of each row, by name."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("perplexity", "KL", f"KL after {COLD_TOKENS}", "tokens/s", "hit rate", "KV hits", "MB read"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.score.perplexity:.2f}",
            _shown(row.kl, ".3f"),
            _shown(row.kl_without_first_64, ".3f"),
            _shown(row.tokens_per_second, ".1f"),
            _shown(row.weight_hit_rate, ".1%"),
            _shown(row.kv_hit_rate, ".1%"),
            _shown(None if row.bytes_read is None else row.bytes_read / 1e6, ".1f"),
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
