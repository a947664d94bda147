"""The OpenAI protocol over the same front as gRPC.

`wire` says what callers may send; `completions` and `chat` make an `Ask` of it and write what comes
back, whole or as events; `app` holds the routes; `errors` turns whatever goes wrong into a status
and a body. The connection itself, its limits and its keys are `http`'s.
"""
