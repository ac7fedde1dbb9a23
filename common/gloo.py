"""What the gloo backend needs help with.

gloo communicates over TCP from CPU memory. Its own reduce-scatter is an all-reduce in disguise that sends twice the
bytes, and its own all-gather copies everything through a second buffer: both are replaced here. Ranks that share a GPU
use gloo as well, so their tensors are copied to and from CPU memory.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from common.process_groups import Group


def serves(tensor: Tensor, group: Group) -> bool:
    """Return whether gloo carries this tensor. Where there are both backends, NCCL takes the CUDA tensors only."""
    return group.backend == "gloo" or not tensor.is_cuda


def stage(tensor: Tensor, group: Group, work=None) -> Tensor:
    """Return the tensor to hand to the backend: for gloo, a copy in CPU memory of a CUDA tensor.

    If the collective writes to the tensor, give its `work`: at the end of the wait the copy is copied back.
    """
    if not (tensor.is_cuda and serves(tensor, group)):
        return tensor
    host = tensor.cpu()
    if work is not None:
        work.afterwards(tensor.copy_, host)
    return host


def reduce_scatter(work, output: Tensor, input: Tensor, group: Group) -> None:
    """Launch a reduce-scatter as an all-to-all of the parts, to be added up in rank order when they have arrived."""
    sent = stage(input, group)
    received = torch.empty_like(sent)
    work.launch(dist.all_to_all_single, received.view(-1), sent.view(-1), group=group.handle, async_op=True)
    work.afterwards(_add_up, output, received.view(group.size, -1))


def _add_up(output: Tensor, parts: Tensor) -> None:
    if output.is_cuda:
        output.copy_(parts.sum(0).view_as(output))
    else:
        torch.sum(parts, 0, out=output.view(-1))
    parts.untyped_storage().resize_(0)  # gloo's thread keeps a reference for a moment longer


def all_gather(work, output: Tensor, input: Tensor, group: Group) -> None:
    """Launch an all-gather as one broadcast per rank, straight into `output`."""
    parts = stage(output, group, work).view(group.size, -1)
    if parts[group.rank].data_ptr() != input.data_ptr():
        parts[group.rank].copy_(input.view(-1))
    for part, source in zip(parts, group.ranks, strict=True):
        work.launch(dist.broadcast, part, source, group=group.handle, async_op=True)
