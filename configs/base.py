"""What all configuration sections share: they are frozen, and they refuse bad values by name (I13).

Sections are plain dataclasses, so that the engine, the manager and the iteration scheduler run where
neither pydantic nor yaml is installed. Types and unknown keys of a document are checked by pydantic at
the border, in `deployment`; the values are checked here, however a section is made.
"""

from typing import ClassVar


class Section:
    """Base of every section; subclasses are frozen keyword-only dataclasses."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def require_positive(self, *names: str) -> None:
        """Raise ValueError naming the first of these fields that is not above 0."""
        for name in names:
            if not getattr(self, name) > 0:
                msg = f"{name}={getattr(self, name)!r} must be above 0"
                raise ValueError(msg)

    def require_not_negative(self, *names: str) -> None:
        """Raise ValueError naming the first of these fields that is below 0."""
        for name in names:
            if not getattr(self, name) >= 0:
                msg = f"{name}={getattr(self, name)!r} must not be negative"
                raise ValueError(msg)
