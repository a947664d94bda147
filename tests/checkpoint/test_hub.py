"""Models by hub id, from a hub on loopback: only what is needed, once, with tokens and revisions;
and the errors where it does not work."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from jaxserve import weights
from jaxserve.checkpoint.model_paths import resolve
from jaxserve.settings.schema import ConfigError
from tests.checkpoint.fake_hub import NAME, Hub, Repository, commit_of
from tests.weights.models import TINY, tensors, write_folder

NEEDED = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
}
WEIGHTS = "model-00001-of-00002.safetensors"


def model(folder: Path, seed: int) -> dict[str, bytes]:
    """Files of a repository with a small model, and what else repositories have."""
    config = replace(TINY, vocab=256)
    write_folder(folder, config, tensors(config, seed), shards=2)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": null}')
    for name in ("generation_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}" + " " * len(name))  # equal files are fetched once
    templates = {
        "chat_template.jinja": b"plain",
        "additional_chat_templates/tool_use.jinja": b"with tools",
    }
    unneeded = {
        "README.md": b"# Tiny",
        "pytorch_model.bin": b"a pickle",
        "modeling_tiny.py": b"raise SystemExit",
        "consolidated.safetensors": b"again",
        "original/model.safetensors": b"again",
        "adapter_model.safetensors": b"of another model",
    }
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return files | templates | unneeded


@pytest.fixture(scope="module")
def revisions(tmp_path_factory):
    return {
        name: model(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(("main", "v1"))
    }


@pytest.fixture
def repository(revisions):
    return Repository(revisions)


@pytest.fixture
def hub(repository):
    with Hub(repository) as hub:
        yield hub


@pytest.fixture
def jaxserve(hub, tmp_path):
    """Runs a command of jaxserve where this hub is the hub; with further variables."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        others = {name: v for name, v in os.environ.items() if not name.startswith(("HF_", "HUGG"))}
        environment = {
            **others,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "JAXSERVE_CACHE": str(tmp_path / "cache"),
            **variables,
        }
        return subprocess.run(
            [sys.executable, "-m", "jaxserve", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


def folder_of(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and done.stdout == "", done
    return done.stderr.splitlines()[-1]


def test_what_is_needed_is_downloaded_once_into_the_hubs_cache(
    jaxserve, repository, revisions, tmp_path
):
    folder = folder_of(jaxserve("fetch", NAME))
    assert folder.is_relative_to(tmp_path / "hf" / "hub") and folder.name == commit_of(
        revisions["main"]
    )
    files = [file for file in folder.rglob("*") if not file.is_dir()]
    assert {str(file.relative_to(folder)) for file in files} == NEEDED
    assert all((folder / name).read_bytes() == revisions["main"][name] for name in NEEDED)
    assert sorted(repository.got()) == sorted(NEEDED)
    weights.check(checkpoint := weights.open_checkpoint(folder), checkpoint.config)
    assert folder_of(jaxserve("fetch", NAME)) == folder
    assert len(repository.got()) == len(NEEDED)


@pytest.mark.parametrize("by_commit", [False, True])
def test_a_revision_is_a_tag_or_a_commit(jaxserve, revisions, by_commit):
    revision = commit_of(revisions["v1"]) if by_commit else "v1"
    folder = folder_of(jaxserve("fetch", NAME, f"--revision={revision}"))
    assert (folder / WEIGHTS).read_bytes() == revisions["v1"][WEIGHTS]


def test_a_revision_that_is_not_there_is_an_error_of_that_flag(jaxserve):
    message = error_of(jaxserve("fetch", NAME, "--revision=v9"))
    assert message == f"jaxserve fetch: --revision: {NAME} has no revision 'v9'"


def test_a_new_commit_is_downloaded_without_the_files_that_are_the_same(
    jaxserve, repository, revisions
):
    folder_of(jaxserve("fetch", NAME))
    repository.requests.clear()
    repository.revisions = {"main": {**revisions["main"], WEIGHTS: revisions["v1"][WEIGHTS]}}
    folder = folder_of(jaxserve("fetch", NAME))
    assert (folder / WEIGHTS).read_bytes() == revisions["v1"][WEIGHTS]
    assert repository.got() == [WEIGHTS]


def test_a_connection_that_is_cut_is_resumed(jaxserve, repository, revisions):
    data = random.Random(0).randbytes(32 * 2**20)  # the hub's library keeps pieces of 10 MiB
    repository.revisions = {"main": {**revisions["main"], WEIGHTS: data}}
    repository.cuts[WEIGHTS] = 1
    folder = folder_of(jaxserve("fetch", NAME))
    assert (folder / WEIGHTS).read_bytes() == data
    ranges = [at for method, path, at in repository.requests if method == "GET" and WEIGHTS in path]
    assert ranges == [None, f"bytes={10 * 2**20}-"]


def test_what_came_whole_before_a_failure_is_not_downloaded_again(jaxserve, repository):
    repository.broken = {WEIGHTS}
    message = error_of(jaxserve("fetch", NAME))
    assert "download from the hub failed (HfHubHTTPError: " in message and "try again" in message
    repository.broken = set()
    folder_of(jaxserve("fetch", NAME))
    assert sorted(repository.got()) == sorted([*NEEDED, WEIGHTS])


@pytest.mark.parametrize("login", ["HF_TOKEN", "saved"])
def test_a_gated_model_needs_a_token_that_has_access(jaxserve, repository, hub, tmp_path, login):
    repository.members = {"hf_alice"}
    message = error_of(jaxserve("fetch", NAME))
    assert f"it is gated: accept its terms at {hub.url}/{NAME}, then set HF_TOKEN" in message
    message = error_of(jaxserve("fetch", NAME, HF_TOKEN="hf_bob"))
    assert f"the token in use has no access: ask for it at {hub.url}/{NAME}" in message
    assert "hf_bob" not in message
    if login == "saved":
        (tmp_path / "hf" / "token").write_text("hf_alice")
        folder_of(jaxserve("fetch", NAME))
    else:
        folder_of(jaxserve("fetch", NAME, HF_TOKEN="hf_alice"))


def test_an_unknown_model_is_told(jaxserve, hub):
    message = error_of(jaxserve("fetch", "some-one/else"))
    assert f"there is no such folder, and {hub.url} has no such model, or a private one" in message


def test_offline_what_is_cached_serves_and_what_is_not_is_told(jaxserve, repository, tmp_path):
    cache = tmp_path / "hf" / "hub"
    message = error_of(jaxserve("fetch", NAME, HF_HUB_OFFLINE="1"))
    assert f"HF_HUB_OFFLINE is set, and it is not, whole, in the hub's cache {cache}" in message
    assert "(which has no models)" in message
    folder = folder_of(jaxserve("fetch", NAME))
    repository.requests.clear()
    assert folder_of(jaxserve("fetch", NAME, HF_HUB_OFFLINE="1")) == folder
    assert f"(which has {NAME})" in error_of(jaxserve("fetch", "other/one", HF_HUB_OFFLINE="1"))
    assert not repository.requests


def test_a_hub_that_cannot_be_reached_is_told_unless_the_model_is_cached(jaxserve, hub):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    message = error_of(jaxserve("fetch", NAME, **nowhere))
    assert "the hub http://127.0.0.1:1 cannot be reached" in message
    assert "download it elsewhere and give the folder instead" in message
    folder = folder_of(jaxserve("fetch", NAME))
    assert folder_of(jaxserve("fetch", NAME, **nowhere)) == folder


def test_too_little_disk_space_is_told_before_the_download(jaxserve, repository, tmp_path):
    repository.sizes[WEIGHTS] = 10**18
    message = error_of(jaxserve("fetch", NAME))
    assert "1000000000.0 GB are to be downloaded" in message and "set HF_HOME" in message
    assert repository.got() == []


@pytest.mark.parametrize(
    "ending, said", [(".safetensors", "no .safetensors files"), ("config.json", "no config.json")]
)
def test_repositories_without_a_model_are_told(jaxserve, repository, revisions, ending, said):
    files = {name: data for name, data in revisions["main"].items() if not name.endswith(ending)}
    repository.revisions = {"main": files}
    assert said in error_of(jaxserve("fetch", NAME))


def test_a_revision_of_something_else_is_refused(tmp_path):
    for source in (str(tmp_path), "smollm2-135m", "random:tiny"):
        for use in (weights.open_checkpoint, resolve):
            with pytest.raises(
                ConfigError, match=r"^revision: is for models given by a hub id, not"
            ):
                use(source, "v1")


def test_a_hub_id_serves_as_people_type_it(jaxserve):
    flags = ["--prompt=one two", "--max-tokens=4", "--temperature=0", "--max-model-len=64"]
    flags += ["--max-num-seqs=2", "--profile=none"]
    first = jaxserve("generate", "--model", NAME, *flags)
    second = jaxserve("generate", "--model", NAME, "--revision", "v1", *flags)
    offline = jaxserve("generate", "--model", NAME, *flags, HF_HUB_OFFLINE="1")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == offline.stdout != second.stdout
