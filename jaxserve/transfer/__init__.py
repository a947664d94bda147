"""Moves bytes between processes: no JAX, and no idea of blocks, layers or models.

A receiver lends a window of its staging memory for some seconds; the window is plain data that
travels to the sender by whatever they talk (gRPC). What the bytes mean, and whether they are right
(a checksum), is the callers' matter.

    plane      `Plane`: one way for blocks from a source to a reader, and which one both choose
    tcp_plane  `TcpPlane`, the default: the source writes into the reader's window
    mooncake, nixl  `MooncakePlane`, `NixlPlane`: the reader brings blocks by these engines, where
               they are installed
    reading_plane  what the two have in common
    staging_pool  registered memory of a source, shared by its streams
    rates      bytes per second by source and plane, as learnt
    failures   addresses and planes that failed lately
    protocol   `Transfer`, what is under `TcpPlane`: tickets for writes; `Window`, `Ticket`
    tcp        `TcpTransfer`: sockets, authenticated, windows fenced
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
from jaxserve.transfer.plane import Plane
from jaxserve.transfer.protocol import Ticket, Transfer, TransferCounts, TransferError, Window
from jaxserve.transfer.tcp import TcpTransfer
from jaxserve.transfer.tcp_plane import TcpPlane

__all__ = [
    "Grant",
    "Places",
    "Plane",
    "ReceiveBuffers",
    "TcpPlane",
    "TcpTransfer",
    "Ticket",
    "Transfer",
    "TransferCounts",
    "TransferError",
    "Window",
]
