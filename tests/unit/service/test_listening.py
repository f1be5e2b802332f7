from __future__ import annotations

import pytest

from commwatch.service.listening import Address, AddressError, PortError, bind


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:8430", Address("127.0.0.1", 8430), True),
        ("localhost:0", Address("localhost", 0), True),
        ("[::1]:65535", Address("::1", 65535), True),
        ("0.0.0.0:1", Address("0.0.0.0", 1), False),
        ("[::]:1", Address("::", 1), False),
        ("host.example:80", Address("host.example", 80), False),
    ],
)
def test_addresses_are_read_and_written_back(text: str, address: Address, loopback: bool) -> None:
    assert Address.parse(text) == address
    assert str(address) == text
    assert address.loopback is loopback


@pytest.mark.parametrize("text", ["", "8430", ":8430", "host:", "host:http", "host:65536", "host:-1", "host:²"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(AddressError, match="is not an address to listen on"):
        Address.parse(text)


def test_a_host_that_is_not_this_machine_is_named() -> None:
    with pytest.raises(PortError, match=r"Cannot listen on 192\.0\.2\.1:1: .*Name another address with --http-listen"):
        bind(Address("192.0.2.1", 1), "--http-listen")


def test_a_free_port_is_bound() -> None:
    with bind(Address("127.0.0.1", 0), "--http-listen") as bound:
        assert bound.getsockname()[1] > 0
