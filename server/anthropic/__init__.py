"""Anthropic's protocol on the users' HTTP port: /v1/messages, for agents made for it."""
