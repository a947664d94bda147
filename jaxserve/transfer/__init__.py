"""Moves bytes between processes: no JAX, and no idea of blocks, layers or models.

A receiver lends a window of its staging memory for some seconds; the window is plain data that
travels to the sender by whatever they talk (gRPC). The sender writes pieces into it and watches a
ticket. What the bytes mean, and whether they are right (a checksum), is the callers' matter.

    protocol   `Transfer`: what every implementation offers; `Window`, `Ticket`
    tcp        `TcpTransfer`, the default: sockets, authenticated, windows fenced
    mooncake   `MooncakeTransfer`: the Mooncake Transfer Engine (TCP, RDMA), where it is installed
    buffers    `ReceiveBuffers`: who may send next where receive memory is short; integers and time
    places     `Places`: who may send next where many want to
    sender     TCP: cuts writes into slices, makes connections, sends again what failed
    peers      TCP: the slices that wait for each receiver
    writes     TCP: how a ticket ends
    link       TCP: one connection to a receiver
    receiver   TCP: the port, and the threads that fill windows
    windows    TCP: what is lent to whom, and until when
    frames     TCP: the bytes of requests and answers
    sieve      which of many connections is closed for a new one
"""

from jaxserve.transfer.buffers import Grant, ReceiveBuffers
from jaxserve.transfer.places import Places
from jaxserve.transfer.protocol import Ticket, Transfer, TransferCounts, TransferError, Window
from jaxserve.transfer.tcp import TcpTransfer

__all__ = [
    "Grant",
    "Places",
    "ReceiveBuffers",
    "TcpTransfer",
    "Ticket",
    "Transfer",
    "TransferCounts",
    "TransferError",
    "Window",
]
