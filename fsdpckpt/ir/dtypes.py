"""Lists every torch dtype whose elements are whole bytes: name, size, and its name in each format.

Source of the rules: ``torch.serialization`` (dtypes with a typed legacy storage class are written as
``torch.<X>Storage``; all others as ``torch.storage.UntypedStorage`` with ``_rebuild_tensor_v3``) and the
safetensors format (dtype codes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    NumpyDType = np.dtype[np.generic]
    NumpyArray = npt.NDArray[np.generic]

MAX_DIMENSIONS = 64  # of a tensor: torch itself refuses more


@dataclass(frozen=True, slots=True)
class DType:
    """One torch dtype. ``itemsize``: bytes per element; ``name``: torch's, without ``torch.``.

    ``storage``: the legacy storage class in the ``torch`` module, None if ``torch.save`` uses an untyped storage.
    ``safetensors``: the code in a safetensors header, None if its reader accepts none. ``numpy``: the numpy (or
    ml_dtypes) type, None if neither has one.
    """

    name: str
    itemsize: int
    kind: str
    storage: str | None
    safetensors: str | None
    numpy: str | None

    @property
    def floating(self) -> bool:
        return self.kind == "float"


def _table() -> Mapping[str, DType]:
    rows = (
        ("float64", 8, "float", "DoubleStorage", "F64", "float64"),
        ("float32", 4, "float", "FloatStorage", "F32", "float32"),
        ("float16", 2, "float", "HalfStorage", "F16", "float16"),
        ("bfloat16", 2, "float", "BFloat16Storage", "BF16", "bfloat16"),
        ("float8_e4m3fn", 1, "float", None, "F8_E4M3", "float8_e4m3fn"),
        ("float8_e4m3fnuz", 1, "float", None, "F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("float8_e5m2", 1, "float", None, "F8_E5M2", "float8_e5m2"),
        ("float8_e5m2fnuz", 1, "float", None, "F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("float8_e8m0fnu", 1, "float", None, None, "float8_e8m0fnu"),
        ("float4_e2m1fn_x2", 1, "bits", None, None, None),
        ("complex32", 4, "complex", None, None, None),
        ("complex64", 8, "complex", "ComplexFloatStorage", "C64", "complex64"),
        ("complex128", 16, "complex", "ComplexDoubleStorage", None, "complex128"),
        ("int8", 1, "int", "CharStorage", "I8", "int8"),
        ("int16", 2, "int", "ShortStorage", "I16", "int16"),
        ("int32", 4, "int", "IntStorage", "I32", "int32"),
        ("int64", 8, "int", "LongStorage", "I64", "int64"),
        ("uint8", 1, "uint", "ByteStorage", "U8", "uint8"),
        ("uint16", 2, "uint", None, "U16", "uint16"),
        ("uint32", 4, "uint", None, "U32", "uint32"),
        ("uint64", 8, "uint", None, "U64", "uint64"),
        ("bool", 1, "bool", "BoolStorage", "BOOL", "bool"),
        ("bits8", 1, "bits", None, None, None),
        ("bits16", 2, "bits", None, None, None),
        ("bits1x8", 1, "bits", None, None, None),
        ("bits2x4", 1, "bits", None, None, None),
        ("bits4x2", 1, "bits", None, None, None),
        *((f"{sign}int{bits}", 1, "bits", None, None, None) for sign in ("", "u") for bits in range(1, 8)),
    )
    return {row[0]: DType(*row) for row in rows}


DTYPES: Mapping[str, DType] = _table()
STORAGE_DTYPES: Mapping[str, DType] = {d.storage: d for d in DTYPES.values() if d.storage is not None}
SAFETENSORS_DTYPES: Mapping[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors is not None}


def numpy_dtype(dtype: DType) -> NumpyDType:
    """The numpy type whose bytes are torch's, for arithmetic and casts.

    Types that numpy lacks (bits, complex32) become raw bytes of the same size, which can be copied and compared but not
    cast; see ``DType.numpy``.
    """
    import numpy as np

    if dtype.numpy is None:
        return np.dtype(f"V{dtype.itemsize}")
    if dtype.name.startswith(("bfloat", "float8")):
        import ml_dtypes

        extended: NumpyDType = np.dtype(getattr(ml_dtypes, dtype.numpy))
        return extended
    return np.dtype(dtype.numpy)


def cast(values: NumpyArray, dtype: NumpyDType) -> NumpyArray:
    """Cast ``values`` as ``torch.Tensor.to`` does: between two floats of which neither is float32, through float32.

    ``c10/util`` converts every short float from and to ``float`` only, so a double is rounded twice on its way to one.
    numpy rounds float64 to float16 once, and cannot cast between some of the eight-bit types. Overflow silently gives
    infinity or NaN; in float8_e4m3fn, which has no infinity, the largest number (``Float8_e4m3fn.h``).
    """
    import numpy as np

    if values.dtype == dtype:
        return values
    single = np.dtype(np.float32)
    with np.errstate(all="ignore"):
        if values.dtype != single and dtype not in (single, np.dtype(np.float64)):
            values = values.astype(single)
        if dtype.name == "float8_e4m3fn":
            values = np.clip(values.astype(single), -448, 448)
        return values.astype(dtype)
