"""Children run the code of their parent, also where the current folder has another jaxserve."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxserve.group.own_code import own_command
from tests.group.fakes import ROOT

FAKE = "import sys\nprint('another checkout', file=sys.stderr)\nsys.exit(77)\n"
# as the installed script does: the current folder is not searched
SCRIPT = "import sys\nfrom jaxserve.cli.main import main\nsys.exit(main())\n"


@pytest.fixture
def folder(tmp_path):
    """A folder with another package of our name."""
    package = tmp_path / "checkout" / "jaxserve"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE)
    return package.parent


def run(command, folder, **environment):
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "JAXSERVE_CACHE": str(folder / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def jaxserve(folder, *arguments):
    script = folder.parent / "jaxserve"
    script.write_text(SCRIPT)
    return run([sys.executable, str(script), *arguments], folder, PYTHONPATH=str(ROOT))


def test_the_folder_of_these_tests_would_take_in_a_child(folder):
    assert run([sys.executable, "-m", "jaxserve", "--version"], folder).returncode == 77


def test_a_module_is_run_from_this_code_wherever_it_is_started(folder):
    for path in ("", str(folder), f"{folder}:{ROOT}"):
        done = run(own_command("jaxserve", "--version"), folder, PYTHONPATH=path)
        assert (done.returncode, done.stdout[:9]) == (0, "jaxserve "), done.stderr


@pytest.mark.parametrize(
    "arguments, error",
    [
        (
            ("launch", "--processes=3", "--", "generate", "random:tiny", "--prompt=x"),
            "jaxserve generate: --mesh: ",
        ),
        (("cluster", "/no/such/model", "--mixed=1"), "jaxserve serve: --model: /no/such/model"),
    ],
)
def test_members_and_replicas_run_the_code_of_their_command(folder, arguments, error):
    done = jaxserve(folder, *arguments)
    assert error in done.stderr and "another checkout" not in done.stderr, done.stderr
    assert done.returncode == 2


def test_the_devices_are_looked_for_by_the_code_of_the_command(folder):
    done = jaxserve(folder, "doctor", "--model=random:tiny", "--max_model_len=64")
    assert "another checkout" not in done.stderr + done.stdout, done.stdout
