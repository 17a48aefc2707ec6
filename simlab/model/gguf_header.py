"""Reads the header of one GGUF file: metadata and tensor descriptions, never the weights.

The ``gguf`` package maps the file and makes arrays of every value; this reader walks the header in
small windows and believes nothing in it: every length is held against the file's size before it is
used, and what has to be walked one by one is limited. Format: the GGUF specification in ggml's
docs/gguf.md, versions 2 and 3, little-endian; the checks are those of ggml's gguf.cpp.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from simlab.errors import SimlabError, UsageError
from simlab.model.ggml_types import ggml_type

#: GGUF value types: number -> struct code. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_WINDOW = 1 << 20
#: Limits on what is walked one by one; real models stay far below (a vocabulary has < 600,000
#: strings, a model < 100,000 tensors).
_MOST_STRINGS, _MOST_TENSORS, _MOST_VALUES = 3_000_000, 131_072, 65_536
#: What is kept of the metadata: short strings and short arrays of numbers.
_LONGEST_STRING, _LONGEST_ARRAY = 4096, 4096
_LONGEST_NAME = 1024
_DEFAULT_ALIGNMENT = 32

Value = int | float | bool | str | list[int] | list[float] | list[bool]


class TensorInfo(NamedTuple):
    """One tensor.

    ``dims``: sizes, the fastest first, as GGML's ``ne``. ``offset``: from the start of the data.
    ``size``: bytes; of a type that nobody knows, the bytes up to the next tensor.
    ``known``: whether the type is known.
    """

    name: str
    type_name: str
    dims: tuple[int, ...]
    offset: int
    size: int
    known: bool


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (short values only), tensors in file order, and the alignment of the data."""

    path: Path
    metadata: dict[str, Value]
    tensors: list[TensorInfo]
    alignment: int


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read one file's header.

    Raises:
        UsageError: there is no such file, or it is none. SimlabError: it is no GGUF file, or its
            header is damaged; says where.
    """
    path = Path(path)
    try:
        with open(path, "rb", opener=_open_regular, buffering=0) as file:
            reader = _Reader(file, os.fstat(file.fileno()).st_size, path)
            return _header(reader)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}; check the name") from None
    except OSError as exc:
        raise SimlabError(f"cannot read {path}: {exc.strerror or exc}") from None


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file only: a pipe would wait for ever, a device has no end."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is not a file; name a GGUF file")
    return descriptor


class _Reader:
    """Reads a file front to back through a window; every read is checked against its size."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self.size, self.path = file, size, path
        self._window, self._start = b"", 0
        self.at = 0
        self.strings = 0

    def fail(self, what: str) -> SimlabError:
        """The error to raise: the file, what is wrong, where."""
        return SimlabError(
            f"{self.path} is not a GGUF file that can be read: {what} (byte {self.at:,} of"
            f" {self.size:,}); download it again"
        )

    def _fill(self, count: int) -> int:
        """Have ``count`` bytes at ``at`` in the window; returns their place in it."""
        place = self.at - self._start
        if place < 0 or place + count > len(self._window):
            if count > self.size - self.at:
                raise self.fail("the header is cut short")
            self._file.seek(self.at)
            wanted = min(max(count, _WINDOW), self.size - self.at)
            parts = []
            while wanted > 0:
                part = self._file.read(wanted)
                if not part:
                    raise self.fail("the file became shorter while it was read")
                parts.append(part)
                wanted -= len(part)
            self._window, self._start, place = b"".join(parts), self.at, 0
        return place

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        place = self._fill(count)
        self.at += count
        return self._window[place : place + count]

    def number(self, code: str) -> int | float | bool:
        """The next number, of a struct code."""
        form = struct.Struct("<" + code)
        value: int | float | bool = form.unpack(self.take(form.size))[0]
        return value

    def whole(self, code: str) -> int:
        """The next integer."""
        return int(self.number(code))

    def skip(self, count: int, what: str) -> None:
        """Step over ``count`` bytes without reading them."""
        if count > self.size - self.at:
            raise self.fail(f"{what} of {count:,} bytes does not fit the file")
        self.at += count

    def string(self, most: int, what: str) -> str | None:
        """The next string; None if it is longer than ``most`` bytes (it is stepped over)."""
        length = self.whole("Q")
        if length > most:
            self.skip(length, what)
            return None
        if length > self.size - self.at:
            raise self.fail(f"{what} of {length:,} bytes does not fit the file")
        return self.take(length).decode("utf-8", "replace")

    def skip_strings(self, count: int) -> None:
        """Step over an array's strings."""
        if count * 8 > self.size - self.at:
            raise self.fail(f"an array of {count:,} strings does not fit the file")
        self.strings += count
        if self.strings > _MOST_STRINGS:
            raise self.fail(f"more than {_MOST_STRINGS:,} strings in its metadata")
        unpack = _LENGTH.unpack_from
        while count:
            place = self._fill(8)
            window, last = self._window, len(self._window) - 8
            while count and place <= last:
                place += 8 + unpack(window, place)[0]
                count -= 1
            self.at = self._start + place
            if self.at > self.size:
                raise self.fail("a string does not fit the file")


def _header(reader: _Reader) -> GgufHeader:
    if reader.size < 24 or reader.take(4) != b"GGUF":
        reader.at = 0
        raise reader.fail("it does not begin with GGUF")
    version = reader.whole("I")
    if version and version & 0xFFFF == 0:
        raise reader.fail("it is big-endian, which llama.cpp does not load on this machine either")
    if version not in (2, 3):
        age = "older" if version < 2 else "newer"
        raise reader.fail(f"GGUF version {version} is {age} than simlab reads (2 and 3)")
    n_tensors, n_values = reader.whole("Q"), reader.whole("Q")
    if n_tensors > _MOST_TENSORS or n_values > _MOST_VALUES:
        raise reader.fail(f"it claims {n_tensors:,} tensors and {n_values:,} metadata values")
    metadata: dict[str, Value] = {}
    seen: set[str] = set()
    for _ in range(n_values):
        key = reader.string(_LONGEST_NAME, "a metadata key")
        if not key or key in seen:
            raise reader.fail("a metadata key is empty, overlong or there twice")
        seen.add(key)
        value = _value(reader, reader.whole("I"))
        if value is not None:
            metadata[key] = value
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 0 < alignment < 2**31
        or alignment & (alignment - 1)
        or alignment is True
    ):
        raise reader.fail(f"general.alignment is {alignment}, not a power of two")
    return GgufHeader(reader.path, metadata, _tensors(reader, n_tensors, alignment), alignment)


def _value(reader: _Reader, kind: int) -> Value | None:
    """The next metadata value; None if it is too long to be kept."""
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind])
    if kind == _STRING:
        return reader.string(_LONGEST_STRING, "a string")
    if kind != _ARRAY:
        raise reader.fail(f"there is no value type {kind}")
    kind, count = reader.whole("I"), reader.whole("Q")
    if kind == _STRING:
        reader.skip_strings(count)
        return None
    if kind not in _SCALARS:
        raise reader.fail(f"there are no arrays of value type {kind}")
    form = struct.Struct(f"<{_SCALARS[kind]}")
    if count > _LONGEST_ARRAY:
        reader.skip(count * form.size, "an array")
        return None
    return [value[0] for value in form.iter_unpack(reader.take(count * form.size))]


def _tensors(reader: _Reader, count: int, alignment: int) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    names: set[str] = set()
    open_end = False  # the tensor before is of an unknown type: its end is the next one's offset
    end = 0
    for _ in range(count):
        name = reader.string(_LONGEST_NAME, "a tensor's name")
        if not name or name in names:
            raise reader.fail("a tensor's name is empty, overlong or there twice")
        names.add(name)
        n_dims = reader.whole("I")
        if not 1 <= n_dims <= 4:
            raise reader.fail(f"tensor {name} has {n_dims:,} dimensions")
        dims = struct.unpack(f"<{n_dims}Q", reader.take(8 * n_dims))
        number, offset = reader.whole("I"), reader.whole("Q")
        elements = 1
        for dim in dims:
            elements *= dim
        if not 0 < elements < 2**63:
            raise reader.fail(f"tensor {name} has impossible dimensions {dims}")
        kind = ggml_type(number)
        if kind is not None and dims[0] % kind.block:
            raise reader.fail(
                f"tensor {name} has rows of {dims[0]:,} values, {kind.name} has blocks of"
                f" {kind.block}"
            )
        if offset % alignment or (offset < end if open_end else offset != end):
            raise reader.fail(
                f"tensor {name} lies at {offset:,}, not at {end:,}; a type of this file may be"
                " another one than its number says"
            )
        if open_end:
            found[-1] = found[-1]._replace(size=offset - found[-1].offset)
        if kind is None:
            found.append(TensorInfo(name, f"type {number}", dims, offset, 0, False))
            end = offset
        else:
            size = elements // kind.block * kind.size
            found.append(TensorInfo(name, kind.name, dims, offset, size, True))
            end = offset + -(-size // alignment) * alignment
        open_end = kind is None
    data = -(-reader.at // alignment) * alignment
    if found and not open_end:
        last = found[-1]
        missing = data + last.offset + last.size - reader.size
        if missing > 0:
            raise reader.fail(f"tensor {last.name} ends {missing:,} bytes past the end of the file")
    elif found:
        if data + found[-1].offset >= reader.size:
            raise reader.fail(f"tensor {found[-1].name} lies past the end of the file")
        found[-1] = found[-1]._replace(size=reader.size - data - found[-1].offset)
    return found
