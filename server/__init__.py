"""The gRPC front of jaxserve, and the client that speaks to it.

A request's way: `door` parses the message and refuses what is malformed; `convert` turns it into a `Request`; `service` hands it to
the engine with a sink; the engine's thread drops events into the sink, `streams.Mailbox` carries them to the event loop with one
wake-up a step, `streams.Stream` makes text of them and merges what a slow reader has not taken yet; `service` writes. `control`
answers about the server itself. `launch` holds the life of the server: port, health, reflection, drain. `client` is the other side.
"""
