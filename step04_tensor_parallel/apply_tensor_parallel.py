"""Tensor parallelism for the model of these steps: how its layers are cut, and what the flags choose."""

from functools import partial

from common.config import TrainConfig
from common.latent_attention import LatentAttention
from common.model import Attention, Decoder, SwiGLU
from common.process_groups import Mesh
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.tensor_parallel import Cut, Cuts, cut_layers, cut_vocabulary, share_the_rest
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum

COLUMNS, ROWS = Cut(0), Cut(1)
HEAD_COLUMNS, HEAD_ROWS = Cut(0, "head_width"), Cut(1, "head_width")
CUTS: Cuts = {  # of each kind of module, its linear layers by name
    Attention: {"q_proj": HEAD_COLUMNS, "k_proj": HEAD_COLUMNS, "v_proj": HEAD_COLUMNS, "o_proj": HEAD_ROWS},
    SwiGLU: {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS},
}
# Of latent attention, down-projections and norms stay whole. All heads read the latent and the rotated key, which are
# gathered before `kv_b_proj`. Queries come from one of two layers
CUTS[LatentAttention] = {name: Cut(0, "key_width") for name in ("q_proj", "q_b_proj")}
CUTS[LatentAttention] |= {"kv_b_proj": Cut(0, "pair_width", whole=True), "o_proj": Cut(1, "value_width")}


def apply_tensor_parallel(model: Decoder, config: TrainConfig, mesh: Mesh) -> None:
    """Replace the layers of a `Decoder` on the meta device by parallel ones that hold this rank's part of the weights.

    The spec of every parameter says which part that is, and over which groups its gradient is a partial sum. The loss
    is that of logits divided along the vocabulary. A rank on its own takes it as well: all of it happens in one copy.

    Raises ValueError if an MLP has been replaced already, by what is not to be cut.
    """
    if model.has_head:
        model.loss = partial(vocab_parallel_cross_entropy_sum, vocab=config.model_config.vocab, group=mesh.tp)
    if mesh.tp.size > 1:
        for name, layer in model.layers.items():
            if not isinstance(layer.mlp, SwiGLU):
                kind = type(layer.mlp).__name__
                raise ValueError(f"layer {name} has a {kind}: apply_tensor_parallel comes before what replaces MLPs")
        split = Split(mesh.tp, config.sequence_parallel, config.tp_mode)
        cut_layers(model, CUTS, split, mesh.kv_replica)
        ends = (name if hasattr(model, name) else None for name in ("embedding", "head"))
        cut_vocabulary(model, *ends, config.model_config.vocab, split)
        share_the_rest(model, split)
