"""ChaCha20 on the host and as tensor operations, against RFC 8439 and against each other."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkfc import chacha

CPU = torch.device("cpu")

# RFC 8439: (key, block counter, 96-bit nonce, key stream), from 2.3.2 and appendix A.1
COUNTING = bytes(range(32))
VECTORS = {
    "2.3.2": (
        COUNTING,
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 #1": (
        bytes(32),
        0,
        "000000000000000000000000",
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 #2": (
        bytes(32),
        1,
        "000000000000000000000000",
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 #3": (
        bytes(31) + b"\x01",
        1,
        "000000000000000000000000",
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 #4": (
        b"\x00\xff" + bytes(30),
        2,
        "000000000000000000000000",
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 #5": (
        bytes(32),
        0,
        "000000000000000000000002",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}


def on_host(key: bytes, block: int, count: int, nonce: int = 0) -> bytes:
    buffer = bytearray(64 * count)
    chacha.fill(buffer, key, block, 64 * count, nonce)
    return bytes(buffer)


def as_tensors(key: bytes, block: int, count: int, nonce: int = 0) -> bytes:
    counter = torch.tensor(
        [block + i - 2**64 if block + i >= 2**63 else block + i for i in range(count)]
    )
    words = torch.stack(chacha.blocks(chacha.key_words(key, CPU), counter, nonce), dim=-1)
    return words.numpy().astype("<i4").tobytes()


@pytest.mark.parametrize("cipher", [on_host, as_tensors])
@pytest.mark.parametrize(("key", "counter", "nonce", "want"), VECTORS.values(), ids=VECTORS)
def test_the_vectors_of_rfc_8439(cipher, key: bytes, counter: int, nonce: str, want: str) -> None:
    """Word 13 is the first word of their nonce, and the high word of our counter."""
    high, *low_nonce = struct.unpack("<3I", bytes.fromhex(nonce))
    ours = struct.unpack("<Q", struct.pack("<2I", *low_nonce))[0]
    assert cipher(key, counter + (high << 32), 1, ours).hex() == want


@given(
    key=st.binary(min_size=32, max_size=32),
    block=st.one_of(
        st.integers(0, 100), st.integers(2**32 - 5, 2**32 + 5), st.integers(0, 2**63 - 100)
    ),
    count=st.integers(1, 9),
    nonce=st.sampled_from([0, 1, 2**31, 2**64 - 1]),
)
@settings(deadline=None, max_examples=60)
def test_both_implementations_agree(key: bytes, block: int, count: int, nonce: int) -> None:
    """Also where the counter carries into its high word."""
    assert on_host(key, block, count, nonce) == as_tensors(key, block, count, nonce)


@pytest.mark.parametrize("cipher", [on_host, as_tensors])
def test_the_counter_carries_and_no_block_occurs_twice(cipher) -> None:
    """A counter that wraps at 2³² would repeat the noise of the beginning."""
    across = cipher(COUNTING, 2**32 - 2, 4)
    assert across[:128] == cipher(COUNTING, 2**32 - 2, 2)
    assert across[128:] == cipher(COUNTING, 2**32, 2) != cipher(COUNTING, 0, 2)
    places = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**62]
    seen = {cipher(COUNTING, block, 1, nonce) for block in places for nonce in (0, 1, 2**32)}
    assert len(seen) == 3 * len(places)


@pytest.mark.parametrize("length", [0, 1, 63, 65, 200])
def test_only_the_stretch_is_written(length: int) -> None:
    buffer = bytearray(b"\xaa" * 320)
    chacha.fill(buffer, COUNTING, 7, length)
    assert buffer[:length] == on_host(COUNTING, 7, 5)[:length]
    assert buffer[length:] == b"\xaa" * (320 - length)
