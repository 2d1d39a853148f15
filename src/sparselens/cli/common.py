"""What commands share: where they compute, and how their arguments are called in the help."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..runs import distributed

# The help says in words what happens without them; the parser's "(default: None)" beside that would say less.
Name = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
Folder = Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")]
Number = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
Names = Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")]
Model = Annotated[Positional[str], arg(metavar="MODEL")]
RunFolder = Annotated[Positional[Path], arg(metavar="RUN")]


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A command that runs a model."""

    device: Name = dataclasses.field(default=None, kw_only=True)
    """Where to compute: cpu, cuda, or one GPU of several (cuda:1). Default: a GPU, where there is one."""

    def __post_init__(self) -> None:
        if self.device is not None:
            distributed.check_device_name(self.device)

    def options(self, *without: str) -> dict[str, Any]:
        """The fields as keyword arguments of a verb, but for these."""
        return {name: value for name, value in vars(self).items() if name not in ("device", *without)}
