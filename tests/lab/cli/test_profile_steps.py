"""`jaxserve profile`, from its flags to its tables and its file."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from jaxserve.cli import main as cli
from jaxserve.engine.profiling import profile_file
from jaxserve.lanes.choice import Correction, MoveTimes
from jaxserve.settings.schema import ConfigError

FLAGS = (
    "--model=random:tiny",
    "--planner=cdsp",
    "--placement=striped",
    "--max_model_len=300",
    "--pages=40",
    "--block_size=8",
    "--max_seqs=2",
    "--chunk_tokens=16",
    "--min_chunk=16",
    "--longest=300",
    "--repeats=1",
    "--compile_cache=",
)


@pytest.mark.parametrize("lanes", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_a_profile_of_lanes_says_what_moves_of_pages_take(lanes, tmp_path, capsys):
    """Steps that move pages run in turn with the same ones without, and the errors of predictions
    of them are printed; a profile from before they were measured is refused."""
    file = tmp_path / "profile.json"
    assert cli.main(["profile", f"--out={file}", f"--mesh=kvp={lanes}", *FLAGS]) == 0
    out = capsys.readouterr().out
    table = out.split("steps with moves of pages on several lanes")[1]
    sizes = [size for size in (2, 4) if size <= lanes]
    assert re.search("".join(rf"gather +{size} +\S+%\n" for size in sizes), table)
    assert "and the same without" in table
    kept = json.loads(file.read_text())
    moved = [point for point in kept["points"] if point["moves"]]
    assert {point["group_size"] for point in moved} == {*sizes}
    assert all(point["unmoved"] > 0 and "moves" in point["shape"] for point in moved)
    assert set(kept["move_held_out_error"]) == {f"gather on {size}" for size in sizes}
    times = kept["move_times"]
    expected = None
    if times is not None:  # else links say as much
        expected = MoveTimes(Correction(times["seconds"], times["factor"]), times["hidden"])
    names = itertools.takewhile(lambda name: name != "fitted_error", kept)
    identity = {name: kept[name] for name in names}
    assert profile_file.read(file, identity).move_times == expected
    older = {**kept, "format": 8}
    del older["move_times"]
    file.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match="measured with format 8; here it is"):
        profile_file.read(file, identity)
