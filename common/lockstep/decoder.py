"""What else is recorded of the model of these steps: the tokens, what layers call that is no module, and the loss."""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from common.layers import at_least_float32
from common.lockstep.notes import Place
from common.lockstep.places import indices
from common.lockstep.recorder import Recorder
from common.model import Attention, Block, Decoder, SwiGLU


def watch_decoder(recorder: Recorder, model: Decoder, whole: bool = False) -> None:
    """Note all that a `Decoder`, or a stage of one, computes, whatever has replaced its parts.

    Args:
        whole: the model is not divided; its loss is noted token by token.
    """
    recorder.watch(model)
    if model.has_embedding:
        recorder.keep(model.register_forward_pre_hook(lambda _, inputs: note_tokens(recorder, "tokens", inputs[0])))
    for name, module in model.named_modules():
        if isinstance(module, Block):
            _watch_input(recorder, name, module)
        elif isinstance(module, Attention):
            _watch_attention(recorder, name, module)
        elif isinstance(module, SwiGLU):
            _watch_activation(recorder, name, module)
        if hasattr(module, "after_adding"):
            _watch_addition(recorder, name, module)
        if hasattr(module, "call"):
            recorder.replace(module, "call", partial(_with_micro_batch, recorder))
        if hasattr(module, "apply_linears"):
            _watch_linears(recorder, name, module)
        if hasattr(module, "dispatcher"):
            _watch_experts(recorder, name, module)
    if model.has_head:
        watch_loss(recorder, model, "loss", whole)


def note_tokens(recorder: Recorder, name: str, tokens: Tensor) -> None:
    """Note what a micro-batch reads: tokens or targets (samples, tokens)."""
    place = recorder.tokens.place(tokens.shape, recorder.micro_batch)
    recorder.note("forward", name, tokens, place, once=recorder.micro_batch)


def watch_loss(recorder: Recorder, owner: object, attribute: str, whole: bool) -> None:
    """Note targets and losses of `owner.attribute(logits, targets)`, which returns the sum over tokens."""

    def make(loss: Callable) -> Callable:
        def loss_noted(y: Tensor, targets: Tensor) -> Tensor:
            note_tokens(recorder, "targets", targets)
            result = loss(y, targets)
            place = recorder.tokens.place(targets.shape, recorder.micro_batch)
            if whole:
                flat = y.flatten(0, 1).to(at_least_float32(y.dtype))
                each = F.cross_entropy(flat, targets.flatten(), reduction="none")
                recorder.note("forward", "loss", each, place, once=recorder.micro_batch)
            else:
                recorder.note("forward", "loss", result, place, once=recorder.micro_batch, total=True)
            return result

        return loss_noted

    if isinstance(module := getattr(owner, attribute), nn.Module):  # head and loss in one: there are no logits
        owner, attribute, whole = module, "forward", False
    recorder.replace(owner, attribute, make)


def _with_micro_batch(recorder: Recorder, call: Callable) -> Callable:
    """What is called once more in the backward, for recomputation, belongs to the micro-batch of the forward."""

    def call_noted(function: Callable, *inputs):
        micro_batch = recorder.micro_batch

        def function_noted(*inputs):
            now, recorder.micro_batch = recorder.micro_batch, micro_batch
            result = function(*inputs)
            recorder.micro_batch = now
            return result

        return call(function_noted, *inputs)

    return call_noted


def _watch_input(recorder: Recorder, name: str, block: nn.Module) -> None:
    """The hidden states that a layer gets: perhaps by a message, from another stage of a pipeline."""

    def note(_, inputs: tuple) -> None:
        place = recorder.tokens.place(inputs[0].shape, recorder.micro_batch)
        recorder.note_value_and_gradient(f"{name} (input)", inputs[0], place)

    recorder.keep(block.register_forward_pre_hook(note))


def _watch_addition(recorder: Recorder, name: str, norm: nn.Module) -> None:
    """A norm that adds to the residual stream first, perhaps in one kernel."""

    def make(after_adding: Callable) -> Callable:
        def after_adding_noted(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            recorder.note_weights(norm)
            # A view, whose gradient is that of this addition alone
            residual, place = residual.view_as(residual), recorder.tokens.place(x.shape, recorder.micro_batch)
            recorder.note_value_and_gradient(f"{name} (residual)", residual, place)
            y, total = after_adding(x, residual)
            recorder.note("forward", f"{name} (sum)", total, place, once=recorder.micro_batch)
            recorder.note_output(name, y, place)
            return y, total

        return after_adding_noted

    recorder.replace(norm, "after_adding", make)


def _watch_linears(recorder: Recorder, name: str, module: nn.Module) -> None:
    """Several linear layers of one input. They may be computed together, without a call of any of them."""
    names = {layer: f"{name}.{child}" for child, layer in module.named_children()}

    def make(apply_linears: Callable) -> Callable:
        def apply_noted(x: Tensor, linears) -> list[Tensor]:
            for layer in linears:
                recorder.note_weights(layer)
            outputs = apply_linears(x, linears)
            for layer, y in zip(linears, outputs, strict=True):
                box = layer.weight.spec.box[0]
                place = recorder.tokens.place(y.shape, recorder.micro_batch, indices(box))
                recorder.note_output(names[layer], y, place, summand=_shares_heads(layer))
            return outputs

        return apply_noted

    recorder.replace(module, "apply_linears", make)


def _shares_heads(layer: nn.Module) -> bool:
    """Whether other ranks hold the same K/V heads, whose gradient is then a part of each rank's queries."""
    return "kv_replica" in layer.weight.spec.extra_groups


def _watch_attention(recorder: Recorder, name: str, module: Attention) -> None:
    """What is rotated, and what the core returns: (batch, heads, seq, d)."""

    def place(x: Tensor, layer: nn.Module) -> Place | None:
        heads = indices(layer.weight.spec.box[0], module.head_width)
        rows_and_tokens = recorder.tokens.place((x.shape[0], x.shape[2], 0), recorder.micro_batch)
        if rows_and_tokens is None or len(heads) != x.shape[1]:
            return None
        return rows_and_tokens[0], heads, rows_and_tokens[1], np.arange(x.shape[3])

    def make_rotate(rotate: Callable) -> Callable:
        def rotate_noted(q, k, *tables):
            q, k = rotate(q, k, *tables)
            recorder.note_output(f"{name}.rotate (queries)", q, place(q, module.q_proj))
            recorder.note_output(f"{name}.rotate (keys)", k, place(k, module.k_proj), _shares_heads(module.k_proj))
            return q, k

        return rotate_noted

    def make_core(core: Callable) -> Callable:
        def core_noted(q, *others):
            out = core(q, *others)
            recorder.note_output(f"{name}.core", out, place(out, module.q_proj))
            return out

        return core_noted

    recorder.replace(module, "rotate", make_rotate)
    recorder.replace(module, "core", make_core)


def _watch_activation(recorder: Recorder, name: str, module: SwiGLU) -> None:
    def make(activation: Callable) -> Callable:
        def activation_noted(gate, up):
            y = activation(gate, up)
            features = indices(module.gate_proj.weight.spec.box[0])
            recorder.note_output(
                f"{name}.activation", y, recorder.tokens.place(y.shape, recorder.micro_batch, features)
            )
            return y

        return activation_noted

    recorder.replace(module, "activation", make)


def _watch_experts(recorder: Recorder, name: str, module: nn.Module) -> None:
    """What tokens send to their experts, and what they get back: (batch, seq, k, hidden), k choices of each token.

    Experts see rows of many ranks, whose places nobody knows there. So rows are noted where they leave and return: on
    the rank of their token, sorted by expert and then by token.
    """
    chosen = threading.local()

    def note(what: str, rows: Tensor) -> None:
        order = chosen.experts.flatten().argsort(stable=True)[: len(rows)]
        samples = len(recorder.tokens.samples(recorder.micro_batch))
        shape = samples, len(chosen.experts) // samples, chosen.experts.shape[1], rows.shape[1]

        def arrange(x: Tensor) -> Tensor:
            return x.new_zeros(shape).flatten(0, 2).index_copy(0, order, x).view(shape)  # zeros for what is dropped

        place = recorder.tokens.place(shape, recorder.micro_batch)
        recorder.note_value_and_gradient(f"{name}.experts ({what})", rows, place, arrange=arrange)

    def make(dispatcher: Callable) -> Callable:
        def dispatcher_noted(*arguments):
            result = dispatcher(*arguments)
            dispatch, back = result.dispatch, result.back

            def dispatch_noted(rows):
                note("rows sent", rows)
                return dispatch(rows)

            def back_noted(rows):
                rows = back(rows)
                note("rows that return", rows)
                return rows

            result.dispatch, result.back = dispatch_noted, back_noted
            return result

        return dispatcher_noted

    def keep_choices(_, inputs, outputs: tuple) -> None:
        chosen.experts = outputs[0]

    recorder.keep(module.router.register_forward_hook(keep_choices))
    recorder.replace(module, "dispatcher", make)
