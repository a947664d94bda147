"""The documentation as a site: `docs/` and a few pages from elsewhere, with a reference that is
made of the code itself each time it is built.

python -m experiments.documentation

`hooks` is what mkdocs calls (.mkdocs.yml), `links` has links between pages and to files that are
no pages, `reference` makes the pages of flags, routes, metrics and models, `combinations` the one
of settings that go together.
"""
