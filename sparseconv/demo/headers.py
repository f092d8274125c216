"""What the headers of .las, .laz, .pcd and .ply ask for, against what a file of that size can hold."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

#: memory of a reader that does not grow with its file
FIXED = 256 << 20
#: the longest header of text, and how far compression of .pcd goes: three bytes stand for at most 264
LONGEST, LZF = 1 << 16, 100
#: bytes of a variable length record's own header, and of an extended one's
VLR, EVLR = 54, 60


def check_las(path: Path) -> None:
    """Raise ValueError where a .las or .laz counts more records, points or chunks than its bytes can hold."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(375)
        if len(head) < 227 or head[:4] != b"LASF":
            raise ValueError("it has no header of a .las")
        minor = head[25]
        (header_size,) = struct.unpack_from("<H", head, 94)
        offset, vlrs = struct.unpack_from("<II", head, 96)
        form, length, points = struct.unpack_from("<BHI", head, 104)
        evlrs_at, evlrs = 0, 0
        if minor >= 4 and len(head) >= 255:
            evlrs_at, evlrs, points = struct.unpack_from("<QIQ", head, 235)
        is_packed = bool(form & 0xC0)
        _fit("variable length records", vlrs, VLR, offset - header_size)
        if evlrs:
            _fit("extended variable length records", evlrs, EVLR, size - evlrs_at)
        if offset > size:
            raise ValueError(f"its points begin at byte {offset:,} of {size:,}")
        if not is_packed:
            _fit("points", points, max(1, length), size - offset)
        elif points:
            file.seek(offset)
            (table,) = struct.unpack("<q", file.read(8).ljust(8, b"\0"))
            if table == -1:
                file.seek(max(0, size - 8))
                (table,) = struct.unpack("<q", file.read(8).ljust(8, b"\0"))
            if not offset + 8 <= table <= size - 8:
                raise ValueError(f"its table of chunks is said to begin at byte {table:,} of {size:,}")
            file.seek(table)
            chunks = struct.unpack("<II", file.read(8))[1]
            _fit("chunks", chunks, 1, table - offset - 8)
            if points > size * LZF:
                raise ValueError(f"its header counts {points:,} points, more than {size:,} bytes can hold")


def check_pcd(path: Path) -> None:
    """Raise ValueError where a .pcd counts more numbers than its bytes can hold."""
    size = path.stat().st_size
    with path.open("rb") as file:
        words: dict[str, list[str]] = {}
        while "DATA" not in words:
            line = file.readline(LONGEST)
            if not line or file.tell() > LONGEST:
                raise ValueError("it has no header of a .pcd")
            key, *values = line.decode("ascii", "replace").split() or [""]
            words[key] = values
        rest = size - file.tell()
    sizes, counts = ([int(v) for v in words.get(key, [])] for key in ("SIZE", "COUNT"))
    counts = counts or [1] * len(sizes)
    points = int((words.get("POINTS") or ["0"])[0])
    area = int((words.get("WIDTH") or ["0"])[0]) * int((words.get("HEIGHT") or ["1"])[0])
    if len(sizes) != len(counts) or min([*sizes, *counts, points, area], default=0) < 0:
        raise ValueError(f"its header gives sizes {sizes[:9]} and counts {counts[:9]} of {points} points")
    kind = (words["DATA"] or [""])[0].lower()
    a_point = sum(counts) if kind == "ascii" else sum(s * c for s, c in zip(sizes, counts))
    _fit("points", max(points, area), max(1, a_point), rest * (LZF if kind == "binary_compressed" else 1) + 1)


def check_ply(path: Path) -> None:
    """Raise ValueError where a .ply counts more elements than its bytes can hold."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(LONGEST), b""):
            words = line.split()
            if words[:1] == [b"end_header"]:
                return
            if words[:1] == [b"element"] and len(words) == 3:
                _fit(f"elements {words[1].decode('ascii', 'replace')[:40]}", int(words[2]), 1, size)
            if file.tell() > LONGEST:
                break
    raise ValueError("it has no header of a .ply")


def _fit(what: str, count: int, each: int, room: int) -> None:
    if count < 0 or count * each > max(0, room):
        raise ValueError(f"its header counts {count:,} {what} of {each:,} bytes; there are {max(0, room):,}")


CHECKS: dict[str, Callable[[Path], None]] = {".las": check_las, ".laz": check_las, ".pcd": check_pcd, ".ply": check_ply}
