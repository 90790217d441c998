"""Entropy coding of integer codes: several codes to a byte, and bytes in a Huffman code.

The coder is deflate from the standard library, restricted to its Huffman code. A Huffman code gives each byte a whole
number of bits, which wastes up to 10 % below 2.5 bits per code; several codes in a byte share that waste. Bytes above
the entropy of the codes, in percent, by bits per code (2^20 codes with a Laplace distribution; layers of stories260K,
4,096 codes each, where tables of the code take most of it):

|             | 4.4 | 3.5 | 3.0 | 2.5 | 2.0 | 1.3 |
|-------------|-----|-----|-----|-----|-----|-----|
| one a byte  | 1.0 | 1.2 | 2.1 | 3.5 | 2.2 |  16 |
| this module | 0.7 | 0.8 | 0.6 | 1.1 | 1.3 | 1.8 |
| small layer | 1.9 | 1.8 | 2.4 | 2.8 | 3.1 |     |

Decodes 100 to 240 MB/s of codes on a busy core, and encodes 20. Asymmetric numeral systems waste 0.1 %, but decode 15
to 30 MB/s in the library constriction and 10 to 30 in numpy, where the interleaved states take more bytes than is won.
"""

import heapq
import math
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Int8, Int64, UInt8
from torch import Tensor

from rocket_core.errors import CorruptCheckpointError, InvalidConfigError
from rocket_core.linalg.kernels.rate import LARGEST_CODE, occurrences
from rocket_core.system.devices import bytes_on_host

_DAMAGED = "copy the files again"
# Largest magnitude in a byte, by the number of codes in it: (2 · magnitude + 1)^number <= 256.
_MAGNITUDES = {1: LARGEST_CODE, 2: 7, 3: 2}
# Deflate's symbols between two tables, about the bits that each symbol takes of a table, and what frames a stream.
_DEFLATE_BLOCK = 2**15 - 1
_BITS_OF_A_TABLE_ENTRY = 3
_FRAME_BYTES = 30
# Bytes that one thread deflates; what ends a part takes 5 bytes.
_PART = 32 * _DEFLATE_BLOCK
_ZLIB_HEADER = b"\x78\x01"


def encode_codes(codes: Int8[Tensor, " n"]) -> UInt8[Tensor, " bytes"]:
    """Return codes as a stream of bytes, by the arrangement with the shortest one.

    Equal codes give equal bytes with one version of zlib. Other versions may choose other bytes for the same codes.

    Args:
        codes: at least one, each from -127 to 127.

    Returns:
        The stream, on the CPU.

    Raises:
        InvalidConfigError: a code is -128.
    """
    counts = byte_counts(codes).tolist()
    if counts[LARGEST_CODE + 1]:
        raise InvalidConfigError(f"entropy-coded codes are at least -{LARGEST_CODE}, not {-LARGEST_CODE - 1}")
    expected = _expected_bytes(counts)
    number = min(expected, key=lambda number: expected[number])
    stream = bytes([number]) + _deflated(*_arranged(codes, number))
    return torch.frombuffer(bytearray(stream), dtype=torch.uint8)


def coded_bytes(codes: Int8[Tensor, "d_in d_out"]) -> int:
    """Return the bytes of a layer's codes as a stream."""
    return encode_codes(codes.T.reshape(-1)).numel()


def expected_bytes(codes: Int8[Tensor, "d_in d_out"]) -> int:
    """Return about `coded_bytes`, to within a percent, from how often bytes occur; takes a fraction of the time."""
    return bytes_from_counts(byte_counts(codes.T.reshape(-1)).tolist())


def byte_counts(codes: Int8[Tensor, " n"]) -> Int64[Tensor, "768"]:
    """Return how often each code occurs, from 0 to 127 and then from -128 to -1, and each byte of 2 and 3 codes."""
    several = (_packed(_digits(codes, number), number) for number in (2, 3))
    return torch.cat([occurrences(values, 256) for values in (codes.view(torch.uint8), *several)])


def bytes_from_counts(counts: Sequence[int]) -> int:
    """Return the same as `expected_bytes`, from the values of `byte_counts`."""
    return min(_expected_bytes(counts).values())


def _expected_bytes(counts: Sequence[int]) -> dict[int, int]:
    """Return about the length of a stream by the number of codes to a byte."""
    own = counts[:256]
    sizes = [own[0], *(own[size] + own[-size] for size in range(1, LARGEST_CODE + 1))]
    found = {}
    for place, (number, most) in enumerate(_MAGNITUDES.items()):
        blocks = math.ceil(math.ceil(sum(own) / number) / _DEFLATE_BLOCK)
        excess = sizes[most:] if sum(sizes[most:]) else []
        packed = counts[256 * place : 256 * (place + 1)]
        bits = _huffman_bits(packed, tables=blocks) + _huffman_bits(excess, tables=1)
        found[number] = _FRAME_BYTES + math.ceil(bits / 8)
    return found


def _digits(codes: Int8[Tensor, " n"], number: int) -> UInt8[Tensor, " digits"]:
    """Return codes, limited to the magnitude of `number` codes to a byte, as digits from 0."""
    most = _MAGNITUDES[number]
    digits = torch.nn.functional.pad(codes.clamp(-most, most) + most, (0, -len(codes) % number), value=most)
    return digits.view(torch.uint8)


def _packed(digits: UInt8[Tensor, " digits"], number: int) -> UInt8[Tensor, " bytes"]:
    """Return digits, `number` to a byte."""
    base = 2 * _MAGNITUDES[number] + 1
    packed = digits[number - 1 :: number]
    for place in reversed(range(number - 1)):
        packed = packed * base + digits[place::number]
    return packed


def _huffman_bits(counts: Sequence[int], *, tables: int) -> int:
    """Return the bits of a text in a Huffman code with some tables, given how often each symbol occurs."""
    heap = [count for count in counts if count]
    bits = _BITS_OF_A_TABLE_ENTRY * len(heap) * tables + (heap[0] if len(heap) == 1 else 0)
    heapq.heapify(heap)
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        heapq.heappush(heap, joined)
        bits += joined
    return bits


def decode_codes(stream: UInt8[Tensor, " bytes"], n: int, *, layer: str) -> Int8[Tensor, " n"]:
    """Return the codes of a stream; the inverse of `encode_codes`.

    Takes memory in proportion to n, whatever the stream contains.

    Args:
        stream: the bytes.
        n: number of codes, at least one.
        layer: name for messages.

    Returns:
        The codes, on the device of the stream.

    Raises:
        CorruptCheckpointError: the stream is damaged, or does not have exactly n codes.
    """
    data = stream.cpu().numpy().tobytes()
    number = data[0] if data else 0
    if number not in _MAGNITUDES:
        raise CorruptCheckpointError(f"{layer}: {number} codes to a byte is not possible; {_DAMAGED}")
    try:
        codes = _decoded(data[1:], n, number)
    except (zlib.error, EOFError) as error:
        raise CorruptCheckpointError(f"{layer}: the stream of codes is damaged ({error}); {_DAMAGED}") from error
    return torch.from_numpy(codes).to(stream.device)


def _arranged(codes: Int8[Tensor, " n"], number: int) -> tuple[bytes, bytes]:
    """Return codes, limited to the magnitude, `number` to a byte; and what the magnitude of limited codes exceeds."""
    most, sizes = _MAGNITUDES[number], codes.abs()
    packed, excess = _packed(_digits(codes, number), number), sizes[sizes >= most] - most
    both = b"".join(bytes_on_host(torch.cat([packed, excess.view(torch.uint8)])))
    return both[: len(packed)], both[len(packed) :]


def _deflated(packed: bytes, excess: bytes) -> bytes:
    """Return a stream of zlib, whose parts are deflated in as many threads as torch uses, which does not change it."""
    parts = [packed[begin : begin + _PART] for begin in range(0, len(packed), _PART)]
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(parts))) as pool:
        whole = pool.map(_deflated_part, parts[:-1])
        streams = [*whole, _deflated_part(parts[-1], excess, last=True)]
    checksum = zlib.adler32(excess, zlib.adler32(packed))
    return b"".join([_ZLIB_HEADER, *streams, checksum.to_bytes(4, "big")])


def _deflated_part(packed: bytes, excess: bytes = b"", *, last: bool = False) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL + 1, zlib.Z_HUFFMAN_ONLY)
    parts = [compressor.compress(packed)]
    if excess:
        # In a block with its own code.
        parts += [compressor.flush(zlib.Z_BLOCK), compressor.compress(excess)]
    return b"".join([*parts, compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)])


def _decoded(data: bytes, n: int, number: int) -> np.ndarray:
    """Return the codes.

    Raises:
        zlib.error: the data or its checksum is damaged.
        EOFError: there is too little or too much of it, or a byte has no meaning.
    """
    most, base = _MAGNITUDES[number], 2 * _MAGNITUDES[number] + 1
    inflating = zlib.decompressobj()
    packed = _inflated(inflating, data, -(-n // number))
    if np.frombuffer(packed, dtype=np.uint8).max() >= base**number:
        raise EOFError(f"a byte is not {number} codes")
    codes = np.empty((len(packed), number), dtype=np.int8)
    for place in range(number):
        table = bytes((byte // base**place % base - most) % 256 for byte in range(256))
        codes[:, place] = np.frombuffer(packed.translate(table), dtype=np.int8)
    flat = codes.reshape(-1)
    if flat[n:].any():
        raise EOFError("there are codes after the last")
    flat = flat[:n]
    limited = np.flatnonzero(np.abs(flat) == most)
    excess = np.frombuffer(_inflated(inflating, inflating.unconsumed_tail, len(limited)), dtype=np.uint8)
    if excess.max(initial=0) > LARGEST_CODE - most:
        raise EOFError(f"a code is beyond {LARGEST_CODE}")
    rest = excess.astype(np.int8)
    flat[limited] += np.where(flat[limited] < 0, -rest, rest)
    # Reads the checksum.
    if inflating.decompress(inflating.unconsumed_tail, 1) or not inflating.eof or inflating.unused_data:
        raise EOFError("it does not end after the last code")
    return flat


def _inflated(inflating: "zlib._Decompress", data: bytes, size: int) -> bytes:
    """Return the next bytes.

    Raises:
        zlib.error: the data is damaged.
        EOFError: there are fewer.
    """
    found = inflating.decompress(data, size) if size else b""
    if len(found) < size:
        raise EOFError("it ends too early")
    return found
