"""locust: users that stream chats and read pages for some seconds; no request may fail."""

from __future__ import annotations

import csv
from pathlib import Path

from check import MODEL, URL, call, command, main, scratch

USERS = f"""
from locust import HttpUser, constant, task

class Caller(HttpUser):
    wait_time = constant(0.2)

    @task(3)
    def chat(self):
        body = {{
            "model": {MODEL!r},
            "messages": [{{"role": "user", "content": "Hello"}}],
            "max_tokens": 8,
            "stream": True,
        }}
        path = "/v1/chat/completions"
        with self.client.post(path, json=body, stream=True, catch_response=True) as answer:
            text = b"".join(answer.iter_content(None))
            if not text.rstrip().endswith(b"data: [DONE]"):
                answer.failure(f"{{answer.status_code}} {{text[-100:]}}")

    @task
    def pages(self):
        for path in ("/health", "/metrics", "/v1/models"):
            self.client.get(path)
"""


@call
def three_users_for_fifteen_seconds() -> None:
    folder = scratch()
    file = Path(folder, "users.py")
    file.write_text(USERS)
    flags = ("--headless", "--users=3", "--spawn-rate=3", "--run-time=15s", "--stop-timeout=30")
    command("locust", "-f", str(file), f"--host={URL}", *flags, f"--csv={folder}/found")
    with Path(folder, "found_stats.csv").open() as rows:
        found = {row["Name"]: row for row in csv.DictReader(rows)}
    assert int(found["Aggregated"]["Failure Count"]) == 0
    assert int(found["/v1/chat/completions"]["Request Count"]) > 3


main("locust")
