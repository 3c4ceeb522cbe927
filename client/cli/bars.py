"""Bars of text, in a terminal's own colours; of plain characters where it has no others."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

__all__ = ["Bars", "Part"]

Part = tuple[float, str, str]
"""How much, the letter that says what it is (``v``, ``f``, ``r``, ``.``), and a style."""

_BLOCKS: Final = {"v": "█", "f": "▓", "r": "▒", ".": "░"}
_PLAIN: Final = {"v": "#", "f": "+", "r": "-", ".": "."}
_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN_LEVELS: Final = "_.-=+*%#@"


class Bars:
    """Draws for one console."""

    def __init__(self, console: Console) -> None:
        plain = console.options.ascii_only
        # fixed after construction
        self._letters = _PLAIN if plain else _BLOCKS
        self._levels = _PLAIN_LEVELS if plain else _LEVELS

    def stack(self, parts: Sequence[Part], width: int) -> Text:
        """Parts of a whole side by side, ``width`` characters in all. What is not nothing shows."""
        whole = sum(amount for amount, _, _ in parts)
        bar, left, rest = Text(), width, whole
        for number, (amount, letter, style) in enumerate(parts):
            later = sum(other > 0 for other, _, _ in parts[number + 1 :])
            count = round(left * amount / rest) if rest > 0 else 0
            count = max(min(max(count, int(amount > 0)), left - later), 0)
            bar.append(self._letters[letter] * count, style)
            left, rest = left - count, rest - amount
        bar.append(self._letters["."] * left, "dim")
        return bar

    def share(self, value: float | None, width: int, style: str = "green") -> Text:
        """A number of 0…1."""
        part = 0.0 if value is None else value
        return self.stack([(part, "v", style), (1 - part, ".", "dim")], width)

    def line(self, values: Sequence[float | None], width: int) -> Text:
        """The newest ``width`` numbers of 0…1, a character each; a blank where there is none."""
        shown = list(values)[-width:]
        levels = [" " if v is None else self._levels[round(v * (len(self._levels) - 1))] for v in shown]
        return Text("".join(levels).rjust(width), "cyan")
