"""Reads what the Redis of earlier versions has left in the state folder, so that a new file of records begins with it.

Those Redis servers (6.2 to 7.4, Valkey) kept an append-only file: commands as clients send them, behind an RDB snapshot
once the file had been rewritten; since 7.0 as several files that a manifest names. Only strings and sorted sets were
ever written. Formats: redis.io/docs/latest/develop/reference/protocol-spec, github.com/sripathikrishnan/redis-rdb-tools
(wiki, RDB file format). An entry that was being written when the machine died is dropped, as Redis does; any other
damage is an error.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.core.errors import StorageDamaged

_MAX_LEN = 512 << 20  # of one string, as Redis' own limit
_MAGICS = (b"REDIS", b"VALKEY")
_HEADER_LEN = 9  # the magic word and the digits of the version


class _Kind(enum.IntEnum):
    """First byte of an entry of a snapshot."""

    STRING = 0
    SORTED_SET = 5
    ZIPLIST = 12  # sorted sets that are small
    LISTPACK = 17
    IDLE = 0xF8
    FREQUENCY = 0xF9
    AUXILIARY = 0xFA
    SIZES = 0xFB
    ENDS_MS = 0xFC
    ENDS_S = 0xFD
    DATABASE = 0xFE
    END = 0xFF


class _Torn(Exception):
    """The bytes end within an entry."""


@dataclass(slots=True)
class RedisDump:
    """Contents of a Redis: values with the wall time of their end, and sorted sets, by key."""

    values: dict[bytes, tuple[bytes, float | None]] = field(default_factory=dict)
    lists: dict[bytes, dict[bytes, float]] = field(default_factory=dict)


def dump_files(folder: Path) -> list[Path]:
    """Return the files of a Redis' folder in the order in which they are read; none: it has none. Raises
    StorageDamaged for a manifest that names a missing file."""
    manifests = sorted(folder.glob("appendonlydir/*.manifest"))
    if not manifests:
        single = folder / "appendonly.aof"
        return [single] if single.exists() and single.stat().st_size else []
    named = []
    for line in manifests[0].read_text().splitlines():
        words = line.split()
        fields = dict(zip(words[::2], words[1::2], strict=False))
        if fields.get("type") in ("b", "i"):
            named.append(
                (fields["type"] == "i", int(fields.get("seq", 0)), manifests[0].parent / fields["file"].strip('"'))
            )
    files = [path for _, _, path in sorted(named)]
    for path in files:
        if not path.exists():
            raise StorageDamaged(f"{manifests[0]} names {path.name}, which is missing")
    return files


def read_dump(files: list[Path]) -> RedisDump:
    """Read the files of one Redis. Raises StorageDamaged, naming the file and the byte; OSError."""
    dump = RedisDump()
    for path in files:
        reader = _Reader(path.read_bytes(), path)
        if reader.content.startswith(_MAGICS):
            _read_snapshot(reader, dump)
        for commands in _transactions(reader):
            for command in commands:
                _apply(dump, command, reader)
    return dump


# --- commands


def _transactions(reader: "_Reader") -> Iterator[list[list[bytes]]]:
    """Yield commands that belong together, without those that the end has torn apart."""
    waiting: list[list[bytes]] | None = None
    while not reader.is_at_end:
        begin = reader.offset
        try:
            command = _command(reader)
        except _Torn:
            return
        except ValueError as error:
            raise reader.damaged(begin) from error
        if not command:
            continue
        name = command[0].upper()
        if name == b"MULTI":
            waiting = []
        elif name == b"EXEC":
            yield waiting or []
            waiting = None
        elif waiting is not None:
            waiting.append(command)
        else:
            yield [command]


def _command(reader: "_Reader") -> list[bytes]:
    """Read a command; empty: an annotation. Raises _Torn, ValueError."""
    line = reader.line()
    if line.startswith(b"#"):
        return []
    return [_argument(reader) for _ in range(_number(line, b"*"))]


def _argument(reader: "_Reader") -> bytes:
    argument = reader.take(_number(reader.line(), b"$"))
    if reader.take(2) != b"\r\n":
        raise ValueError("an argument without its end")
    return argument


def _number(line: bytes, sign: bytes) -> int:
    if line[:1] != sign or not line[1:].isdigit() or int(line[1:]) > _MAX_LEN:
        raise ValueError("no length")
    return int(line[1:])


def _apply(dump: RedisDump, command: list[bytes], reader: "_Reader") -> None:
    name, arguments = command[0].upper(), command[1:]
    try:
        match name:
            case b"SET":
                options = dict(zip((one.upper() for one in arguments[2::2]), arguments[3::2], strict=False))
                ends_ms = options.get(b"PXAT")
                dump.values[arguments[0]] = (arguments[1], None if ends_ms is None else int(ends_ms) / 1e3)
            case b"PEXPIREAT":
                value = dump.values.get(arguments[0])
                if value is not None:
                    dump.values[arguments[0]] = (value[0], int(arguments[1]) / 1e3)
            case b"DEL" | b"UNLINK":
                for key in arguments:
                    dump.values.pop(key, None)
                    dump.lists.pop(key, None)
            case b"ZADD":
                scores = dump.lists.setdefault(arguments[0], {})
                scores |= {arguments[n + 1]: float(arguments[n]) for n in range(1, len(arguments), 2)}
            case b"ZREM":
                for member in arguments[1:]:
                    dump.lists.get(arguments[0], {}).pop(member, None)
            case b"SELECT":
                pass
            case _:
                raise ValueError("a command that was never sent")
    except (ValueError, IndexError) as error:
        raise reader.damaged(reader.offset, f"{name[:20]!r} cannot be taken over") from error


# --- snapshots


def _read_snapshot(reader: "_Reader", dump: RedisDump) -> None:
    """Read an RDB snapshot up to its end. Raises StorageDamaged, also for one that is cut off."""
    begin = reader.offset
    try:
        reader.take(_HEADER_LEN)
        _entries(reader, dump)
    except (_Torn, ValueError, LookupError, struct.error) as error:
        raise reader.damaged(begin, "its snapshot cannot be read") from error


def _entries(reader: "_Reader", dump: RedisDump) -> None:
    until_s: float | None = None
    while True:
        kind = reader.take(1)[0]
        match kind:
            case _Kind.END:
                reader.take(8)  # a checksum, which Redis itself may leave out
                return
            case _Kind.DATABASE | _Kind.IDLE:
                _length(reader)
            case _Kind.SIZES:
                _length(reader)
                _length(reader)
            case _Kind.AUXILIARY:
                _string(reader)
                _string(reader)
            case _Kind.ENDS_MS:
                until_s = struct.unpack("<q", reader.take(8))[0] / 1e3
            case _Kind.ENDS_S:
                until_s = float(struct.unpack("<i", reader.take(4))[0])
            case _Kind.FREQUENCY:
                reader.take(1)
            case _:
                _entry(reader, dump, kind, until_s)
                until_s = None


def _entry(reader: "_Reader", dump: RedisDump, kind: int, until_s: float | None) -> None:
    key = _string(reader)
    if kind == _Kind.STRING:
        dump.values[key] = (_string(reader), until_s)
    elif kind == _Kind.SORTED_SET:
        num_members = _length(reader)
        dump.lists[key] = {_string(reader): struct.unpack("<d", reader.take(8))[0] for _ in range(num_members)}
    elif kind in (_Kind.ZIPLIST, _Kind.LISTPACK):
        packed = _string(reader)
        items = list(_ziplist(packed) if kind == _Kind.ZIPLIST else _listpack(packed))
        dump.lists[key] = {member: float(score) for member, score in zip(items[::2], items[1::2], strict=True)}
    else:
        raise ValueError(f"a value of type {kind}")


def _length(reader: "_Reader") -> int:
    length = _length_or_form(reader)
    if length < 0:
        raise ValueError("a string's form where a length must be")
    return length


def _length_or_form(reader: "_Reader") -> int:
    """Return a length, or one of the special forms of strings as a negative number."""
    first = reader.take(1)[0]
    match first >> 6:
        case 0:
            return first & 0x3F
        case 1:
            return (first & 0x3F) << 8 | reader.take(1)[0]
        case 2:
            form, size = (">I", 4) if first == 0x80 else (">Q", 8)
            return int(struct.unpack(form, reader.take(size))[0])
    return -1 - (first & 0x3F)


def _string(reader: "_Reader") -> bytes:
    length = _length_or_form(reader)
    if length >= 0:
        return reader.take(length)
    match length:
        case -1 | -2 | -3:
            size = 1 << (-1 - length)
            return b"%d" % int.from_bytes(reader.take(size), "little", signed=True)
        case -4:
            compressed_len, plain_len = _length(reader), _length(reader)
            return _unpacked(reader.take(compressed_len), plain_len)
    raise ValueError("an unknown form of a string")


def _unpacked(packed: bytes, length: int) -> bytes:
    """Decompress LZF (github.com/antirez/redis, lzf_d.c)."""
    plain, at = bytearray(), 0
    while at < len(packed):
        control = packed[at]
        at += 1
        if control < 32:
            plain += packed[at : at + control + 1]
            at += control + 1
            continue
        run = control >> 5
        if run == 7:
            run += packed[at]
            at += 1
        begin = len(plain) - ((control & 0x1F) << 8) - packed[at] - 1
        at += 1
        if begin < 0:
            raise ValueError("a copy from before the beginning")
        for place in range(begin, begin + run + 2):
            plain.append(plain[place])
    if len(plain) != length:
        raise ValueError("another length than it says")
    return bytes(plain)


def _ziplist(packed: bytes) -> Iterator[bytes]:
    at = 10
    while packed[at] != 0xFF:
        at += 1 if packed[at] < 0xFE else 5  # the length of the entry before
        first = packed[at]
        at += 1
        if first < 0xC0:
            more = (0, 1, 4)[first >> 6]  # bytes of the length, beside those bits of the first
            bits = 0 if more == 4 else first & 0x3F
            length = bits << 8 * more | int.from_bytes(packed[at : at + more], "big")
            at += more
            yield packed[at : at + length]
            at += length
        elif 0xF1 <= first <= 0xFD:
            yield b"%d" % (first - 0xF1)
        else:
            size = {0xC0: 2, 0xD0: 4, 0xE0: 8, 0xF0: 3, 0xFE: 1}[first]
            yield b"%d" % int.from_bytes(packed[at : at + size], "little", signed=True)
            at += size


def _listpack(packed: bytes) -> Iterator[bytes]:
    at = 6
    while (first := packed[at]) != 0xFF:
        begin = at
        if first < 0x80:
            yield b"%d" % first
            at += 1
        elif first < 0xC0:
            yield packed[at + 1 : at + 1 + (first & 0x3F)]
            at += 1 + (first & 0x3F)
        elif first < 0xE0:
            number = (first & 0x1F) << 8 | packed[at + 1]
            yield b"%d" % (number - (1 << 13) if number >= 1 << 12 else number)
            at += 2
        elif first < 0xF0:
            length = (first & 0x0F) << 8 | packed[at + 1]
            yield packed[at + 2 : at + 2 + length]
            at += 2 + length
        elif first == 0xF0:
            length = int.from_bytes(packed[at + 1 : at + 5], "little")
            yield packed[at + 5 : at + 5 + length]
            at += 5 + length
        else:
            size = {0xF1: 2, 0xF2: 3, 0xF3: 4, 0xF4: 8}[first]
            yield b"%d" % int.from_bytes(packed[at + 1 : at + 1 + size], "little", signed=True)
            at += 1 + size
        at += _back_length(at - begin)


def _back_length(num_bytes: int) -> int:
    """Return how many bytes the length takes behind an entry of a listpack, from which it is read backwards."""
    return 1 if num_bytes < 128 else 2 if num_bytes < 16384 else 3 if num_bytes < 1 << 21 else 4


# --- bytes


@dataclass(slots=True)
class _Reader:
    """Bytes of a file, read from its beginning on."""

    content: bytes
    path: Path
    offset: int = 0

    @property
    def is_at_end(self) -> bool:
        """Return whether nothing is left."""
        return self.offset >= len(self.content)

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes. Raises _Torn."""
        end = self.offset + num_bytes
        if end > len(self.content):
            raise _Torn
        taken = self.content[self.offset : end]
        self.offset = end
        return taken

    def line(self) -> bytes:
        """Return the bytes before the next end of a line. Raises _Torn."""
        end = self.content.find(b"\r\n", self.offset)
        if end < 0:
            raise _Torn
        line = self.content[self.offset : end]
        self.offset = end + 2
        return line

    def damaged(self, offset: int, what: str = "it is no command") -> StorageDamaged:
        """Return the error that names the place."""
        return StorageDamaged(f"{self.path} is damaged at byte {offset}: {what}")
