"""What happens to files on disks: damaged contents of a file."""

import random
from collections.abc import Iterator


def damaged(data: bytes, other: bytes, n: int = 100, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Kind and content of `n` damages of a file with content `data`; `other` is another valid file of its kind."""
    rng = random.Random(seed)

    def flip(first: int, last: int) -> bytes:
        content = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 50])):
            content[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
        return bytes(content)

    def zero() -> bytes:
        start, size = rng.randrange(len(data)), rng.choice([1, 16, 512, 4096])
        end = min(start + size, len(data))
        return data[:start] + bytes(end - start) + data[end:]

    def swap() -> bytes:
        size = rng.randrange(1, len(data) // 2)
        first, second = sorted(rng.sample(range(len(data) // size), 2))
        blocks = [data[i : i + size] for i in range(0, len(data), size)]
        blocks[first], blocks[second] = blocks[second], blocks[first]
        return b"".join(blocks)

    kinds = {
        "flipped bits": lambda: flip(0, len(data)),
        "flipped bits of the checksum": lambda: flip(0, 64),
        "cut": lambda: data[: rng.randrange(len(data))],
        "without beginning": lambda: data[rng.randrange(1, len(data)) :],
        "zeroed": zero,
        "blocks swapped": swap,
        "appended": lambda: data + rng.randbytes(rng.choice([1, 2, 8, 100])),
        "another file": lambda: other,
        "end of another file": lambda: data[: (cut := rng.randrange(len(data)))] + other[cut:],
        "empty": lambda: b"",
    }
    found = 0
    while found < n:
        for kind, damage in kinds.items():
            content = damage()
            if content != data and found < n:
                found += 1
                yield kind, content
