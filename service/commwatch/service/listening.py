"""Addresses to listen on: ``host:port``, ``[::1]:port``."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass


class AddressError(ValueError):
    """An address that is not ``host:port``."""


class PortError(OSError):
    """An address that cannot be listened on now. The message says why and what to type."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port``. Raises AddressError."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise AddressError(f"{text!r} is not an address to listen on. Use host:port, such as 127.0.0.1:8430.")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def bind(address: Address, option: str) -> socket.socket:
    """A listening TCP socket. Raises PortError naming the option to type."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise port_error(address, error.strerror or str(error), option) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise port_error(address, error.strerror or str(error), option) from None
    return bound


def port_error(address: Address, why: str, option: str) -> PortError:
    """What to say when an address cannot be listened on."""
    return PortError(
        f"Cannot listen on {address}: {why}. Is another `commwatch serve` running? Name another address with {option}."
    )
