"""What an attached model has of a daemon: a session, what refines its projections, and room for low-bit sequences."""

import logging
from dataclasses import dataclass
from typing import Final

from strataflux.cache_policy.miss import Wait
from strataflux.client.bundles import make_refiner
from strataflux.client.errors import DaemonUnavailableError, RefusedError
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import blocks_for
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.session import Session
from strataflux.client.transformers.cache import KvPool
from strataflux.client.transformers.options import AttachOptions
from strataflux.client.transformers.projections import StepRefinement
from strataflux.client.weights import step_demand
from strataflux.proto.messages import StoreRef

__all__ = ["Service", "open_service"]

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """Without a session nothing is refined; a low-bit cache works all the same."""

    session: Session | None
    refinement: StepRefinement
    pool: KvPool | None


def open_service(prepared: PreparedModel, context: int, options: AttachOptions) -> Service:
    """Attach to the daemon that serves ``prepared``; where none does, say so once and go on without.

    Fetch lead and lag are not used: each projection is refined by its own input, when it is computed.

    Args:
        prepared: the model.
        context: positions of each low-bit sequence; 0 where there are none.
        options: the rest.

    Raises:
        MisuseError: ``k`` is out of range, or there is no such KV format.
        DaemonUnavailableError, RefusedError: no daemon serves this model, if one is required.
    """
    bundles = prepared.manifest.mlp_scheme == "bundles"
    try:
        session = _attach(prepared, context, options)
    except (DaemonUnavailableError, RefusedError) as error:
        if options.require_daemon:
            raise
        _LOG.warning("not refined: %s: %s; %s", error.subject, error.found, error.remedy)
        pool = _pool(None, prepared, context, options)
        return Service(None, StepRefinement(None, bundles=bundles), pool)
    try:
        refiner = make_refiner(session, 0, prepared, options.k)
        return Service(session, StepRefinement(refiner, bundles=bundles), _pool(session, prepared, context, options))
    except BaseException:
        session.close()
        raise


def _attach(prepared: PreparedModel, context: int, options: AttachOptions) -> Session:
    kv, miss = options.kv, options.miss
    demands = [step_demand(prepared, options.k, dict.fromkeys(prepared.manifest.shift, 0.0))]
    demands += [] if kv is None else [kv.demand(prepared.config, context)]
    return Session.attach(
        [StoreRef(prepared.manifest.digest, prepared.manifest.identity)],
        selections_per_step=max(1, options.sequences * sum(demand.selections for demand in demands)),
        largest_set_bytes=max(demand.largest_set_bytes for demand in demands) if isinstance(miss, Wait) else 0,
        runtime_dir=options.runtime_dir,
        miss=miss,
        client="transformers",
        kv=None if kv is None else kv.geometry(prepared.config, options.sequences * blocks_for(context)),
    )


def _pool(session: Session | None, prepared: PreparedModel, context: int, options: AttachOptions) -> KvPool | None:
    kv = options.kv
    if kv is None:
        return None
    puts = None if session is None else session.kv
    blocks = KvBlocks(prepared.config, kv.form(prepared.config.head_dim), options.sequences * blocks_for(context), puts)
    seconds = options.miss.deadline_seconds if isinstance(options.miss, Wait) else 0.0
    selection = session if kv.select_lag else None, kv.kept_steps
    return KvPool(blocks, context, kv.fraction, session, 0 if puts is None else puts.table, seconds, *selection)
