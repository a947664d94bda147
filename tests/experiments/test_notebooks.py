"""Research notebooks: kept without outputs, say what they measure, run from a clean clone."""

from __future__ import annotations

import json
import re
import sys

import nbformat
import psutil
import pytest
from nbclient.exceptions import CellExecutionError

from experiments.notebooks.__main__ import main
from experiments.notebooks.execute import (
    FOLDER,
    ROOT,
    execute,
    names,
    pictures,
    read,
    with_values,
)
from experiments.notebooks.sizes import SMALL
from jaxserve.settings.schema import ConfigError
from tests.experiments.figure_checks import assert_one_line

NAMES = names()
LONG = ("deployment", "exchange", "pool", "sweep")  # run with `-m matrix` only
KEPT = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PAGE = (ROOT / "docs" / "notebooks.md").read_text()
IMAGES = ROOT / "docs" / "images" / "notebooks"


@pytest.fixture
def no_process_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    after = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(after, timeout=60)[1]


def test_every_notebook_has_a_small_size_and_a_place_on_the_page():
    assert sorted(SMALL) == NAMES
    assert set(re.findall(r"\((?:\.\./experiments/notebooks/)(\w+)\.ipynb\)", PAGE)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_outputs_and_says_what_it_is(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert notebook["metadata"] == KEPT and notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    head = "".join(notebook["cells"][0]["source"])
    for word in ("measured", "simulated", "run time", "command"):
        assert re.search(rf"^\| {word} \| .+ \|$", head, re.M), word
    assert f"python -m experiments.notebooks --only={name}`" in head


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.matrix if name in LONG else (), id=name)
        for name in NAMES
    ],
)
def test_a_notebook_runs_at_its_small_size(name, tmp_path, capsys, no_process_is_left):
    folders = [f"--pictures={tmp_path}/pictures", f"--executed={tmp_path}"]
    assert main([f"--only={name}", "--size=small", *folders]) == 0
    assert re.fullmatch(rf"{name}: \d+ s, \d+ s of CPU\n", capsys.readouterr().out)
    drawn = {file.name for file in (tmp_path / "pictures").iterdir()}
    assert drawn == {file.name for file in IMAGES.glob(f"{name}-*.png")} and drawn
    executed = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_as_it_is_written(name, no_process_is_left):
    assert list(pictures(name, execute(read(name))))


def test_pictures_of_the_page_are_those_of_notebooks():
    shown = set(re.findall(r"\(images/notebooks/([\w-]+\.png)\)", PAGE))
    assert shown == {file.name for file in IMAGES.iterdir()}
    for file in shown:
        name, _, cell = file.removesuffix(".png").partition("-")
        assert cell in [each.id for each in read(name).cells], file


def of_one_cell(code: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])


def test_a_cell_that_fails_is_told_and_nothing_is_left(no_process_is_left):
    with pytest.raises(CellExecutionError, match="gone"):
        execute(of_one_cell("raise ValueError('gone')"))


def test_kernels_that_are_installed_do_not_matter(tmp_path, monkeypatch):
    """Whoever has a kernel of that name gets this Python all the same."""
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text('{"argv": ["false"], "display_name": "Python 3", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    executed = execute(of_one_cell("import sys, jaxserve\nprint(sys.prefix)"))
    assert executed.cells[0].outputs[0].text.strip() == sys.prefix


def test_a_value_of_no_parameter_is_refused():
    with pytest.raises(ConfigError, match=r"lenght: known are .*long"):
        with_values(read("slack"), {"lenght": 1})


def test_the_command_tells_mistakes_in_one_line(capsys):
    assert main(["--only=degre"]) == 2
    assert_one_line(capsys.readouterr().err, "notebooks", "'degre' is not one of degree")
    assert main(["--size=tiny"]) == 2
    assert_one_line(capsys.readouterr().err, "notebooks", "size")
