"""Context parallelism by hand: every rank works on a part of each sequence, through the whole model.

Norms, MLPs and the loss treat each token on its own and do not change. The attention must see the keys and values of
other ranks, and `--cp-mode` offers three ways:
  ring       keys and values travel from rank to rank
  allgather  every rank fetches all of them at once
  ulysses    two all-to-alls exchange parts of the sequence for parts of the heads
To all other mechanisms a context-parallel rank is one that reads other tokens: gradients are summed over `dp_cp`.
"""

from functools import partial

from torch import Tensor

from common.config import TrainConfig
from common.group import Group
from common.latent_attention import Expansion
from common.model import Decoder
from common.process_groups import Mesh
from step01_single_gpu.data.batches import to_device
from step06_context_parallel.all_gather_attention import all_gather_attention
from step06_context_parallel.attention_block import KERNELS, NaiveKernels
from step06_context_parallel.ring_attention import ring_attention
from step06_context_parallel.sequence_layouts import Documents, token_positions
from step06_context_parallel.ulysses_attention import ulysses_attention

CORES = {"ring": ring_attention, "allgather": all_gather_attention, "ulysses": ulysses_attention}  # by --cp-mode


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None = None,
    *,
    config: TrainConfig,
    cp: Group,
    kernels: NaiveKernels | None = None,
    **expansion: Expansion,
) -> Tensor:
    """The attention core of one rank: q (batch, heads, seq/cp, d), k and v (batch, kv_heads, seq/cp, d) -> like q.

    The two cores that send keys and values take what these come from, with its `expansion`, as well.
    """
    core = CORES[config.cp_mode]
    return core(q, k, v, cp, config.cp_split, documents, kernels=kernels or KERNELS[config.attention], **expansion)


def replaces_attention(config: TrainConfig) -> bool:
    """Whether a run's attention is the core above: sequences are divided, or their documents told apart."""
    return config.cp > 1 or config.mask_documents


def apply_context_parallel(model: Decoder, config: TrainConfig, mesh: Mesh) -> None:
    """Let the attention of every layer see the tokens of all context-parallel ranks, and no other documents."""
    if replaces_attention(config):
        for layer in model.layers.values():
            layer.attention.core = partial(attention, config=config, cp=mesh.cp)
            if hasattr(layer.attention, "core_expands"):  # of latents; Ulysses exchanges heads, so there K and V travel
                layer.attention.core_expands = config.cp_mode != "ulysses"


def positions_of(config: TrainConfig, mesh: Mesh) -> Tensor:
    """Return the positions of this rank's tokens in their sequence: (seq_len / cp,) of int64, on its device."""
    (positions,) = to_device((_positions(config, mesh),), mesh.device)
    return positions


def _positions(config: TrainConfig, mesh: Mesh) -> Tensor:
    return token_positions(config.cp_split, config.seq_len, mesh.cp.size, mesh.cp.rank)


def take_part(
    tokens: Tensor, targets: Tensor, config: TrainConfig, mesh: Mesh, end: int | None
) -> tuple[Tensor, Tensor, Documents] | tuple[Tensor, Tensor]:
    """Return this rank's part of the sequences of a micro-batch, on its device.

    Args:
        tokens, targets: (micro_batch, seq_len). Targets have been shifted before, so that the last token of a part has
            its own, although the token that follows is on another rank.
        end: the token that ends a document.

    Returns tokens and targets, each (micro_batch, seq_len / cp), and, with --mask-documents, the documents.
    """
    mine = _positions(config, mesh)
    part = to_device((tokens[:, mine], targets[:, mine]), mesh.device)
    if not config.mask_documents:
        return part
    # No document begins behind the last token
    ends = [(row[:-1] == end).nonzero().flatten().tolist() for row in tokens]
    return *part, tuple((0, *(each + 1 for each in row)) for row in ends)
