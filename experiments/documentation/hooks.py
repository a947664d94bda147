"""Functions that mkdocs calls while it builds the site (.mkdocs.yml)."""

from __future__ import annotations

import os
import re
from typing import Any

from mkdocs.structure.files import File, Files

from experiments.documentation import reference
from experiments.documentation.__main__ import ROOT
from experiments.documentation.links import rewritten

# documents outside of docs/ that are pages: path in the repository -> path in the site
OUTSIDE = {
    "README.md": "overview.md",
    "SECURITY.md": "security.md",
    "experiments/README.md": "benchmarks.md",
    "experiments/clients/results/summary.md": "clients.md",
    "experiments/medha/results/summary.md": "figures/medha.md",
    "experiments/tetris/results/summary.md": "figures/tetris.md",
    "experiments/mooncake/results/summary.md": "figures/mooncake.md",
    "experiments/context_parallel/results/summary.md": "figures/context_parallel.md",
}


def on_config(config: Any) -> Any:
    """Puts documents that the navigation does not name under More."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    if others := sorted({path.name for path in (ROOT / "docs").glob("*.md")} - named):
        config.nav = [*config.nav, {"More": others}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the documents from elsewhere, and the pages that are made of the code."""
    found = {place: (ROOT / path).read_text() for path, place in OUTSIDE.items()}
    found |= {f"reference/{name}.md": make() for name, make in reference.PAGES.items()}
    for place, text in found.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads links of a document to where they are on the site."""
    place = page.file.src_uri
    pages = {f"docs/{file.src_uri}": file.src_uri for file in files} | OUTSIDE
    source = next((path for path, name in OUTSIDE.items() if name == place), f"docs/{place}")
    exists = lambda path: (ROOT / path).exists()
    repository = os.environ.get("DOCS_REPOSITORY", "").rstrip("/")
    return rewritten(markdown, source, pages, exists, repository)
