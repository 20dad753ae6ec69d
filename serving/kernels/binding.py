"""The native library: finds it, checks it, and mirrors its C interface (`src/kernels.h`).

Optional: built when the package is installed, if there is a C++ compiler and the CPU has AVX2. Without it the
engine computes with torch. Owns no memory.
"""

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

_ABI_VERSION = 1


class Matrix(ctypes.Structure):
    """`PdMatrix`."""

    _fields_ = (("panels", c_void_p), ("in_features", c_int32), ("out_features", c_int32))


class Pool(ctypes.Structure):
    """`PdPool`."""

    _fields_ = (
        ("pages", c_void_p),
        ("num_layers", c_int32),
        ("tokens_per_block", c_int32),
        ("window", c_int32),
        ("sink_tokens", c_int32),
    )


class Layer(ctypes.Structure):
    """`PdLayer`."""

    _fields_ = (
        ("qkv", Matrix),
        ("attention_out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("group", c_int32),
        ("layer_in_group", c_int32),
    )


class Model(ctypes.Structure):
    """`PdModel`."""

    _fields_ = (
        ("is_bfloat16", c_int32),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_pools", c_int32),
        ("rms_norm_eps", c_float),
        ("embedding", Matrix),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layers", ctypes.POINTER(Layer)),
        ("pools", ctypes.POINTER(Pool)),
    )


class Step(ctypes.Structure):
    """`PdStep`."""

    _fields_ = (
        ("num_rows", c_int32),
        ("num_sequences", c_int32),
        ("num_drawn", c_int32),
        ("num_threads", c_int32),
        ("token_ids", c_void_p),
        ("first_rows", c_void_p),
        ("starts", c_void_p),
        ("block_tables", ctypes.POINTER(c_void_p)),
        ("table_offsets", ctypes.POINTER(c_void_p)),
        ("drawn_rows", c_void_p),
        ("logits", c_void_p),
    )


_SIGNATURES = {
    "pd_abi_version": (c_int, ()),
    "pd_is_supported": (c_int, ()),
    "pd_exactness_class": (c_char_p, ()),
    "pd_create": (c_void_p, (ctypes.POINTER(Model),)),
    "pd_destroy": (None, (c_void_p,)),
    "pd_forward": (c_int, (c_void_p, ctypes.POINTER(Step))),
    "pd_multiply": (None, (ctypes.POINTER(Matrix), c_int, c_void_p, c_int, c_void_p, c_int)),
    "pd_read_gb_s": (c_double, (c_void_p, c_int64, c_int)),
    "pd_peak_gflop_s": (c_double, (c_int,)),
}


class NativeLibrary:
    """The loaded library. Its functions release the interpreter lock while they run."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`.

        Raises:
            OSError: it cannot be loaded, was built from other sources, or needs another CPU.
        """
        self._functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._functions, name)
            except AttributeError as error:
                msg = f"{path} has no {name}: it was built from older sources; install again"
                raise OSError(msg) from error
            function.restype, function.argtypes = result, arguments
        version = self._functions.pd_abi_version()
        if version != _ABI_VERSION:
            msg = f"{path} has interface {version}, this code needs {_ABI_VERSION}; install again"
            raise OSError(msg)
        if not self._functions.pd_is_supported():
            msg = f"{path} needs AVX2 and FMA"
            raise OSError(msg)

    @property
    def exactness_class(self) -> str:
        """Names the arithmetic: equal on two machines iff the same rows give the same bits on both."""
        name: bytes = self._functions.pd_exactness_class()
        return name.decode()

    def create(self, model: Model) -> int:
        """Make an engine; what `model` points to must outlive it. `destroy` ends it."""
        engine: int = self._functions.pd_create(ctypes.byref(model))
        return engine

    def destroy(self, engine: int) -> None:
        """Free an engine."""
        self._functions.pd_destroy(engine)

    def forward(self, engine: int, step: Step) -> None:
        """Run a step: writes its pages and its logits.

        Raises:
            MemoryError: there is no memory for the step's rows; nothing was written.
        """
        if self._functions.pd_forward(engine, ctypes.byref(step)):
            msg = f"no memory for a step of {step.num_rows} rows"
            raise MemoryError(msg)

    def multiply(self, matrix: Matrix, *, is_bfloat16: bool, rows: int, num_rows: int, out: int, threads: int) -> None:
        """One product alone: addresses of [num_rows, in_features] and [num_rows, out_features] float32."""
        self._functions.pd_multiply(ctypes.byref(matrix), int(is_bfloat16), rows, num_rows, out, threads)

    def read_gb_s(self, memory: int, num_bytes: int, num_threads: int) -> float:
        """The best of a few measurements of reading `num_bytes` at address `memory`."""
        speed: float = self._functions.pd_read_gb_s(memory, num_bytes, num_threads)
        return speed

    def peak_gflop_s(self, num_threads: int) -> float:
        """The best of a few measurements of float32 multiply-adds in registers."""
        speed: float = self._functions.pd_peak_gflop_s(num_threads)
        return speed


@cache
def load_library() -> NativeLibrary | None:
    """The library that was built with this package, or None where there is none for this machine."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            return NativeLibrary(path)
        except OSError:
            continue
    return None
