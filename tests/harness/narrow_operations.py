"""Which operations of a run compute in 16 bits, and where: whatever adds up, or is sensitive, should not be among them.

No curve shows a sum that is kept in bfloat16, as long as it is short. So a test compares all of them with a table.
"""

import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import collectives
from tests.harness.ranks import ROOT

NARROW = torch.bfloat16, torch.float16
COPIES = "copy_", "_to_copy", "_foreach_copy_"  # from a wider type they round
MOVES = "cat", "clone", "_unsafe_view", "stack", "index", "index_select", "embedding", "masked_fill", "fill_", "zero_"
CREATE = "empty", "zeros", "ones", "full", "new_", "resize_"


class NarrowOperations(TorchDispatchMode):
    """Within the block, collects in `found` what computes or communicates numbers of low precision.

    "file.function" of ours -> names of operations. An operation is called "wide ..." if it has wide inputs too, and
    "round" is the mere change of type. The backward of PyTorch's own operations counts where `backward` is called.
    """

    def __init__(self):
        super().__init__()
        self.found = defaultdict(set)

    def __enter__(self):
        self.recording = collectives.record()
        self.calls = self.recording.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        for call in self.calls:
            if call.dtype in ("bfloat16", "float16") and "reduce" in call.op:
                self.found["collectives"].add(f"{call.op} over {call.group}")
        self.recording.__exit__(*error)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema, name = function._schema, function._schema.name.split("::")[1]
        name = name.replace("_scaled_dot_product_", "").replace("_for_cpu", "")
        written = [each for each, its in zip(args, schema.arguments) if its.alias_info and its.alias_info.is_write]
        view = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
        if view or not _types(result, written, (kwargs or {}).get("out")) & {*NARROW}:
            return result
        wide = _types(args, kwargs) - {*NARROW}
        if name in COPIES and wide:
            name, wide = "round", None
        if wide or name not in (*COPIES, *MOVES) and not name.startswith(CREATE):
            self.found[_place()].add(f"wide {name}" if wide else name)
        return result


def _types(*values) -> set[torch.dtype]:
    """The floating types of all tensors in these values. A tensor of one number is no sum that anything is added to."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return {each.dtype for each in tensors if each.ndim}


def _place() -> str:
    """The innermost function of ours that is running."""
    frame = sys._getframe(1)
    while frame:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0].startswith(("common", "step"))
        if ours and not name.startswith("<"):
            return f"{path.stem}.{name}"
        frame = frame.f_back
    return "elsewhere"
