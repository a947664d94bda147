"""The dashboard: a page that draws what a replica runs, live in a browser.

It is a few fixed files from the package, which load nothing from elsewhere, and one route with
data, which the page polls. Authentication happens before these routes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import RedirectResponse, Response

from jaxserve.observe.view import ID
from jaxserve.server.models import Models

IdFilter = Callable[[str], bool]  # whether a request's id may be shown
HIDDEN_ID = "other"  # shown in place of an id that may not
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
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def router(models: Models, visible_ids: Callable[..., IdFilter | None]) -> APIRouter:
    """The dashboard's routes: `/`, `/page/` with its files, `/page/data`.

    visible_ids: a FastAPI dependency that returns which ids the caller of a request may see; None
    means all.
    """
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def root() -> Response:
        return RedirectResponse("page/", headers=HEADERS)

    @routes.get("/page/data")
    def data(
        since: int = Query(0, ge=0),
        model: str = "",
        visible: IdFilter | None = Depends(visible_ids),  # noqa: B008
    ) -> Response:
        frontend = models.named(model or models.all[0].name)
        content: dict[str, Any] = {"state": str(frontend.state)}
        if models.several:
            content["models"] = [each.name for each in models.all]
        if frontend.replica is not None:
            content |= hide_ids(frontend.replica.view(since), visible)
        body = json.dumps(content, separators=(",", ":"))
        return Response(body, media_type="application/json", headers=HEADERS)

    for name, kind in FILES.items():
        path = "/page/" if name == "index.html" else f"/page/{name}"
        routes.add_api_route(path, _file_route(name, kind), methods=["GET"])
    return routes


def hide_ids(view: dict[str, Any], visible: IdFilter | None) -> dict[str, Any]:
    """A replica's view with HIDDEN_ID in place of all ids that are not visible."""
    if visible is None:
        return view

    def shown_row(row: list[Any]) -> list[Any]:
        return row if visible(row[ID]) else [*row[:ID], HIDDEN_ID, *row[ID + 1 :]]

    names = {
        number: (id if visible(id) else HIDDEN_ID, index)
        for number, (id, index) in view["names"].items()
    }
    return {
        **view,
        "names": names,
        "requests": list(map(shown_row, view["requests"])),
        "ended": list(map(shown_row, view["ended"])),
    }


def _file_route(name: str, kind: str) -> Callable[[], Response]:
    content = resources.files(__package__).joinpath(name).read_bytes()

    def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
