import io

from jaxserve.cli.display import Streams, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_table_lines_up():
    assert table(["name", "n"], [["a", "100"], ["longer", "2"]]).splitlines() == [
        "name      n",
        "------  ---",
        "a       100",
        "longer    2",
    ]


def test_without_a_terminal_whole_lines_come_with_the_name_of_their_stream():
    out = io.StringIO()
    view = Streams(["a", "long"], out)
    view.note("a", "begins")
    view.add("a", "one two\nthr")
    view.add("long", "word " * 20)
    view.add("a", "ee")
    view.end("a", "done")
    view.close()
    first, second, third, *rest = out.getvalue().splitlines()
    assert (first, second, rest) == (
        "a    | [begins]",
        "a    | one two",
        ["a    | three", "a    | [done]"],
    )
    assert third == "long | " + " ".join(["word"] * 15)


def test_on_a_terminal_the_picture_is_drawn_in_place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    view = Streams(["a", "b"], out)
    view.add("a", "hello")
    view.add("b", "there")
    view.close()
    first, second = out.getvalue().split("\x1b[6A")
    assert "hello" in first and "there" not in first
    assert [line.removeprefix("\x1b[2K") for line in second.splitlines()] == [
        "a | ",
        "  | hello",
        "b | ",
        "  | there",
        "\x1b[J",
    ]
