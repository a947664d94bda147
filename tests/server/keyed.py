"""Keys that tests know."""

import base64
import hashlib


def sha(key):
    return hashlib.sha256(key.encode()).hexdigest()


TWO = f"""
keys:
  - {{name: alice, sha256: {sha("a-key")}, tenant: team-a, limits: {{concurrency: 2}}}}
  - name: root
    sha256: {sha("r-key")}
    admin: true
"""


def bearer(key):
    return f"Bearer {key}"


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()
