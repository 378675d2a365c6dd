"""What a kubelet does with a Secret that a pod mounts: files that are links, swapped all at once."""

from __future__ import annotations

import base64
import itertools
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube.api_server import User

_NUMBERS = itertools.count(1)


@dataclass
class MountedSecret:
    user: User
    path: str  # of the Secret in the API
    folder: Path
    _names: set[str] = field(default_factory=set)

    def sync(self) -> None:
        data = self.user.get(self.path)["data"]
        held = self.folder / f"..{next(_NUMBERS)}"
        held.mkdir(parents=True)
        for name, content in data.items():
            (held / name).write_bytes(base64.b64decode(content))
            (held / name).chmod(0o400)
        fresh = self.folder / "..data_tmp"
        fresh.symlink_to(held.name)
        fresh.rename(self.folder / "..data")
        for name in data.keys() - self._names:
            (self.folder / name).symlink_to(f"..data/{name}")
            self._names.add(name)
