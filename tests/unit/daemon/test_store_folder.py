"""The folder of imports: names that are names, leftovers of the dead, and the list of what was added."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strataflux.daemon.config import StoreConfig
from strataflux.daemon.errors import AlreadyServed, ConfigError, NotServed
from strataflux.daemon.store_folder import ADDED_FILE, StoreFolder


@pytest.fixture
def folder(tmp_path: Path) -> StoreFolder:
    return StoreFolder(tmp_path / "stores", 0)


@given(st.text(max_size=130))
def test_whatever_a_name_is_it_means_something_right_inside_the_folder_or_is_refused(name: str) -> None:
    folder = StoreFolder(Path("/stores"), 0)
    try:
        path = folder.path_of(name)
    except ConfigError:
        return
    assert path.parent == Path(os.path.normpath(path)).parent == Path("/stores")
    assert folder.holds(path)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/etc", ".hidden", ADDED_FILE, "a" * 101, "a\n", "é"])
def test_names_that_are_none(folder: StoreFolder, name: str) -> None:
    with pytest.raises(ConfigError):
        folder.path_of(name)


def test_a_link_is_not_followed(folder: StoreFolder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.path.mkdir()
    (folder.path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotServed, match="link"):
        folder.existing("link")
    assert not folder.holds(folder.path / "link")
    with pytest.raises(NotServed, match="No such file"):
        folder.existing("nothing")


def test_what_was_not_deleted_whole_goes_with_the_next_start(folder: StoreFolder) -> None:
    temporary, held = folder.begin_temporary("a")
    (temporary / "records.bin").touch()
    path = folder.publish(temporary, "a")
    os.close(held)
    hidden = folder.hide(path)
    second, held = folder.begin_temporary("a")
    assert folder.publish(second, "a") == path
    os.close(held)
    assert hidden.exists()
    assert folder.sweep() == 1
    assert [entry.name for entry in folder.path.iterdir()] == ["a"]


def test_what_the_dead_left_goes_and_what_lives_stays(folder: StoreFolder) -> None:
    living, held = folder.begin_temporary("living")
    dead, released = folder.begin_temporary("dead")
    (dead / "records.bin").write_bytes(b"half")
    os.close(released)
    (folder.path / ".other.tmp").mkdir()
    assert folder.sweep() == 1
    assert sorted(path.name for path in folder.path.iterdir()) == sorted([living.name, ".other.tmp"])
    assert folder.publish(living, "living") == folder.path / "living"
    os.close(held)
    with pytest.raises(AlreadyServed):
        folder.begin_temporary("living")


def test_a_name_that_is_taken_meanwhile(folder: StoreFolder) -> None:
    temporary, held = folder.begin_temporary("a")
    (folder.path / "a").mkdir()
    (folder.path / "a" / "file").touch()
    with pytest.raises(AlreadyServed):
        folder.publish(temporary, "a")
    os.close(held)


def test_what_was_added_is_remembered_with_its_settings(folder: StoreFolder) -> None:
    assert folder.load_added() == ()
    folder.path.mkdir()
    stores = (
        StoreConfig(folder.path / "a", preload=True),
        StoreConfig(folder.path / "b", share="uid", allow_uids=(5, 6), allow_groups=()),
    )
    folder.save_added(stores)
    assert folder.load_added() == stores
    assert [path.name for path in folder.path.iterdir()] == [ADDED_FILE]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "\xff", pytest.param(20_000 * "[", id="deep"), '{"stores": 3}', '{"stores": [{}]}'),
        *('{"stores": [{"name": "../a"}]}', '{"stores": [{"name": 5}]}'),
        *('{"stores": [{"name": "a", "rubbish": 1}]}', '{"stores": [{"name": "a", "share": "nobody"}]}'),
    ],
)
def test_a_list_that_is_none_is_told(folder: StoreFolder, text: str) -> None:
    folder.path.mkdir()
    (folder.path / ADDED_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError):
        folder.load_added()
