"""A port on this machine for ranks to meet at."""

import secrets
import socket

__all__ = ["free_port"]

# Systems give outgoing connections the ports above: Linux from 32768 on, others from 49152 (IANA, RFC 6335).
_LOWEST, _HIGHEST = 20000, 32767


def free_port() -> int:
    """A port that nobody listens at, and that the system gives to nobody by itself.

    Binding to port 0 asks for one of the ports of outgoing connections. Until the ranks listen there, seconds later,
    any connection of another process may have got the same one; here only somebody who asks for just this port.
    """
    while True:
        port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST + 1)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # taken
                continue
            return port
