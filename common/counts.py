"""Exact numbers of parameters and floating-point operations of a model, from its configuration alone.

One multiply-add is 2 FLOPs. Only matrix products are counted, as is usual (PaLM, arXiv:2204.02311, appendix B); norms,
RoPE, softmax and the loss are left out. The backward of a product takes two products of the same size.
"""

from dataclasses import dataclass
from functools import cache

from common.model_config import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part; `active` counts only the experts that one token passes through."""

    embedding: int
    attention: int  # of one layer
    dense_mlp: int  # of one dense layer
    moe: int  # of one layer of experts, router included
    moe_active: int
    norms: int  # of the whole model
    head: int  # 0 when tied
    mtp_projection: int  # of multi-token prediction, whose block counts among the layers in `total`
    total: int
    active: int


def attention_parts(model: ModelConfig) -> dict[str, int]:
    """The parameters of one layer's attention by matrix, called as in the model; what its norms have is not in it."""
    h, heads, latent = model.hidden, model.heads, model.latent
    if latent is None:
        q, k = h * heads * model.head_width, h * model.kv_heads * model.head_width
        return {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": q}
    queries = heads * latent.key_width
    result = {"q_a_proj": h * latent.q_rank, "q_b_proj": latent.q_rank * queries}
    return (result if latent.q_rank else {"q_proj": h * queries}) | {
        "kv_a_proj": h * latent.shared_width,
        "kv_b_proj": latent.kv_rank * heads * latent.pair_width,
        "o_proj": heads * latent.value_dim * h,
    }


def down_parameters(model: ModelConfig) -> int:
    """The parameters of one layer's latents, their norms included: what is whole on every tensor rank."""
    if model.latent is None:
        return 0
    ranks = model.latent.q_rank + model.latent.kv_rank
    return model.hidden * (ranks + model.latent.rope_dim) + ranks


@cache
def count_parameters(model: ModelConfig) -> ParameterCount:
    """The number of parameters in each part of `model`, which need not be built for that."""
    h = model.hidden
    attention = sum(attention_parts(model).values())
    dense_mlp = 3 * h * model.ffn  # gate, up, down
    expert, router = 3 * h * model.expert_ffn, h * model.experts
    moe = (model.experts + model.shared_experts) * expert + router
    moe_active = (model.top_k + model.shared_experts) * expert + router
    moe_layers = len(model.expert_layers)
    embedding = model.vocab * h
    head = 0 if model.tie_embeddings else embedding
    norms = (2 * model.blocks + 1 + 3 * model.mtp) * h  # multi-token prediction has two inputs and an end of its own
    if model.latent:  # those of latents
        norms += model.blocks * (model.latent.q_rank + model.latent.kv_rank)
    mtp_projection = model.mtp * 2 * h * h
    shared = embedding + head + norms + mtp_projection
    shared += model.blocks * attention + (model.blocks - moe_layers) * dense_mlp
    total, active = shared + moe_layers * moe, shared + moe_layers * moe_active
    return ParameterCount(embedding, attention, dense_mlp, moe, moe_active, norms, head, mtp_projection, total, active)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of the forward of ONE sequence in each part of the model, over all layers."""

    linear: int  # attention projections and MLPs, and what multi-token prediction projects
    attention_core: int  # q k^T and p v over the full square, causal or not (the convention of MFU)
    head: int
    expansion: int = 0  # of `linear`, latent attention's products of latents to keys and values

    @property
    def forward(self) -> int:
        """The whole forward."""
        return self.linear + self.attention_core + self.head

    @property
    def model(self) -> int:
        """Forward and backward of the model itself: three forwards. This is what MFU counts."""
        return 3 * self.forward

    def hardware(self, recompute: str) -> int:
        """`model` plus what recomputation (none, selective, full) executes again. This is what HFU counts.

        Selective repeats the attention core, with the expansion of latents; full repeats every layer (the head is never
        recomputed).
        """
        selective = self.attention_core + self.expansion
        again = {"none": 0, "selective": selective, "full": self.linear + self.attention_core}
        return self.model + again[recompute]


@cache
def count_flops(model: ModelConfig, seq_len: int) -> FlopCount:
    """The exact FLOPs of one sequence of `seq_len` tokens; embedding rows are looked up and cost none."""
    count = count_parameters(model)
    moe_layers = len(model.expert_layers)
    linear = model.blocks * count.attention + count.mtp_projection
    linear += (model.blocks - moe_layers) * count.dense_mlp + moe_layers * count.moe_active
    core = model.blocks * 2 * seq_len * seq_len * model.heads * (model.head_width + model.value_width)
    head = (1 + model.mtp) * 2 * seq_len * model.vocab * model.hidden
    expansion = 2 * seq_len * model.blocks * attention_parts(model).get("kv_b_proj", 0)
    return FlopCount(2 * seq_len * linear, core, head, expansion)
