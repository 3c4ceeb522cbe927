"""The race: the same records, the same RAM, through StrataFlux and through what one would use in its place."""
