"""The operations of apex's compiled `apex_C`: several tensors as one."""

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

__all__ = ["flatten", "unflatten"]
