"""Settings of the mesh: how many devices share a model along each axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxserve.settings.fields import ConfigError, Settings, option


@dataclass(frozen=True)
class MeshConfig(Settings):
    """Degrees of the three axes. A replica has spp x kvp x tp devices."""

    EXAMPLE: ClassVar[str] = "spp=2,kvp=2,tp=3"
    PLACEHOLDER: ClassVar[str] = "AXIS=N,..."  # in help pages
    HELP: ClassVar[str] = "degrees of the mesh axes: spp (stages), kvp (lanes), tp (ranks)"

    spp: int = option(1, "pipeline stages (ranges of layers)", low=1)
    kvp: int = option(1, "lanes (shares of KV and of tokens)", low=1)
    tp: int = option(1, "tensor parallel ranks", low=1)

    @property
    def devices(self) -> int:
        return self.spp * self.kvp * self.tp

    @classmethod
    def parse(cls, text: str) -> MeshConfig:
        """'spp=2,kvp=2,tp=3' -> MeshConfig(2, 2, 3); axes left out are 1. Errors: ConfigError."""
        degrees: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name not in ("spp", "kvp", "tp") or name in degrees or not value.isdigit():
                raise ConfigError(
                    "mesh",
                    f"{part!r} is not AXIS=DEGREE, each of spp, kvp, tp at most once, for example "
                    f"{cls.EXAMPLE}",
                )
            degrees[name] = int(value)
        return cls(**degrees)

    def __str__(self) -> str:
        return f"spp={self.spp},kvp={self.kvp},tp={self.tp}"
