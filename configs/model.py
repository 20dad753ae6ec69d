"""Shape of a model (`ModelConfig`, read from its folder) and how the engine runs it (`EngineConfig`)."""

from dataclasses import dataclass
from enum import StrEnum

from configs.base import Section


class DTypeName(StrEnum):
    """Number format of weights, activations and KV pages; AUTO is resolved on the worker (E3)."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KernelSet(StrEnum):
    """What computes a step. AUTO takes the native library where it was built and covers the model, else torch."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """Layer and head geometry of a Llama-family model, as in the `config.json` of its folder.

    Attributes:
        max_position: context length in tokens, prompt and output together.
        layer_windows: for each layer, the positions that a query sees, itself included; None for all of
            them. Empty where every layer sees all.
        num_sink_tokens: first positions that windowed layers see as well.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    layer_windows: tuple[int | None, ...] = ()
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse a geometry that cannot be computed."""
        self.require_positive("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        self.require_positive("head_dim", "vocab_size", "max_position", "rope_theta", "rms_norm_eps")
        if self.num_heads % self.num_kv_heads:
            msg = f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            raise ValueError(msg)
        self.require_not_negative("num_sink_tokens")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            msg = f"layer_windows has {len(self.layer_windows)} entries for num_layers={self.num_layers}"
            raise ValueError(msg)
        windows = [window for window in self.layer_windows if window is not None]
        if any(window <= 0 for window in windows):
            msg = f"layer_windows={self.layer_windows}: a window must be above 0"
            raise ValueError(msg)
        if self.num_sink_tokens and not windows:
            msg = f"num_sink_tokens={self.num_sink_tokens}, but no layer has a window"
            raise ValueError(msg)

    def window_of(self, layer: int) -> int | None:
        """Positions that a query of this layer sees, itself included; None for all."""
        return self.layer_windows[layer] if self.layer_windows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Section):
    """How a worker runs the model.

    Attributes:
        model: a fetched model's name, a Hugging Face folder, or a GGUF file.
        device: a torch device string: cpu, cuda, cuda:1.
        exact: batch-invariant kernels only (E1).
        kernels: which kernels; two workers exchange pages only if theirs round alike.
        num_threads: of one worker; 0 divides the cores among the workers.
    """

    model: str = "smollm2-135m"
    dtype: DTypeName = DTypeName.AUTO
    device: str = "cpu"
    exact: bool = True
    kernels: KernelSet = KernelSet.AUTO
    num_threads: int = 0

    def __post_init__(self) -> None:
        """Refuse bad values."""
        self.require_not_negative("num_threads")
