"""Multi-token prediction (`--mtp 1`): every token also predicts the token after the next one (DeepSeek-V3,
arXiv:2412.19437, section 2.2).

Behind the last layer there is one more block. Its input at position i is made of two things: h_i, which the last layer
returns, and the embedding of token i + 1, so that the block knows what follows and can predict token i + 2:

    position          0        1        2        3
    token             the      cat      sat      on          a sequence of four tokens, and what follows it: mats
    the block reads   h_0 cat  h_1 sat  h_2 on   h_3 mats
    and predicts      sat      on       mats     --          the last token of a sequence has no second target

The block's own weights are two norms, a projection of their 2 * hidden numbers to hidden ones, all that a layer has,
and a final norm. Embedding and head are those of the model. The gradient of a step is that of the loss, plus `weight`
times the second one. Both are sums over tokens divided by all of the global batch (equation 24 divides by T as well,
though the sum has a term less). The record has them apart: `loss` can be compared with that of any other run, and
`mtp_loss` is the second one, without its weight.

Who holds what, and who sums it:
  pp    the block is a part of the last stage, as its layer number `layers`, where every mechanism finds it. The last
        stage needs the embedding, too, also if it is not tied to the head: it is then stored at both ends of the
        pipeline, and its gradient is summed over the group `embed`
  tp    the block is cut like a layer; embedding and head are divided along the vocabulary. The two norms, the
        projection and the final norm are whole on every rank, which applies them to its part of the sequence. So their
        gradients are partial sums over `tp` (with sequence parallelism)
  cp    second targets are taken from whole sequences, before these are cut: no token travels for them
  zero  the block is a region of its own. With stage 3 it gathers the embedding once more
  ep    if the model has experts, the block has some as well, and they are balanced like all others

With --mask-documents, the last token of a document has no second target either: what its block reads is the next
document's first token.

Names and order are those of the checkpoints that DeepSeek has published, and that inference engines read (vLLM's
deepseek_mtp.py): in what is projected (`eh_proj`) the embedding comes first. (Equation 21 has it second.) In inference
the block can draft tokens (speculative decoding); `common.generate` leaves it out, as transformers does.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common import collectives
from common.config import TrainConfig
from common.group import Group
from common.model import ATTENTION_CORES, Block, Decoder, RMSNorm, initial_stds, rope_tables
from common.model_config import ModelConfig
from common.parameter import attach_specs
from common.process_groups import Mesh
from step01_single_gpu.data.batches import to_device
from step04_tensor_parallel.vocab_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from step05_pipeline import apply_pipeline
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.weight_gradients import defer_linear_layers
from step06_context_parallel import context_parallel
from step06_context_parallel.context_parallel import positions_of
from step06_context_parallel.sequence_layouts import token_positions
from step08_5d.fused import HeadAndLoss
from step08_5d.kernels.cross_entropy import IGNORED

# ---- second targets --------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """What both predictions of a micro-batch need, of this rank's part of its sequences.

    first: (batch, seq/cp), the next tokens, which the block reads as well.
    second: (batch, seq/cp), those after them, or IGNORED.
    positions: (seq/cp,), of the tokens in their sequence.
    mask: the rest of what `take_part` returns.
    """

    first: Tensor
    second: Tensor
    positions: Tensor
    mask: tuple


def second_targets(tokens: Tensor, targets: Tensor, end: int | None = None) -> Tensor:
    """The targets of the next position, and IGNORED for the last token of a sequence, or of a document.

    Args:
        tokens, targets: (batch, seq), whole sequences.
        end: the token that ends a document, if documents are told apart.
    """
    second = targets.roll(-1, dims=1)
    second[:, -1] = IGNORED  # which `roll` has filled with the first one
    return second if end is None else second.masked_fill(tokens == end, IGNORED)


def take_part(tokens: Tensor, targets: Tensor, config: TrainConfig, mesh: Mesh, end: int | None) -> tuple:
    """As in step 6; but with --mtp, `Targets` take the place of the targets."""
    part, first, *mask = context_parallel.take_part(tokens, targets, config, mesh, end)
    if not config.model_config.mtp:
        return part, first, *mask
    mine = token_positions(config.cp_split, config.seq_len, mesh.cp.size, mesh.cp.rank)
    whole = second_targets(tokens, targets, end if config.mask_documents else None)
    (second,) = to_device((whole[:, mine],), mesh.device)
    return part, Targets(first, second, positions_of(config, mesh), tuple(mask)), *mask


# ---- the block, in the last stage ------------------------------------------------------------------------------------


class SecondBlock(Block):
    """A layer behind the last one, which sees the next token. `embedding` comes with `apply_multi_token`."""

    def __init__(self, config: ModelConfig, core):
        super().__init__(config, core)
        self.enorm, self.hnorm = (RMSNorm(config.hidden, config.norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden, config.norm_eps)})

    def forward(self, x, following, rope, *mask):
        """Return two batches in one: x itself, and what the head predicts second targets from.

        It is one tensor so that all of the stage's gradients at this place arrive together (which ZeRO waits for), and
        the head multiplies once.

        Args:
            x: (batch, seq/tp, hidden), what the last layer returns.
            following: (batch, seq), the tokens after those of x.

        Returns (2 * batch, seq/tp, hidden).
        """
        embedded = self.embedding(following)  # not in `compute`: if that runs twice, so would the hooks of the weight
        return torch.cat((x, self.shared_head["norm"](self.call(self.compute, x, embedded, *rope, *mask))))

    def compute(self, x, embedded, cos, sin, *mask):
        return super().compute(self.joined(x, embedded), cos, sin, *mask)

    def joined(self, x, embedded):  # (batch, seq/tp, hidden) each -> (batch, seq/tp, hidden)
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), dim=-1))


def build_stages(config: TrainConfig, schedule: Schedule, mesh: Mesh) -> list[Decoder]:
    """As in step 5; but with --mtp, the last stage has the block, and the embedding as well."""
    stages = apply_pipeline.build_stages(config, schedule, mesh)
    for stage in stages:
        if config.model_config.mtp and stage.has_head:
            add_block(stage, ATTENTION_CORES[config.attention])
            if schedule.splits_backward:
                defer_linear_layers(stage)
    return stages


def add_block(stage: Decoder, core) -> None:
    """Give the block to a stage on the meta device that has the head."""
    config = stage.config
    with torch.device("meta"):
        stage.layers[str(config.layers)] = SecondBlock(config, core)
        if not stage.has_embedding:
            stage.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab, config.hidden), freeze=False)
            if config.tie_embeddings:
                stage.embedding.weight = stage.head.weight
    attach_specs(stage, initial_stds(config))


def apply_multi_token(stage: Decoder, config: TrainConfig) -> None:
    """Let the last stage's loss be that of both predictions, with what other mechanisms have made of its parts by now.

    The stage then returns what its last layer does: the final norm and the head become a part of the loss.
    """
    shape = config.model_config
    if not (shape.mtp and stage.has_head):
        return
    block = stage.layers[str(shape.layers)]
    if stage.has_embedding:
        block.embedding = _again(stage.embedding)
    else:
        block.embedding = stage.embedding
        del stage.embedding
    head, loss = stage.head, stage.loss
    del stage.loss  # a module may become a function only after that
    losses = loss.weighted if isinstance(loss, HeadAndLoss) else partial(weighted_losses, head, loss)
    stage.ends = Ends(stage.norm, loss if isinstance(loss, HeadAndLoss) else head, losses, config)
    stage.norm, stage.head, stage.loss = nn.Identity(), nn.Identity(), partial(both_losses, block, stage.ends, shape)


def _again(embedding: nn.Embedding) -> nn.Embedding:
    """An embedding at a second place: the same weight in a module of its own, since ZeRO's hooks are on modules."""
    weight = embedding.weight
    if isinstance(embedding, VocabParallelEmbedding):
        return VocabParallelEmbedding(weight, embedding.first, embedding.split)
    second = nn.Embedding(*weight.shape, _weight=weight)
    second.weight = weight
    return second


# ---- both losses -----------------------------------------------------------------------------------------------------


def both_losses(block: SecondBlock, ends: "Ends", config: ModelConfig, x: Tensor, targets: Targets) -> Tensor:
    """The `loss` of the last stage: x (batch, seq/tp, hidden), which its last layer returns, -> (): see `Ends`."""
    rope = rope_tables(config, targets.positions, x.dtype)
    return ends(block(x, targets.first, rope, *targets.mask), torch.cat((targets.first, targets.second)))


def weighted_losses(head: nn.Linear, loss: partial, x: Tensor, targets: Tensor, factors: Tensor):
    """As `HeadAndLoss.weighted`, by step 4's head and loss, whose settings `loss` holds."""
    losses = vocab_parallel_cross_entropy(head(x), targets, **loss.keywords)
    return (losses * factors).sum(), losses.detach()


class Ends(nn.Module):
    """What follows the blocks: the final norm, the head and the losses.

    x (2 * batch, seq/tp, hidden) and targets (2 * batch, seq) of both predictions -> (), the sum of the first one's
    losses. But its gradient is that of both sums, the second one times `--mtp-weight`.

    noted   () float64, the sum of the second one's losses, over `total` tokens, since the last `start_over`
    """

    def __init__(self, norm: nn.Module, head: nn.Module, losses, config: TrainConfig):
        super().__init__()
        self.norm, self.head, self.losses, self.weight = norm, head, losses, config.mtp_weight
        self.total, self.noted = config.global_batch * config.seq_len, 0.0

    def forward(self, x, targets):
        first, second = x.chunk(2)  # the second one has had its own norm
        counted = (targets != IGNORED).flatten().to(torch.promote_types(x.dtype, torch.float32))
        factors = counted.clone()
        factors[len(factors) // 2 :] *= self.weight
        total, losses = self.losses(torch.cat((self.norm(first), second)), targets, factors)
        return _Account.apply(total, *(losses * counted).view(2, -1).sum(1), self)


class _Account(torch.autograd.Function):
    """Passes the first sum on, and its gradient to the total. The backward notes the second one, as step 7's router
    notes its loads: an evaluation notes nothing.
    """

    @staticmethod
    def forward(ctx, total, first, second, ends):
        ctx.second, ctx.ends = second, ends
        return first.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.ends.noted += ctx.second.double()
        return gradient, None, None, None


class SecondLoss:
    """The loss of the second prediction, for the record: see step 7's `RunningStatistics`.

    Args:
        ends: those of this rank. It may have none, or two copies.
        tp: its ranks have the same losses, of which one counts.
        world: all ranks.
    """

    buffers = ()  # nothing is kept from step to step

    def __init__(self, ends: list[Ends], tp: Group, world: Group, device: torch.device):
        self.ends, self.tp, self.world, self.device = ends, tp, world, device

    @torch.no_grad()
    def finish(self, skip: Tensor | None = None) -> dict[str, Tensor]:
        """Return the step's mean, `mtp_loss`, the same on all ranks, and start anew."""
        mean = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in self.ends:
            if self.tp.rank == 0:
                mean += each.noted / each.total
            each.noted = 0.0
        collectives.all_reduce(mean, self.world)
        return {"mtp_loss": mean}


def mtp_loss(stages: list[Decoder], mesh: Mesh) -> list[SecondLoss]:
    """What records the loss of the second prediction, if there is one."""
    ends = [stage.ends for stage in stages if hasattr(stage, "ends")]
    return [SecondLoss(ends, mesh.tp, mesh.world, mesh.device)] if stages[0].config.mtp else []
