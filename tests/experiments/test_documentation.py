"""The documentation as a site: it is built without a warning, links lead somewhere, and the
reference has what the code has."""

from __future__ import annotations

import html
import re
from types import SimpleNamespace

import pytest

from experiments.documentation import __main__ as documentation
from experiments.documentation.links import rewritten

PAGES = {
    "docs/a.md": "a.md",
    "docs/images/x.png": "images/x.png",
    "README.md": "overview.md",
    "sub/README.md": "sub/page.md",
}
FILES = {*PAGES, "kernels/ops.py"}


def led(text: str, source: str = "docs/a.md", repository: str = "") -> str:
    return rewritten(text, source, PAGES, FILES.__contains__, repository)


@pytest.mark.parametrize(
    "text, source, expected",
    [
        ("[b](../README.md#use)", "docs/a.md", "[b](overview.md#use)"),
        ("[b](docs/a.md)", "README.md", "[b](a.md)"),
        ("[b](../docs/a.md#x)", "sub/README.md", "[b](../a.md#x)"),
        ('<img src="docs/images/x.png">', "README.md", '<img src="images/x.png">'),
        ("[`ops`](../kernels/ops.py)", "docs/a.md", "`ops`"),
        ("[b](https://example.org), [c](#here)", "docs/a.md", None),
        ("```\n[b](../kernels/ops.py)\n```", "docs/a.md", None),
        ("[b](missing.md)", "docs/a.md", None),  # mkdocs tells of it
    ],
)
def test_links_lead_to_where_things_are_on_the_site(text, source, expected):
    assert led(text, source) == (text if expected is None else expected)


def test_other_files_are_linked_in_the_repository_where_it_is_known():
    repository = "https://example.org/jaxserve/blob/main"
    assert led("[b](../kernels/ops.py)", repository=repository) == (
        f"[b]({repository}/kernels/ops.py)"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    out = tmp_path_factory.mktemp("site")
    assert documentation.build(str(out)) == 0
    return out


def test_the_reference_has_what_the_code_has(site):
    page = lambda name: (site / "reference" / f"{name}.html").read_text()
    text = lambda name: html.unescape(re.sub("<[^>]+>", "", page(name)))
    assert {"--kv_cache_dtype=auto|fp8", "--[no]insecure"} <= set(text("flags").split())
    assert "jaxserve soak" in text("flags")
    assert "POST /v1/chat/completions" in text("http_fields") and "slo_class" in text("http_fields")
    assert "rpc Generate(GenerateRequest)" in text("grpc")
    assert "jaxserve:goodput_requests" in text("metrics")
    assert "jaxserve:event_loop_lag_seconds" in text("metrics")
    assert "llama3.1-405b" in text("models")
    assert "that needs striped or zigzag" in text("combinations")


def test_diagrams_are_drawn_and_documents_from_elsewhere_are_pages(site):
    assert '<pre class="mermaid">' in (site / "architecture.html").read_text()
    assert "Whom we defend against" in (site / "security.html").read_text()


@pytest.mark.parametrize(
    "text, told",
    [("[b](missing.md)", "missing.md"), ("[b](index.md#nothing)", "#nothing"), ("# Here", "")],
)
def test_a_link_that_leads_nowhere_ends_the_build(text, told, tmp_path, capfd):
    pytest.importorskip("material")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(text)
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {documentation.CONFIG}\n"
        "docs_dir: docs\nnav: [index.md]\nhooks: []\nextra_css: []\ntheme: {name: mkdocs}\n"
    )
    assert documentation.build(str(tmp_path / "site"), config=config) == int(bool(told))
    assert told in capfd.readouterr().err


def test_what_the_navigation_does_not_name_is_under_more():
    pytest.importorskip("mkdocs")
    from experiments.documentation import hooks

    given = ["index.md", {"Operate": ["operations.md"]}]
    *named, more = hooks.on_config(SimpleNamespace(nav=given)).nav
    assert named == given
    assert "kernels.md" in more["More"] and "operations.md" not in more["More"]


def test_a_wrong_flag_is_one_line(capsys):
    assert documentation.main(["--uot=x"]) == 2
    assert "unknown flag --uot; did you mean --out?" in capsys.readouterr().err
