"""A model that decodes through a session: refined with what is there, unharmed by what happens to the daemon."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.cache_policy.miss import Skip, Wait
from strataflux.client.errors import MisuseError, RefusedError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel, RefinedSession
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.schemes import store_slot_bytes
from strataflux.proto.messages import Refuse
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon

TOKENS = [5, 80, 3, 200]


@pytest.fixture
def prepared(tmp_path: Path, tiny_source: Any) -> PreparedModel:
    return prepare(tiny_source, tmp_path / "prepared", PrepareSettings())


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory, prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(prepared.store)], ring_log2=14) as fake:
        yield fake


def attach(prepared: PreparedModel, daemon: FakeDaemon, **options: Any) -> RefinedModel:
    weights = DecoderWeights.read(prepared)
    return RefinedModel.attach(prepared, weights, context=8, runtime_dir=daemon.path.parent, **options)


def unrefined(prepared: PreparedModel) -> list[Tensor]:
    decoder = Decoder(DecoderWeights.read(prepared), 8)
    return [decoder.step(token) for token in TOKENS]


def publish_all(daemon: FakeDaemon) -> None:
    daemon.publish(0, *range(daemon.manifests[0].record_count))


def test_with_nothing_resident_it_is_the_base(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    with attach(prepared, daemon) as model:
        assert all(torch.equal(model.step(t), y) for t, y in zip(TOKENS, unrefined(prepared), strict=True))
        stats = model.stats()
        assert (stats.hits, model.steps) == (0, len(TOKENS))
        assert stats.lookups == len(daemon.take_requests()) > 0


def test_with_everything_resident_it_is_nearly_the_exact_model(
    prepared: PreparedModel, daemon: FakeDaemon, tiny_source: Any
) -> None:
    publish_all(daemon)
    exact = Decoder(DecoderWeights.read(tiny_source), 8)
    with attach(prepared, daemon, k=1024) as model:
        for token, base in zip(TOKENS, unrefined(prepared), strict=True):
            right, refined = exact.step(token), model.step(token)
            assert float((refined - right).norm()) < 0.25 * float((base - right).norm())
        assert model.stats().hits == model.stats().lookups


def test_reset_begins_another_sequence(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    publish_all(daemon)
    with attach(prepared, daemon) as model:
        first = [model.step(token) for token in TOKENS]
        model.reset()
        assert all(torch.equal(model.step(token), y) for token, y in zip(TOKENS, first, strict=True))


def test_reset_goes_back_as_far_as_it_is_told(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    publish_all(daemon)
    with attach(prepared, daemon) as model:
        first = [model.step(token) for token in TOKENS]
        model.reset(2)
        assert all(torch.equal(model.step(token), y) for token, y in zip(TOKENS[2:], first[2:], strict=True))
        with pytest.raises(MisuseError, match="position 5; expected 0 to 4"):
            model.reset(5)


def test_sequences_of_one_session_take_turns(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    publish_all(daemon)
    with attach(prepared, daemon) as model:
        alone = [model.step(token) for token in TOKENS]
    weights = DecoderWeights.read(prepared)
    session = RefinedSession.attach(prepared, weights, context=8, sequences=2, runtime_dir=daemon.path.parent)
    first, second = session.open(8), session.open(5)
    for at, token in enumerate(TOKENS):
        assert torch.equal(first.step(token), alone[at])
        if at:
            assert torch.equal(second.step(TOKENS[at - 1]), alone[at - 1])
    second.close()
    assert torch.isfinite(first.step(1)).all()
    assert len(daemon.sessions) == 1
    assert session.stats().state == "attached"
    session.close()
    assert session.stats().state == "detached"


def test_a_step_that_was_cut_off_is_run_again_unrefined(
    prepared: PreparedModel, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_all(daemon)
    base = unrefined(prepared)
    with attach(prepared, daemon) as model:
        plain, runs = model._decoder.step, list[Tensor]()

        def step(token: int) -> Tensor:
            runs.append(plain(token))
            daemon.fence()
            return runs[-1]

        monkeypatch.setattr(model._decoder, "step", step)
        assert torch.equal(model.step(TOKENS[0]), base[0])
        assert [torch.equal(run, base[0]) for run in runs] == [False, True]
        assert model.stats().steps_invalid == 1
        assert model.steps == 1


def test_a_step_that_was_cut_off_is_run_again_in_layers_with_windows(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed = prepare(tiny_source.with_config(windows=(2, 0)), tmp_path / "windowed", PrepareSettings())
    base = unrefined(windowed)
    serving = FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(windowed.store)], ring_log2=14)
    with serving as fake, attach(windowed, fake) as model:
        plain = model._decoder.step

        def step(token: int) -> Tensor:
            logits = plain(token)
            if token == TOKENS[3]:  # its position took the row of one that left the window
                fake.fence()
            return logits

        monkeypatch.setattr(model._decoder, "step", step)
        assert all(torch.equal(model.step(token), y) for token, y in zip(TOKENS, base, strict=True))
        assert model.stats().steps_invalid == 1


def test_a_daemon_that_dies_costs_refinement_of_what_was_absent_only(
    prepared: PreparedModel, daemon: FakeDaemon
) -> None:
    publish_all(daemon)
    with attach(prepared, daemon) as model:
        first = model.step(TOKENS[0])
        daemon.die()
        assert not torch.equal(model.step(TOKENS[1]), unrefined(prepared)[1])
        model.reset()
        assert torch.equal(model.step(TOKENS[0]), first)


def leave_inside_a_step(model: RefinedModel, error: BaseException | None) -> None:
    with model:
        model._session.step().__enter__()
        if error is not None:
            raise error


def test_an_interrupt_between_the_lines_of_a_step_stays_what_it_is(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    model = attach(prepared, daemon)
    with pytest.raises(KeyboardInterrupt):
        leave_inside_a_step(model, KeyboardInterrupt())
    model._session._end()
    with pytest.raises(MisuseError, match="open"):
        leave_inside_a_step(model, None)
    model._session._end()
    model.close()


def test_waiting_is_refused_where_a_set_does_not_fit(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    daemon.refuse_next = Refuse("too_large", "a set", "less", "raise weight_bytes")
    with pytest.raises(RefusedError, match="raise weight_bytes"):
        attach(prepared, daemon, miss=Wait(1.0))


def test_only_waiting_declares_its_largest_set(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    with attach(prepared, daemon, miss=Skip()):
        assert daemon.sessions[-1].hello.largest_set_bytes == 0
    # k = 1,024 takes all: 64 records of gate-up (2 · 1,088 outputs, 1,088 bytes) in slots of 1,280, or 1,088 of down
    # (64 outputs, 32 bytes) in slots of 256.
    with attach(prepared, daemon, miss=Wait(1.0), k=1024):
        assert daemon.sessions[-1].hello.largest_set_bytes == 1088 * 256


def test_budget_out_of_range(prepared: PreparedModel, daemon: FakeDaemon) -> None:
    with pytest.raises(MisuseError, match="1025"):
        attach(prepared, daemon, k=1025)


def test_slot_bytes_of_the_whole_store(prepared: PreparedModel) -> None:
    sets = 64 * 256 + 64 * 256 + 64 * 1280 + 1088 * 256
    assert store_slot_bytes(prepared.config, prepared.sets) == 2 * sets
