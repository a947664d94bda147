"""Settings of the mesh: how many devices share a model along each axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxserve.api.errors import ConfigError
from jaxserve.settings.fields import Option, Settings, option

# settings that give one axis of the mesh each
DEGREES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "spp",
    "context_parallel_size": "kvp",
}


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

    def ffn_lanes(self, experts: bool, all_parts: bool) -> tuple[int, int]:
        """Returns how many lanes share experts out, and how many MLPs: see `ModelConfig.over`.
        experts: whether lanes share experts; all_parts: whether they share MLPs and experts."""
        return (
            self.kvp if experts or all_parts else 1,
            self.kvp if all_parts else 1,
        )

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
        try:
            return cls(**degrees)
        except ConfigError as error:
            raise ConfigError("mesh", str(error)) from None

    def __str__(self) -> str:
        return f"spp={self.spp},kvp={self.kvp},tp={self.tp}"


def degree_options() -> dict[str, Option]:
    """The settings that give one axis of the mesh each."""
    return {
        name: Option(name, int, None, f"degree of the mesh's axis {axis}, without --mesh", low=1)
        for name, axis in DEGREES.items()
    }


def with_mesh(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Settings whose degrees, where there are any, are those of `mesh`. given: names of settings
    that are not defaults. Errors: ConfigError for a mesh beside degrees."""
    degrees = {axis: values[name] for name, axis in DEGREES.items() if values.get(name) is not None}
    others = {name: value for name, value in values.items() if name not in DEGREES}
    if not degrees:
        return others
    if "mesh" in given:
        name = next(name for name in DEGREES if values.get(name) is not None)
        raise ConfigError(name, "give it or mesh, not both")
    return {**others, "mesh": str(replace(MeshConfig(), **degrees))}
