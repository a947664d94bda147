"""The OpenAI protocol over HTTP.

`schemas` checks what callers send; `completions` and `chat` make `GenerateCall`s of it and write
the results; `responses` sends these, whole or as server-sent events; `app` holds the routes.
"""
