"""The one base class of all configuration models: frozen, and unknown keys are errors (I13)."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A configuration section that cannot change after it was validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
