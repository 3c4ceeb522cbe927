"""A session whose steps run on a device: the host begins and checks them, the device looks up and ends them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from strataflux.cache_policy.miss import Skip
from strataflux.client import attach_block
from strataflux.client.attach import Attachment, AttachRequest
from strataflux.client.keeper import Event
from strataflux.client.runtime.cuda.maps import DeviceMaps
from strataflux.client.session import Session
from strataflux.proto.messages import KvGeometry, StoreRef
from strataflux.proto.runtime import ATTACH_SOCKET, runtime_folder
from strataflux.proto.store_format import StoreManifest

__all__ = ["DeviceSession"]


class DeviceSession(Session):
    """As its base; between a step's beginning and its end exactly one launch of a step is queued, and no look-ups are
    made by the host. Waiting for misses is not for captured steps.
    """

    def __init__(self, request: AttachRequest, maps: DeviceMaps, on_event: Callable[[Event], None] | None) -> None:
        """Use :meth:`attach_device`."""
        self._maps = maps
        super().__init__(request, Skip(), on_event, None)

    @classmethod
    def attach_device(
        cls,
        stores: Sequence[StoreManifest | StoreRef],
        maps: DeviceMaps,
        *,
        selections_per_step: int,
        runtime_dir: Path | None = None,
        on_event: Callable[[Event], None] | None = None,
        kv: KvGeometry | None = None,
    ) -> "DeviceSession":
        """Attach; arguments and errors as :meth:`Session.attach`, and ``maps`` to keep true to what is mapped."""
        path = runtime_folder(runtime_dir, os.environ) / ATTACH_SOCKET
        return cls(AttachRequest(path, tuple(stores), selections_per_step, 0, "strataflux-gpu", kv), maps, on_event)

    def close(self) -> None:
        """Leave the daemon and drop all maps, the device's registrations first. Idempotent.

        Raises:
            MisuseError: inside a step.
        """
        if not self._inside:
            self._keeper.stop()  # from here on nobody else changes maps
            self._maps.close()
        super().close()

    def _open_step(self) -> None:
        super()._open_step()
        self._maps.begin(self._attachment)

    def _close_step(self) -> None:
        if not self._maps.end(self._attachment):
            self._valid = False
            self._block[attach_block.STEPS_INVALID] += np.uint64(1)
            self._attachment.hang_up()  # the keeper sees it and attaches anew

    def _change_over(self, attachment: Attachment) -> None:
        self._maps.release()
        super()._change_over(attachment)
