"""Shape of a model (`ModelConfig`, read from its folder) and how the engine runs it (`EngineConfig`)."""

from enum import StrEnum

from pydantic import Field, model_validator

from configs.base import FrozenModel


class DTypeName(StrEnum):
    """Number format of weights, activations and KV pages; AUTO is resolved on the worker (E3)."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ModelConfig(FrozenModel):
    """Layer and head geometry of a Llama-family model, as in the `config.json` of its folder."""

    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_position: int = Field(gt=0, description="Context length in tokens, prompt and output together.")
    rope_theta: float = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    tie_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.num_heads % self.num_kv_heads:
            msg = f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            raise ValueError(msg)
        return self


class EngineConfig(FrozenModel):
    """How a worker runs the model."""

    model: str = Field("smollm2-135m", description="A fetched model's name, a folder, or a GGUF file.")
    dtype: DTypeName = DTypeName.AUTO
    device: str = Field("cpu", description="A torch device string: cpu, cuda, cuda:1.")
    exact: bool = Field(default=True, description="Batch-invariant kernels only (E1).")
    num_threads: int = Field(0, ge=0, description="Threads of one worker; 0 divides the cores among the workers.")
