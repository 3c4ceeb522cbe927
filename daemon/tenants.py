"""Tenants towards the reader: each one's share of the reads, and what it may put on disk. The reader thread only.

A tenant is a group of users that the configuration names. Row 0 of the core's tenants is everybody else.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from strataflux.daemon.config import TenantConfig
from strataflux.daemon.errors import Refusal
from strataflux.daemon.rows import TENANT, TENANT_TURN
from strataflux.daemon.state import Core

__all__ = ["OTHERS", "TenantTable"]

OTHERS = "others"
"""The name of row 0 towards operators."""


class TenantTable:
    """Rows of the core by name."""

    def __init__(self, core: Core) -> None:
        # fixed after construction
        self._core = core
        # reader thread only
        self._rows: dict[str, int] = {}
        self._settings: dict[str, TenantConfig] = {}

    def apply(self, tenants: Sequence[TenantConfig]) -> None:
        """These are the tenants from now on. Sessions of one that is not among them are everybody else's."""
        wanted = {tenant.name: tenant for tenant in tenants}
        for name in self._rows.keys() - wanted.keys():
            self._empty(self._rows.pop(name))
        free = (row for row in range(1, len(self._core.tenants)) if row not in self._rows.values())
        for name in wanted.keys() - self._rows.keys():
            self._rows[name] = number = next(free)
            self._core.tenants[number] = np.zeros(1, TENANT)[0]
        for name, tenant in wanted.items():
            self._core.tenants[self._rows[name]]["stride"] = TENANT_TURN // tenant.share
        self._settings = wanted

    def row_of(self, name: str) -> int:
        """Row of a tenant; 0 for a name that is none."""
        return self._rows.get(name, 0)

    def join(self, name: str, session: int) -> None:
        """A session of that tenant begins: its lane is empty."""
        self._core.lanes[session]["tenant"] = self.row_of(name)

    def names(self) -> Iterator[tuple[str, int]]:
        """Each tenant and its row, everybody else first; nothing where no tenant is configured."""
        if self._rows:
            yield OTHERS, 0
            rows = list(self._rows.items())  # in one go: statistics are taken by other threads
            yield from sorted(rows)

    def check_disk(self, name: str, held: int, wanted: int) -> None:
        """Whether a tenant whose sessions hold ``held`` bytes of KV blocks may have ``wanted`` more.

        Raises:
            Refusal: that would exceed its quota.
        """
        settings = self._settings.get(name)
        if settings is not None and held + wanted > settings.kv_file_bytes:
            raise Refusal(
                "quota",
                f"KV blocks of tenant {name}",
                f"{held} bytes held, {wanted} wanted",
                f"at most {settings.kv_file_bytes} bytes (tenant.kv_file_bytes)",
                "drop a sequence, or raise the tenant's quota",
            )

    def _empty(self, number: int) -> None:
        """Its lanes go to everybody else."""
        lanes, tenants = self._core.lanes, self._core.tenants
        mine = lanes["tenant"] == number
        tenants[0]["queued"] += lanes["queued"][mine].sum()
        lanes["turn"][mine] = tenants[0]["lane_turn"]
        lanes["tenant"][mine] = 0
        tenants[number]["queued"] = 0
