"""Messages one after another in a file: a varint length, then the bytes."""

from __future__ import annotations

from collections.abc import Iterator

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class DelimitedError(ValueError):
    """The bytes are not what this module writes."""


def frame(content: bytes) -> bytes:
    """The content with its length before it."""
    length, prefix = len(content), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + content


def messages(content: bytes, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """(message, offset behind it) for each whole message from ``start``; a torn last one is left for later.

    Raises DelimitedError.
    """
    at = start
    while True:
        length, shift, cursor = 0, 0, at
        while True:
            if cursor >= len(content):
                return
            byte = content[cursor]
            cursor += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= 35:
                raise DelimitedError(f"no length at offset {at}")
        if length == 0:  # what a file system leaves of a write that power loss cut
            raise DelimitedError(f"an empty message at offset {at}")
        if length > MAX_MESSAGE_BYTES:
            raise DelimitedError(f"a message of {length} bytes at offset {at}: the limit is {MAX_MESSAGE_BYTES}")
        if cursor + length > len(content):
            return
        at = cursor + length
        yield content[cursor:at], at
