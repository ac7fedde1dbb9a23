"""Models of transformers, small and in float64, and what one process computes with them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH, SEQUENCES = 43, 16, 4
PRELOAD = "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"


def gpt2(**options) -> nn.Module:
    """Tied, with biases, LayerNorm and two embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCAB}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**shape | dropout | options)).double()


def llama(**options) -> nn.Module:
    """Untied, with two K/V heads for four heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 24, "vocab_size": VOCAB, "max_position_embeddings": LENGTH}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape | options)).double()


MODELS = {"gpt2": gpt2, "llama": llama}


class Parts(NamedTuple):
    """The modules of a model, in the order in which they run."""

    before: list[nn.Module]  # the blocks
    blocks: list[nn.Module]
    after: list[nn.Module]


def parts_of(model: nn.Module) -> Parts:
    inner = model.base_model
    if hasattr(inner, "wpe"):
        return Parts([inner.wte, inner.wpe], list(inner.h), [inner.ln_f, model.lm_head])
    return Parts([inner.embed_tokens], list(inner.layers), [inner.norm, model.lm_head])


def regions_of(model: nn.Module) -> list[list[nn.Module]]:
    """The parts of such a model that run in one go."""
    before, blocks, after = parts_of(model)
    return [before, *([block] for block in blocks), after]


def tokens(step: int = 0) -> Tensor:
    """The global batch of a step: (SEQUENCES, LENGTH + 1)."""
    return torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """These rows' share of the mean over the whole global batch."""
    return share(model(rows[:, :-1], use_cache=False).logits, rows[:, 1:])


def share(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (SEQUENCES * LENGTH)


def gradients(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """Those of one process for the whole batch, by name."""
    model.zero_grad()
    loss_of(model, rows).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
