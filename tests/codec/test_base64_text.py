"""decode_base64 against the standard library."""

from __future__ import annotations

import base64
import binascii
import random

import pytest

from neptrio.codec.base64_text import decode_base64

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


@pytest.mark.parametrize("size", [*range(20), 1000, 65537])
def test_what_was_encoded_comes_back(size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert decode_base64(base64.b64encode(content).decode()) == content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("QUJ", "3 characters are no multiple of 4"),
        ("QUJD\n", "5 characters are no multiple of 4"),
        ("QUJDQ*JD", "character 5 is not of the alphabet"),
        ("QU=JQUJD", "character 2 is not of the alphabet"),
        ("QUI=QUJD", "character 3 is not of the alphabet"),
        ("Q===", "character 1 is not of the alphabet"),
        ("====", "character 0 is not of the alphabet"),
        ("QR==", "bits that no byte needs"),
        ("QUJ=", "bits that no byte needs"),
        ("QU-_", "character 2 is not of the alphabet"),
        ("é12", "character 0 is not of the alphabet"),
        ("\ud800abc", "surrogates not allowed"),
        ("QUJ\0", "character 3 is not of the alphabet"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_base64(text)


def test_agrees_with_the_standard_library_on_damaged_text() -> None:
    chance = random.Random(7)
    agreed = 0
    for _ in range(5000):
        text = list(base64.b64encode(chance.randbytes(chance.randrange(12))).decode())
        if text and chance.random() < 0.7:
            text[chance.randrange(len(text))] = chance.choice([*ALPHABET, "=", "\n", " ", "é"])
        whole = "".join(text)
        try:
            found: bytes | None = decode_base64(whole)
        except ValueError:
            found = None
        try:
            expected: bytes | None = binascii.a2b_base64(whole, strict_mode=True)
        except ValueError:
            expected = None
        if expected is not None and base64.b64encode(expected).decode() != whole:
            expected = None  # the library ignores bits that are left over
        assert found == expected, whole
        agreed += found is not None
    assert agreed > 1000
