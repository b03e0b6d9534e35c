"""Changing a network so that the change can be undone and the user's object is left alone."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn


class Surgery:
    """A network under adaptation, and the way back.

    Without ``inplace`` the network is a structural copy whose frozen tensors share the original's
    memory; only trained parameters get separate memory.

    Attributes:
        model: what to call; the compiled wrapper if the user passed a compiled model.
        network: the plain module inside, for looking up and replacing layers.
        source: the original's tensors by name.
    """

    def __init__(self, model: nn.Module, inplace: bool) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"adapt() takes a torch.nn.Module, not {type(model).__name__}")
        self.original = model
        self.inplace = inplace
        inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper keeps the module here
        self.network: nn.Module = inner if inplace else _structural_copy(inner)
        self.source: dict[str, Tensor] = {
            name: tensor.detach()
            for name, tensor in self.network.state_dict(keep_vars=True).items()
        }
        self._alive = True
        self._fingerprint: str | None = None
        self._replaced: list[tuple[str, nn.Module]] = []
        self._switched: list[tuple[nn.Module, str, Any]] = []
        self._flags = [(p, p.requires_grad, p.grad) for p in self.network.parameters()]
        self._modes = [(m, m.training) for m in self.network.modules()]
        # Dropout would make predictions random; batch statistics do not need train().
        self.network.eval().requires_grad_(False)
        if inner is model:
            self.model: nn.Module = self.network
        elif inplace:
            self.model = model
        else:
            self.model = type(model)(self.network, model.dynamo_ctx)  # compile it the same way

    def own(self, name: str, parameter: nn.Parameter) -> None:
        """Give a parameter that will be trained separate memory, keeping the source value."""
        if name in self.source:
            if self.inplace:
                self.source[name] = parameter.detach().clone()
            else:
                parameter.data = parameter.data.clone()

    def replace(self, name: str, new: nn.Module) -> None:
        """Put ``new`` wherever the module ``name`` is: it may have other names too."""
        old = self.network.get_submodule(name)
        new.train(old.training)
        everywhere = self.network.named_modules(remove_duplicate=False)
        for place in [place for place, module in everywhere if module is old]:
            self._put(place, new)
            self._replaced.append((place, old))

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.network.get_submodule(parent), leaf, module)

    def leave_fast_paths(self) -> None:
        """Make an `nn.TransformerEncoder` run its layers' parts one by one, always.

        In evaluation mode torch otherwise computes a layer from its norms' weights, ignoring any
        module that replaced them, and drops padded tokens; but only without a gradient, so the same
        batch would be answered differently while learning and while paused.
        """
        for module in self.network.modules():
            if isinstance(module, nn.TransformerEncoder):
                self._switch(module, "use_nested_tensor", False)
            elif isinstance(module, nn.TransformerEncoderLayer):
                self._switch(module, "activation_relu_or_gelu", 0)  # read by the fast path only

    def _switch(self, module: nn.Module, name: str, value: Any) -> None:
        if getattr(module, name, None):
            self._switched.append((module, name, getattr(module, name)))
            setattr(module, name, value)

    def check_alive(self) -> None:
        """Refuse to work after `undo` removed the adaptation."""
        if not self._alive:
            raise RuntimeError("this adapter was unwrapped; make a new one with moetta.adapt()")

    def undo(self) -> nn.Module:
        """Undo every change to an inplace network; returns the original."""
        if self.inplace and self._alive:
            for name, old in reversed(self._replaced):
                self._put(name, old)
            with torch.no_grad():
                for name, tensor in self.network.state_dict(keep_vars=True).items():
                    tensor.copy_(self.source[name])
            for parameter, flag, grad in self._flags:
                parameter.requires_grad_(flag)
                parameter.grad = grad
            for module, mode in self._modes:
                module.training = mode
            for module, name, value in self._switched:
                setattr(module, name, value)
            self._alive = False
        return self.original

    def detached_copy(self) -> nn.Module:
        """A full, frozen copy of the network as it is now."""
        with torch.inference_mode(False):  # the copy may be adapted or trained later
            return copy.deepcopy(self.network).requires_grad_(False)

    def fingerprint(self) -> str:
        """SHA-256 of the source tensors with names, types and shapes; computed once, on demand."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for name in sorted(self.source):
                tensor = self.source[name].detach().cpu().contiguous()
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def _structural_copy(model: nn.Module) -> nn.Module:
    """New module objects, new parameter objects, the same memory."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        twin = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = twin
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach()
    # Holding the twins keeps deepcopy's id-based memo valid.
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"this {type(model).__name__} cannot be copied ({error}); pass inplace=True to adapt "
            "the object itself (adapter.unwrap() undoes it)"
        ) from error
