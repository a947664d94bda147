"""The fronts of jaxserve, gRPC and HTTP, in one process with the engine, and the client that speaks
gRPC.

A request's way in: `door` (gRPC) or `http` (connections, sizes, times) asks `access` for the key,
and refuses what is malformed; `convert` or `openai.wire` makes an `Ask` of it; `front` reads the
prompt (`prompts`), counts it against the key's limits, and posts a `Request` to the engine. Its way
out: the engine's thread drops events into a stream's inbox, `streams.Mailbox` wakes the event loop
at most once a step, `streams.Stream` makes text of them and merges what a slow reader has not taken
yet; `service` or `openai.answers` writes it.

`launch` holds the life of the server: ports, health, reflection, drain. `probe` answers whether it
lives. `control` and `admin` tell of it and change it. `trail` follows a request through `logs` and
`tracing`; `front_metrics` counts answers. `keys` and `tls` read files that may change while it
runs. `page` is the live page. `client` is the other side.
"""
