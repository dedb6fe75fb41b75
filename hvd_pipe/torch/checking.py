"""`runtime.check_mode` for torch: NaN in free buffers, changes in flight, equal replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.agree import gather
from hvd_pipe.torch.messages.reduction import Message, Reduction

__all__ = ["CheckedMessage", "compare_replicas", "spoil"]


def spoil(*tensors: torch.Tensor | None) -> None:
    """Fill buffers that hold nothing of use with NaN (bytes with ones), if checks are on."""
    if not check_mode.active.on:
        return
    for tensor in tensors:
        if tensor is not None:
            tensor.data.fill_(torch.nan if tensor.is_floating_point() else 255)


class CheckedMessage(Message):
    """A message whose buffer is compared with what was sent, before the result replaces it.

    Args:
        flat: The buffer that the user sees.
        exact: How many elements at its end are not the user's.
        inner: Makes the message that carries a buffer like this one.
    """

    def __init__(
        self, flat: torch.Tensor, exact: int, inner: Callable[[torch.Tensor], Message]
    ) -> None:
        self._flat, self._wire = flat.data, torch.zeros_like(flat)
        self._values = self._flat[: flat.numel() - exact]
        self._inner = inner(self._wire)
        self.feedback = self._inner.feedback
        self._kept: torch.Tensor | None = None
        self._launched = False
        self._changed: int | None = None

    def keep(self) -> None:
        """Take down the buffer as it is: from here on nobody may write to it."""
        self._kept = self._values.clone()

    def launch(self) -> None:
        self._compare()
        self.keep()
        self._wire.copy_(self._flat)
        self._launched = True
        self._inner.launch()

    def wait(self) -> None:
        if not self._launched:
            return
        self._launched = False
        self._inner.wait()
        self._compare()
        self._kept = None
        self._flat.copy_(self._wire)
        spoil(self._wire)

    def meet(self) -> None:
        self._inner.meet()

    def take_changed(self) -> int | None:
        """Return the first element that was changed since `keep`; a round ends with this."""
        changed, self._changed, self._kept = self._changed, None, None
        return changed

    def _compare(self) -> None:
        if self._kept is None or self._changed is not None:
            return
        # Bits, as NaN is not equal to itself.
        before, now = (each.view(torch.uint8) for each in (self._kept, self._values))
        found = (before != now).nonzero()
        if len(found):
            self._changed = int(found[0]) // self._values.element_size()


def compare_replicas(
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    when: str,
    reduction: Reduction,
    tag: str,
) -> None:
    """Raise on every rank unless all have the same weights and gradients; all ranks come here.

    Args:
        names: The parameters' names.
        weights: Their values.
        gradients: Their gradients; none of them where each rank has its own.
        when: Begins the message.
        reduction: Names the ranks.
        tag: Begins the messages' names.

    Raises:
        RanksDisagreeError: Two ranks differ; names the first parameter that does.
    """
    found: list[tuple[str, torch.Tensor | None]] = []
    for what, tensors in (("weight", weights), ("gradient", gradients)):
        pairs = zip(names, tensors, strict=False)
        found += [(f"the {what} of {name!r}", tensor) for name, tensor in pairs]

    def detail(index: int) -> str:
        tensor = found[index][1]
        if tensor is None:
            return "none"
        return f"checksum {_checksum(tensor)}, norm {float(tensor.detach().double().norm()):.9g}"

    lines = [(label, _checksum(tensor)) for label, tensor in found]
    name = f"{tag}.replicas"
    check_mode.compare(lines, detail, when, gather, name, reduction.process_set)


def _checksum(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _checksum(tensor.indices()) + _checksum(tensor.values())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return check_mode.checksum(flat.view(torch.uint8).numpy().tobytes())
