"""The server: gRPC and HTTP in front of one replica, in one process, and the gRPC client.

A request's way in: `grpc.handlers` or `http_guard` limits and parses what comes, `grpc.auth` or
`http_guard` has `auth.access` find the caller of its API key. `grpc.inference`, `openai` or
`anthropic` translates it into a `generate_call.GenerateCall`. `frontend` tokenizes its prompt
(`prompts`), counts it against the key's limits, and submits a `Request` to the replica. Its way
out: the replica's thread puts events into `streams.Mailbox`, which wakes the event loop;
`streams.Stream` makes outputs of them, which `grpc.inference`, or `generation.responding` by an
`event_stream`, writes.

supervisor         ports, health, reflection, start, drain and stop
event_loop         the asyncio loop, and work in threads
frontend           calls of any protocol to the replica; the server's state
generate_call      a call to generate, of any protocol
prompts            text, chats and ids to token ids
streams            events from the replica's thread to slow readers
readiness          health checks
request_log, logs, tracing, frontend_metrics    what operators see
admin              the operators' HTTP port
http_server        HTTP connections and their limits; http_guard: sizes, keys, browsers
http_app           FastAPI applications; json_body: JSON within limits
errors, http_errors, grpc/errors                errors as callers see them
auth/              access (callers and their limits), keys (the key file), tls (certificates)
grpc/              auth, handlers, inference, control, health, proto (messages to plain data)
users_app          the users' HTTP port: routes of all protocols, health, metrics, dashboard
generation/        what HTTP protocols share: bodies, chats, responses, embeddings
openai/, anthropic/, rerank, tokenization, health_routes       routes by protocol
replica_service    offers the replica to conductors on other processes, in a caller_session each
remote_replica     a replica on another process, by a replica_session; remote_blocks: its cache
members            the replicas of a cluster, by address, for its conductor
block_service      sends blocks of KV to other replicas; peer_blocks asks for theirs, each process
                   of a source by a part_stream; worker_port: such a port without a replica's rest
cluster_port       a gRPC port for those who know the cluster's secret
replica_messages, replica_auth    what crosses between both, and who may
dashboard/         the live page
files              checks of files with secrets
client             clients for Python
"""
