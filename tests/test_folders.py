"""Folders that jaxserve keeps files in: only their owner can write to them."""

import os

import pytest

from jaxserve.folders import private_folder
from jaxserve.settings.schema import ConfigError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_folders_are_made_for_their_owner_alone(cache):
    old = os.umask(0)
    try:
        made = private_folder(cache / "a" / "b", "model")
    finally:
        os.umask(old)
    assert (
        made == cache / "a" / "b"
        and [folder.stat().st_mode & 0o777 for folder in (cache, cache / "a", made)] == [0o700] * 3
    )


def test_a_folder_of_another_user_is_refused(cache, give_away):
    cache.mkdir()
    give_away(cache)
    with pytest.raises(
        ConfigError,
        match=r"^compile_cache: .*cache belongs to another user; change its owner with chown",
    ):
        private_folder(cache / "xla", "compile_cache")
    assert not (cache / "xla").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"^model: {tmp_path}/file/folder: Not a directory"):
        private_folder(tmp_path / "file" / "folder", "model")
