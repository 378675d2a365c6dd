"""Modules that a trainer imports and the machine lacks, with as much in them as the trainer uses. foreign_fault.py puts
them into `sys.modules` before the trainer runs; the trainer itself stays as it is."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

PICTURES, CLASSES, CHANNELS, SIZE = 50_000, 10, 3, 32  # of CIFAR-10


def install_apex() -> None:
    """Provide the one function of Apex that sequence parallelism needs: Megatron-LM refuses torch's own LayerNorm."""

    def layer_norm(values: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
        return torch.nn.functional.layer_norm(values, shape, weight, bias, eps)

    function = types.SimpleNamespace(forward=layer_norm, apply=layer_norm)
    _install(
        {
            "apex": {},
            "apex.normalization": {},
            "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": function},
        }
    )


def install_torchvision() -> None:
    """Provide what DeepSpeed's pipeline example imports: random pictures of the size of CIFAR-10's, four transforms,
    and AlexNet, whose copy lies beside the example. It imports VGG-19 and does not use it."""
    alexnet = importlib.import_module("alexnet").AlexNet
    transforms = {name.__name__: name for name in (Compose, Resize, CenterCrop, ToTensor, Normalize)}
    _install(
        {
            "torchvision": {},
            "torchvision.datasets": {"CIFAR10": RandomPictures},
            "torchvision.models": {"AlexNet": alexnet, "vgg19": None},
            "torchvision.transforms": transforms,
        }
    )


STAND_INS: dict[str, Callable[[], None]] = {"apex": install_apex, "torchvision": install_torchvision}


def _install(members: dict[str, dict[str, Any]]) -> None:
    """Install packages by their full names, each after the package that contains it."""
    for name, contents in members.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        module.__dict__.update(contents)
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)


class RandomPictures:
    """Pictures of random bytes with a label each, the same ones in each process."""

    def __init__(self, root: str, train: bool, download: bool, transform: Callable[[Any], Any]) -> None:
        self._transform = transform

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, number: int) -> tuple[Any, int]:
        generator = torch.Generator().manual_seed(number)
        picture = torch.randint(256, (CHANNELS, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        return self._transform(picture), number % CLASSES


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self._transforms:
            picture = transform(picture)
        return picture


class Resize:
    def __init__(self, size: int) -> None:
        self._size = (size, size)

    def __call__(self, picture: Any) -> Any:
        return torch.nn.functional.interpolate(picture[None], self._size, mode="bilinear")[0]


class CenterCrop:
    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, picture: Any) -> Any:
        top, left = ((length - self._size) // 2 for length in picture.shape[-2:])
        return picture[..., top : top + self._size, left : left + self._size]


class ToTensor:
    def __call__(self, picture: Any) -> Any:
        return picture.float() / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, picture: Any) -> Any:
        return (picture - self._mean) / self._std
