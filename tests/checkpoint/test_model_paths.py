"""Paths of models: no URLs, and no folder that others could have written to."""

import pytest

from jaxserve.checkpoint.fetch import fetch
from jaxserve.checkpoint.model_paths import CheckpointError, resolve
from jaxserve.cli import main as cli
from jaxserve.settings.schema import ConfigError
from jaxserve.weights.checkpoint import open_checkpoint


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("open_mode", [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize("which", ["", "models", "models/tiny"])
def test_a_folder_that_others_can_write_to_is_refused_with_what_to_do(cache, which, open_mode):
    (cache / "models" / "tiny").mkdir(parents=True)
    wrong = cache / which
    for folder in (cache, cache / "models", cache / "models" / "tiny"):
        folder.chmod(0o755)
    assert resolve("tiny") == fetch("tiny") == cache / "models" / "tiny"
    wrong.chmod(open_mode)
    for use in (resolve, fetch):
        with pytest.raises(
            ConfigError, match=rf"^model: {wrong} is writable by other users.*chmod go-w {wrong}$"
        ):
            use("tiny")
    wrong.chmod(0o755)
    assert resolve("tiny")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data",
        "https://example.org/m.gguf",
        "s3://b/m",
    ],
)
def test_nothing_is_loaded_from_a_url(cache, capsys, url):
    for use in (resolve, open_checkpoint):
        with pytest.raises(
            CheckpointError, match="is a URL, and nothing is loaded from one; give a path"
        ):
            use(url)
    assert cli.main(["generate", "--prompt=x", f"--model={url}"]) == 2
    assert capsys.readouterr().err == (
        f"jaxserve generate: --model: {url!r} is a URL, and nothing is loaded from one; "
        "give a path, a fetched name or a hub id\n"
    )
    assert not cache.exists()


@pytest.mark.parametrize(
    "name", ["../models", "..", "a/../b", "hub--a--b/../../x", "a/b/c", "/no/such", "a\0b"]
)
def test_a_name_leads_nowhere_but_into_the_cache(cache, name, tmp_path, monkeypatch):
    (tmp_path / "deep" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "here")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError):
        fetch(name)
    with pytest.raises(CheckpointError):
        open_checkpoint(name)
    assert sorted(tmp_path.rglob("*")) == before
