"""Settings of a rule, by name."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

RuleT = TypeVar("RuleT", bound="NamedSettings")


class NamedSettings:
    """A rule that can be created again from its settings.

    Attributes:
        settings: names of the attributes that its constructor takes as arguments of the same name.
    """

    settings: ClassVar[tuple[str, ...]] = ()

    def get_config(self) -> dict[str, Any]:
        """Return the settings as the constructor takes them; plain values."""
        return {name: getattr(self, name) for name in self.settings}

    @classmethod
    def from_config(cls: type[RuleT], config: dict[str, Any]) -> RuleT:
        """Return a rule with these settings."""
        return cls(**config)
