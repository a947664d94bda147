"""Links of the documents, which name files of the repository, as links of the site.

What is a page of the site is linked as one. Any other file is linked in the repository where its
address is known, and else is its name alone.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def rewritten(
    markdown: str,
    source: str,
    pages: Mapping[str, str],
    exists: Callable[[str], bool],
    repository: str = "",
) -> str:
    """A document with its links led to where they are on the site.

    source: its path in the repository. pages: of all files that are pages, or parts of the site,
    from path in the repository to path in the site. exists: whether the repository has a file or
    folder of that path; links to what is not there are left, for mkdocs to tell of. repository:
    address of its files, such as https://example.org/jaxserve/blob/main; '' without one.
    """
    here = posixpath.dirname(pages[source])

    def led(match: re.Match[str]) -> str:
        label, link = match.groups()
        file, hash, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:") or not file:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        if target in pages:
            return f"[{label}]({posixpath.relpath(pages[target], here or '.')}{hash}{anchor})"
        if not exists(target):
            return match[0]
        return f"[{label}]({repository}/{target})" if repository else label

    parts = FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else LINK.sub(led, _images(part, pages, here))
        for part in parts
    )


def _images(text: str, pages: Mapping[str, str], here: str) -> str:
    """Pictures that are HTML, which only documents outside of docs/ name by their path in the
    repository."""
    for path in re.findall(r'<img src="([^"]+)"', text):
        if path in pages:
            text = text.replace(f'"{path}"', f'"{posixpath.relpath(pages[path], here or ".")}"')
    return text
