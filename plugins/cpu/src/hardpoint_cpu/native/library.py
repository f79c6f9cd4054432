"""The plugin's native library: where it is, what of it this processor can run, how it is called.

It was compiled when the distribution was installed. Where that could not be, a file beside it says
why. Calls through :mod:`ctypes` leave the interpreter to other threads. Imports neither torch nor
numpy.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from attrs import frozen
from hardpoint.errors import PluginError
from hardpoint.records import Problem

from hardpoint_cpu.settings import CpuSettings

ABI = 4
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")
"""Levels of instructions, the slowest first; their places are the library's numbers."""

FOLDER = Path(__file__).parent / "lib"
"""No package: a library of C in one looks like a module of Python to who walks through it."""
FILE = "libhardpoint_cpu.so"
REASON = "not_built.txt"


TYPES = {
    name: number
    for number, name in enumerate(
        (
            "f32", "bf16", "f16", "f32_panels", "bf16_panels", "int8", "w8a8", "w4a8",
            "q8_0", "q4_0", "q4_1", "q4_k", "q6_k",
            "q8_0_a8", "q4_0_a8", "q4_1_a8", "q4_k_a8", "q6_k_a8", "bf16_a16",
        )
    )
}  # fmt: skip
"""Types of matrices and their numbers, see ``native/formats.h``: the first three are rows as torch
has them, the others packed. ``int8`` is a type of caches, too; types in ``_a8`` and ``_a16`` are
those before them in bytes, multiplied with activations that are rounded to int8 and bfloat16.
"""
ROUNDED_TO = {"float": "", "int8": "_a8", "bfloat16": "_a16"}
"""What ``plugins.cpu.activations`` may be -> the end of a type's name."""


def type_of(kind: str, activations: str) -> int:
    """Return the number of a matrix's type: ``kind``, one of :data:`TYPES`, as it is packed, with
    ``activations``, one of :data:`ROUNDED_TO`, if both can be had.
    """
    return TYPES.get(kind + ROUNDED_TO[activations], TYPES[kind])


class Matrix(ctypes.Structure):
    """``Matrix`` of the library: [rows, cols] numbers, ``type`` one of :data:`TYPES`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("type", ctypes.c_int32),
    )


class Op(ctypes.Structure):
    """``hp_op`` of the library: one operation."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("source", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("picked", ctypes.c_int32),
        ("weight", Matrix),
        ("other", Matrix),
        ("bias", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("in_column", ctypes.c_int64),
        ("out_column", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("vector_type", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("turned", ctypes.c_int32),
        ("second", ctypes.c_int32),
        ("per_token", ctypes.c_int32),
        ("normalised", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


class Shape(ctypes.Structure):
    """``hp_shape`` of the library: what all steps of a program have in common."""

    _fields_ = (
        ("most_tokens", ctypes.c_int64),
        ("most_rows", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("cache_type", ctypes.c_int32),
        ("buffers", ctypes.c_int32),
        ("columns", ctypes.POINTER(ctypes.c_int64)),
    )


class Step(ctypes.Structure):
    """``hp_step`` of the library: the inputs of one step."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("requests", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("table_columns", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("picked", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
    )


class Wish(ctypes.Structure):
    """``hp_wish`` of the library: how the token of a row is chosen."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("key", ctypes.c_uint64),
    )


ENDED = -1
"""What hp_program_run returns when its watch ended it."""
STEP_FIELDS = (*(name for name, _ in Step._fields_[:9]), "a block of the table")
"""What a step can have out of range, in the order of the library's numbers."""


@frozen
class Availability:
    """Whether the library can be used here: its levels, or why not."""

    levels: tuple[str, ...] = ()
    reason: str = ""

    @property
    def best(self) -> str:
        """The fastest level."""
        return self.levels[-1]

    @property
    def text(self) -> str:
        """What the doctor says."""
        return self.reason or f"native programs of {self.best} instructions"


def availability(folder: Path = FOLDER) -> Availability:
    """Return what of the library can be used; loads it, which takes about a millisecond."""
    path = folder / FILE
    if not path.is_file():
        try:
            reason = (folder / REASON).read_text(encoding="utf-8").strip()
        except OSError:
            reason = "it is not in this installation"
        return Availability(reason=f"no native library: {reason}")
    try:
        bits = load(path).hp_levels()
    except (OSError, AttributeError, PluginError) as error:
        return Availability(reason=f"no native library: {error}")
    return Availability(
        levels=tuple(name for index, name in enumerate(LEVELS) if bits >> index & 1)
    )


def problems(settings: CpuSettings, available: Availability) -> list[Problem]:
    """Return what of the settings cannot be had with what is ``available``."""
    if settings.native == "on" and not available.levels:
        return [
            Problem(
                key="plugins.cpu.native",
                value="on",
                message=f"{available.reason}.",
                way_out="Install hardpoint-cpu where there is a C++ compiler, or set it to auto.",
            )
        ]
    level = settings.native_level
    if level == "auto" or settings.native == "off" or not available.levels:
        return []
    if level in available.levels:
        return []
    return [
        Problem(
            key="plugins.cpu.native_level",
            value=level,
            message="this processor, or this build of the library, has not got it.",
            way_out=f"There are {', '.join(available.levels)}.",
        )
    ]


@functools.cache
def load(path: Path = FOLDER / FILE) -> ctypes.CDLL:
    """Return the library with its functions declared. Raises OSError if it cannot be loaded,
    PluginError if it belongs to another version of this plugin.
    """
    library = ctypes.CDLL(str(path))
    if library.hp_abi() != ABI:
        raise PluginError(
            f"{path} is of another version of hardpoint-cpu (interface {library.hp_abi()}, not "
            f"{ABI}): install the distribution again"
        )
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, result, arguments in (
        ("hp_levels", small, ()),
        ("hp_program_new", pointer, (small, small, pointer, number, pointer)),
        ("hp_program_free", None, (pointer,)),
        ("hp_program_watch", None, (pointer, pointer)),
        ("hp_program_run", small, (pointer, pointer, number, number)),
        ("hp_program_best", None, (pointer, pointer, number, number, pointer)),
        ("hp_program_buffer", pointer, (pointer, number)),
        ("hp_program_choose", None, (pointer, pointer, number, number, pointer, pointer)),
        (
            "hp_score",
            small,
            (pointer, number, small, number, number, pointer, number, pointer, pointer, pointer),
        ),
        ("hp_layout", small, ()),
        ("hp_pack_bytes", number, (small, number, number)),
        ("hp_pack", small, (small, small, pointer, number, number, number, number, pointer)),
        ("hp_unpack", small, (small, pointer, number, number, number, number, pointer)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
