"""Rows of numbers in vector registers, for the passes of curve_lru.py and curve_opt.py.

A row is one cache line, 64 bytes: 32 uint16 or 16 uint32; half a row is one vector register. numba
has no type for them, and does not make such operations of loops; the functions here compile to a
few instructions each. A row is loaded, changed and stored as a whole: a load of many numbers right
behind a store of one of them has to wait until the store has reached the cache.

numba's disk cache looks at the file of a compiled function only: after a change here, touch the two
files that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

ROW_BYTES = 64
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


class _Row(types.Type):  # type: ignore[misc]
    """So many unsigned integers of so many bits."""

    def __init__(self, bits: int, lanes: int) -> None:
        super().__init__(name=f"row of {lanes} uint{bits}")
        self.lanes = lanes
        self.vector = ir.VectorType(ir.IntType(bits), lanes)


@register_model(_Row)
class _RowModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, row: _Row) -> None:
        super().__init__(manager, row, row.vector)


def new_rows(dtype: npt.DTypeLike, size: int) -> npt.NDArray[Any]:
    """``size`` zeros that begin a cache line: a row across two costs twice."""
    each = np.dtype(dtype).itemsize
    room = np.zeros(size + ROW_BYTES // each, dtype)
    start = -(room.ctypes.data // each) % (ROW_BYTES // each)
    return room[start : start + size]


def _pointer(context: Any, builder: Any, row: _Row, array_type: Any, array: Any, at: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), row.vector.as_pointer())


def _load(array: Any, size: int) -> Any:
    """Signature and code of an intrinsic that loads ``size`` bytes."""
    bits = array.dtype.bitwidth
    row = _Row(bits, 8 * size // bits)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, row, array, *args)
        return builder.load(pointer, align=bits // 8)

    return row(array, types.uint64), codegen


def _every(builder: Any, row: _Row, value: Any) -> Any:
    """The value in every lane."""
    undefined = ir.Constant(row.vector, ir.Undefined)
    narrow = builder.trunc(value, row.vector.element)
    one = builder.insert_element(undefined, narrow, ir.Constant(_I32, 0))
    order = ir.Constant(ir.VectorType(_I32, row.lanes), [0] * row.lanes)
    return builder.shuffle_vector(one, undefined, order)


def _on_rows(result: Any, arguments: tuple[Any, ...], make: Callable[..., Any]) -> Any:
    """Signature and code of an intrinsic that takes no array: ``make(builder, *arguments)``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return make(builder, *args)

    return result(*arguments), codegen


@intrinsic
def load_row(typingctx: Any, array: Any, first: Any) -> Any:
    """array[first:] as far as a row goes; array: uint16 or uint32, first: uint64."""
    return _load(array, ROW_BYTES)


@intrinsic
def load_half_rows(typingctx: Any, array: Any, first: Any, halves: Any) -> Any:
    """The same, as far as so many half rows go as ``halves``, a tuple, has members."""
    loaded, load = _load(array, len(halves) * ROW_BYTES // 2)
    signature = loaded.return_type(array, types.uint64, halves)
    return signature, lambda context, builder, _, args: load(context, builder, loaded, args[:2])


@intrinsic
def store_row(typingctx: Any, array: Any, first: Any, row: Any) -> Any:
    """Write what was loaded to array[first:]; array: of its numbers, first: uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, row, array, *args[:2])
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.uint64, row), codegen


@intrinsic
def plus(typingctx: Any, row: Any, other: Any) -> Any:
    """The sums of two rows, lane by lane."""
    return _on_rows(row, (row, other), lambda builder, row_, other_: builder.add(row_, other_))


@intrinsic
def plus_each(typingctx: Any, row: Any, value: Any) -> Any:
    """The row with ``value``, a uint64, added to every lane."""

    def make(builder: Any, row_: Any, value_: Any) -> Any:
        return builder.add(row_, _every(builder, row, value_))

    return _on_rows(row, (row, types.uint64), make)


@intrinsic
def replaced(typingctx: Any, row: Any, old: Any, new: Any) -> Any:
    """The row with ``new`` in place of ``old``.

    As a sum: LLVM makes a masked store of a choice by lane, many times slower on some processors.
    """

    def make(builder: Any, row_: Any, old_: Any, new_: Any) -> Any:
        here = builder.icmp_unsigned("==", row_, _every(builder, row, old_))
        more = builder.sub(_every(builder, row, new_), _every(builder, row, old_))
        return builder.add(row_, builder.and_(builder.sext(here, row.vector), more))

    return _on_rows(row, (row, types.uint64, types.uint64), make)


@intrinsic
def largest(typingctx: Any, row: Any) -> Any:
    """The row's maximum: uint64."""

    def make(builder: Any, row_: Any) -> Any:
        undefined = ir.Constant(row.vector, ir.Undefined)
        most, apart = row_, row.lanes // 2
        while apart:
            order = [lane ^ apart for lane in range(row.lanes)]
            shuffle = ir.Constant(ir.VectorType(_I32, row.lanes), order)
            other = builder.shuffle_vector(most, undefined, shuffle)
            most = builder.select(builder.icmp_unsigned(">", most, other), most, other)
            apart //= 2
        return builder.zext(builder.extract_element(most, ir.Constant(_I32, 0)), _I64)

    return _on_rows(types.uint64, (row,), make)


@intrinsic
def lane_with(typingctx: Any, row: Any, value: Any) -> Any:
    """The first lane that holds ``value``, which one does: uint64."""

    def make(builder: Any, row_: Any, value_: Any) -> Any:
        here = builder.icmp_unsigned("==", row_, _every(builder, row, value_))
        bits = builder.zext(builder.bitcast(here, ir.IntType(row.lanes)), _I64)
        return builder.cttz(bits, ir.Constant(ir.IntType(1), 1))

    return _on_rows(types.uint64, (row, types.uint64), make)


@intrinsic
def set_bits(typingctx: Any, word: Any) -> Any:
    """Number of set bits of a uint64."""
    return _on_rows(types.uint64, (types.uint64,), lambda builder, bits: builder.ctpop(bits))
