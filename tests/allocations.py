"""Counts what operations allocate, for the law that cost is linear."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """Counts the elements of tensors that operations make inside this context; views of their arguments are not counted.

    Attributes:
        largest: of one tensor.
        total: of all.
    """

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                elements = x.untyped_storage().nbytes() // x.element_size()
                self.largest, self.total = max(self.largest, elements), self.total + elements
        return result
