"""Numbers for the page: typed arrays, compressed and in base64, a tenth of what the same numbers take as JSON."""

import base64
import math
import zlib
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

T = TypeVar("T")  # of JSON's values
OUTSIDE = -32768  # marks a pair the mask does not allow


def read_tensors(path: Path, remedy: str) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file; ValueError with the remedy where it cannot be read."""
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except Exception as error:  # safetensors has its own error type; all mean a damaged or missing file
        raise ValueError(f"{path} cannot be read ({error}); {remedy}") from error


def pack(array: np.ndarray, scale: float = 1.0) -> dict[str, Any]:
    """{"type", "scale", "data"} for decode() in data.js: little-endian integers, deflated; value = integer * scale."""
    types = {"uint8": "Uint8Array", "uint16": "Uint16Array", "int16": "Int16Array"}
    content = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    data = base64.b64encode(zlib.compress(content, 6)).decode("ascii")
    return {"type": types[array.dtype.name], "scale": scale, "data": data}


def triangle(maps: np.ndarray) -> np.ndarray:
    """[..., queries, keys] -> [..., pairs]: the pairs a causal model has, row by row."""
    rows, columns = np.tril_indices(maps.shape[-1])
    return maps[..., rows, columns]


def pack_weights(weights: np.ndarray, bits: int = 16) -> dict[str, Any]:
    """Attention weights in [0, 1], [layers, heads, queries, keys]. What is open stays open, however weak."""
    top = 2**bits - 1
    pairs = triangle(weights).astype(np.float64)
    whole = np.where(pairs > 0, np.maximum(np.rint(pairs * top), 1), 0)
    return pack(whole.astype(f"uint{bits}"), 1 / top)


def pack_margins(margins: np.ndarray) -> dict[str, Any]:
    """Gate margins; the sign, which says open or closed, survives rounding. -inf (no such pair) becomes OUTSIDE."""
    pairs = triangle(margins).astype(np.float64)
    real = np.isfinite(pairs)
    scale = max(float(np.abs(pairs[real]).max(initial=0.0)), 1e-6) / 32767
    whole = np.rint(np.where(real, pairs, 0) / scale)
    whole = np.where((pairs > 0) & (whole < 1), 1, whole)
    return pack(np.where(real, whole, OUTSIDE).astype(np.int16), scale)


def short(value: T, digits: int = 5) -> T:
    """Floats with this many significant digits, everywhere inside lists and dicts; what is not finite becomes None."""
    if isinstance(value, float):
        return cast(T, float(f"{value:.{digits}g}") if math.isfinite(value) else None)
    if isinstance(value, dict):
        return cast(T, {str(key): short(item, digits) for key, item in value.items()})
    return cast(T, [short(item, digits) for item in value]) if isinstance(value, list | tuple) else value


def finite(value: T) -> T:
    """The same numbers, to the last digit; NaN and infinities, which JSON does not have, become None."""
    return short(value, 17)
