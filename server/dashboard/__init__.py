"""The live page: what an engine runs, drawn in a browser. A few files out of the package and one
route with data, which the page polls.

The files are fixed and load nothing from elsewhere. Who may see the page is decided in front of
these routes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import RedirectResponse, Response

from jaxserve.observe.view import ID

Mine = Callable[[str], bool]  # whether a request id may be shown
OTHER = "other"  # in place of an id that may not
FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{
        f"{name}.js": "text/javascript; charset=utf-8"
        for name in ("page", "timeline", "charts", "requests", "format")
    },
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def everything() -> Mine | None:
    """Shows all ids."""
    return None


def router(front: Any, mine: Callable[..., Mine | None] = everything) -> APIRouter:
    """The page's routes: `/`, `/page/` with its files, `/page/data`.

    front: has the `engine`, None until it is built, and its `state`. mine: a dependency, as of
    FastAPI, that says which ids the caller of a request may see; None: all of them.
    """
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def root() -> Response:
        return RedirectResponse("page/", headers=HEADERS)

    @routes.get("/page/data")
    def data(since: int = Query(0, ge=0), mine: Mine | None = Depends(mine)) -> Response:  # noqa: B008
        told = (
            {"state": str(front.state)}
            if front.engine is None
            else {"state": str(front.state), **shown(front.engine.view(since), mine)}
        )
        return Response(
            json.dumps(told, separators=(",", ":")), media_type="application/json", headers=HEADERS
        )

    for name, kind in FILES.items():
        routes.add_api_route(
            "/page/" if name == "index.html" else f"/page/{name}",
            _sender(name, kind),
            methods=["GET"],
        )
    return routes


def shown(view: dict[str, Any], mine: Mine | None) -> dict[str, Any]:
    """A view of an engine for one who may see only some ids: those of all others are OTHER."""
    if mine is None:
        return view
    row = lambda row: row if mine(row[ID]) else [*row[:ID], OTHER, *row[ID + 1 :]]
    names = {
        number: (id if mine(id) else OTHER, index) for number, (id, index) in view["names"].items()
    }
    return {
        **view,
        "names": names,
        "requests": list(map(row, view["requests"])),
        "ended": list(map(row, view["ended"])),
    }


def _sender(name: str, kind: str) -> Callable[[], Response]:
    content = resources.files(__package__).joinpath(name).read_bytes()

    def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
