"""Pictures of frames: what is drawn where."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.figure import Figure

from jaxserve.lab.research import plots
from jaxserve.lab.research.frames import TIMELINE


@pytest.fixture
def axes():
    return Figure().subplots()


def extents(collection) -> list[tuple[float, float, float, float]]:
    return [tuple(path.get_extents().extents.round(6)) for path in collection.get_paths()]


def test_chunks_of_a_step_share_its_bar_by_their_tokens(axes):
    steps = [
        (0.0, 1.0, 0, (0, 1), "long", "prefill", 0, 600),
        (0.0, 1.0, 0, (1,), "short", "prefill", 0, 100),
        (1.0, 3.0, 0, (0,), "long", "decode", 600, 1),
    ]
    rows = plots.timeline(
        axes, pd.DataFrame(steps, columns=TIMELINE), "request", {"long": "C0", "short": "C1"}
    )
    assert rows == [(0, 0), (0, 1)]
    long, short = axes.collections
    whole, part = plots.BAR, plots.BAR / 4  # 100 tokens beside half of 600
    assert extents(long) == [
        (0.0, 0.0, 1.0, whole),
        (0.0, -1.0, 1.0, pytest.approx(-1 + whole - part)),
        (1.0, 0.0, 3.0, whole),
    ]
    assert extents(short) == [
        (0.0, pytest.approx(-1 + whole - part), 1.0, pytest.approx(-1 + whole))
    ]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["lane 0", "lane 1"]
    assert axes.get_xlim() == (0.0, 3.0)


def test_stages_have_rows_of_their_own(axes):
    steps = [
        (0.0, 1.0, 0, (0,), "a", "prefill", 0, 10),
        (1.0, 2.0, 1, (0,), "a", "prefill", 0, 10),
    ]
    made = pd.DataFrame(steps, columns=TIMELINE)
    assert plots.timeline(axes, made, "kind", {"prefill": "C0"}) == [(0, 0), (1, 0)]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["stage 0 lane 0", "stage 1 lane 0"]


def test_a_front_names_the_meshes_that_none_beats(axes):
    meshes = ["spp=1,kvp=1,tp=1", "spp=2,kvp=1,tp=1", "spp=1,kvp=2,tp=1", "spp=1,kvp=1,tp=2"]
    meshes.append(meshes[-1])
    found = pd.DataFrame({"x": [1, 2, 3, 4, 5], "y": [1, 3, 2, 4, 5], "mesh": meshes})
    best = plots.front(axes, found, "x", "y", "all", "C0")
    assert list(best["x"]) == [1, 2, 4, 5]
    assert [text.get_text() for text in axes.texts] == ["one device", "spp=2", "tp=2"]


def test_a_name_is_left_out_where_it_would_hide_another(axes):
    found = pd.DataFrame({"x": [1, 1.001, 9], "y": [1, 1.001, 9], "mesh": ["tp=1", "tp=2", "tp=4"]})
    axes.plot(found["x"], found["y"])
    plots.name_meshes(axes, found, "x", "y", "C0")
    assert [text.get_text() for text in axes.texts] == ["one device", "tp=4"]


def test_regions_have_the_colours_of_all_values_also_of_those_that_are_not_there(axes):
    found = pd.DataFrame({"x": [1, 2, 1, 2], "y": [1, 1, 2, 2], "choice": ["b", "b", "c", "b"]})
    plots.regions(axes, found, "x", "y", "choice", ["a", "b", "c"])
    assert axes.collections[0].get_array().tolist() == [[1, 1], [2, 1]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "c"]
