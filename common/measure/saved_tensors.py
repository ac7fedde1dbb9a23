"""What autograd keeps of a forward for its backward, counted on the storages themselves."""

import torch


class SavedTensors:
    """Counts what autograd keeps of a forward that runs inside `with SavedTensors(model) as saved:`.

    Several kept tensors may be views of one storage (a linear layer keeps its input as a matrix), so storages are
    counted: `tensors` holds one tensor per storage, without the parameters.
    """

    def __init__(self, model: torch.nn.Module):
        self.tensors: list[torch.Tensor] = []
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._seen:  # holding the tensor keeps its address from being used again
            self._seen.add(address)
            self.tensors.append(tensor.detach())
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)
