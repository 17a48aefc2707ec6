"""GGML's tensor types: how many values a block holds and how many bytes it takes.

The table is simlab's own, so that a header can be read without the ``gguf`` package; a test holds
the two against each other. A type that is newer than the table is looked up in ``gguf`` where that
is installed. Sources: ggml's enum ggml_type (types 4, 5, 31-33 and 36-38 were removed from it) and
the ``gguf`` package's GGML_QUANT_SIZES; Q2_0: ggml-org/llama.cpp pull request 24448.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """``block`` values take ``size`` bytes."""

    name: str
    block: int
    size: int

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of ``values`` values, a multiple of the block."""
        return values // self.block * self.size


TYPES: dict[int, GgmlType] = {
    number: GgmlType(name, block, size)
    for number, name, block, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
        (42, "Q2_0", 64, 18),
    )
}

#: What a Hugging Face checkpoint stores beside GGML's own types.
OTHER_TYPES = {"F8": GgmlType("F8", 1, 1)}


def ggml_type(number: int) -> GgmlType | None:
    """The type of that number, None when neither simlab nor ``gguf`` knows it."""
    if number in TYPES:
        return TYPES[number]
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(number)
        return GgmlType(kind.name, *GGML_QUANT_SIZES[kind])
    except (ImportError, ValueError, KeyError):
        return None


def type_named(name: str) -> GgmlType | None:
    """The type of that name, in any case (``q4_0``, ``bf16``, ``f8``)."""
    names = {kind.name: kind for kind in TYPES.values()} | OTHER_TYPES
    return names.get(name.upper())
