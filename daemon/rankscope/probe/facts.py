"""What the probe says about its process as a whole: rank, place, device, FLOPs."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, Callable, Dict, Optional, Tuple

import rankscope.probe as api

from . import _declared, declaration
from .failure import complain
from .nccl_plugin import NcclPlugin


class Facts:
    """Gathers the facts; an invalid value of the user's is reported once and left out."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._told: set[str] = set()
        self._mesh: Tuple[int, Dict[str, int]] = (0, {})
        self._meshes: list[Any] = []
        self.counted_flops: Optional[float] = None
        self._tokens = 0.0  # at the last call
        self._rate: Optional[float] = None  # tokens per step
        self.nccl = NcclPlugin()

    def watch_meshes(self, module: Any) -> None:
        mesh_class = module.DeviceMesh
        original = mesh_class.__init__
        meshes = self._meshes

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for the class' own
            original(self, *args, **kwargs)
            if len(meshes) < 64:
                meshes.append(self)

        mesh_class.__init__ = __init__

    def gather(self, steps: int = 0) -> Dict[str, Any]:
        """`steps` were made since the last call."""
        torch = self._torch
        rank, world_size = self._rank()
        facts: Dict[str, Any] = {"torch_version": str(torch.__version__), "rank": rank, "world_size": world_size}
        facts["store"], facts["local_rank"] = self._store(), self._local_rank()
        facts.update(self._coordinates(rank, world_size))
        facts["model_flops_per_step"] = self._flops(world_size)
        peak = os.environ.get("RANKSCOPE_PEAK_FLOPS")
        if peak is not None:
            name = "RANKSCOPE_PEAK_FLOPS"
            facts["peak_flops_per_second"] = self._try(
                lambda: declaration.quantity(name, peak, declaration.PEAK_EXAMPLE)
            )
        if torch.cuda.is_initialized():
            facts["device_name"] = torch.cuda.get_device_name()
        facts["nccl_descriptor"], facts["nccl_reason"] = self.nccl.descriptor, self.nccl.reason or None
        cost_ratio = self.nccl.turns.cost_ratio
        facts["nccl_cost_ratio"] = None if math.isnan(cost_ratio) else cost_ratio
        facts["tokens_per_step"] = self._tokens_per_step(steps)
        return {name: value for name, value in facts.items() if value is not None}

    def _tokens_per_step(self, steps: int) -> Optional[float]:
        tokens = api._tokens
        if tokens is None:
            return None
        counted, self._tokens = tokens - self._tokens, tokens
        if steps > 0:
            self._rate = counted / steps
        return self._rate

    def _rank(self) -> Tuple[Optional[int], Optional[int]]:
        if self._has_group():
            return self._torch.distributed.get_rank(), self._torch.distributed.get_world_size()
        rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (None, None)

    def _store(self) -> Optional[str]:
        """Where the ranks of the default process group have met: "localhost:29500", "file:/tmp/store". A store of
        another kind has a name that no other process has."""
        if not self._has_group():
            return None
        try:
            store = self._torch.distributed.distributed_c10d._get_default_store()
            while hasattr(store, "underlying_store"):
                store = store.underlying_store
            if hasattr(store, "path"):
                return "file:{}".format(os.path.abspath(store.path))
            return "{}:{}".format(store.host, store.port)
        except (AttributeError, RuntimeError):
            return "pid:{}".format(os.getpid())

    def _local_rank(self) -> Optional[int]:
        """Where no launcher gave one, the GPU in use."""
        text = os.environ.get("LOCAL_RANK", "")
        if text.isdecimal():
            return int(text)
        cuda = self._torch.cuda
        return int(cuda.current_device()) if cuda.is_initialized() else None

    def _has_group(self) -> bool:
        distributed = self._torch.distributed
        return bool(distributed.is_available() and distributed.is_initialized())

    def _coordinates(self, rank: Optional[int], world_size: Optional[int]) -> Dict[str, int]:
        given = os.environ.get("RANKSCOPE_PARALLELISM")
        name = "RANKSCOPE_PARALLELISM"
        if given is None:
            given, name = _declared.get("parallelism"), "declare(parallelism)"
        if given is not None and rank is not None and world_size is not None:
            known_rank, known_size = rank, world_size
            return self._try(lambda: declaration.coordinates(name, given, known_rank, known_size)) or {}
        return self._mesh_coordinates()

    def _mesh_coordinates(self) -> Dict[str, int]:
        """Of the mesh with the most named axes; slices of it say less."""
        while self._meshes:
            mesh = self._meshes.pop()
            names, place = mesh.mesh_dim_names, mesh.get_coordinate()
            if names and place is not None and len(names) > self._mesh[0]:
                sizes = tuple(mesh.mesh.shape)
                self._mesh = (len(names), declaration.mesh_coordinates(tuple(names), sizes, tuple(place)))
        return self._mesh[1]

    def _flops(self, world_size: Optional[int]) -> Optional[float]:
        """This rank's share."""
        whole = self._try(lambda: declaration.flops_from_environment(os.environ))
        if whole is None:
            whole = self._try(lambda: declaration.flops_declared(_declared))
        return whole / (world_size or 1) if whole is not None else self.counted_flops

    def _try(self, parse: Callable[[], Any]) -> Any:
        try:
            return parse()
        except declaration.BadValueError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                complain("{} (ignored)".format(error))
            return None
