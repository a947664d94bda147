"""Clients, load generators and test suites that others wrote, against a jaxserve server."""
