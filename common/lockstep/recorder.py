"""Records what passes through any model: weights as they are used, outputs of modules, and gradients."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from common.lockstep.notes import Note, Place, Seen
from common.lockstep.places import Tokens, boxes, features_of
from common.parameter import attach_specs


class Recorder:
    """Takes notes of one rank's steps, in the order in which things are computed.

    Args:
        part: which samples and tokens of the whole this rank holds.
        seen: what is known of the rank; the notes are its `notes`.

    step, micro_batch   what is being computed; whoever runs the model sets them, the second one for each thread
    """

    def __init__(self, part: Tokens, seen: Seen):
        self.tokens, self.step, self.seen, self.notes = part, 0, seen, seen.notes
        self._thread, self._noted = threading.local(), set()
        self._own: dict[tuple[int, int], list[tuple[Note, Note]]] = {}  # by step and parameter
        self._stack = ExitStack()

    @property
    def micro_batch(self) -> int:
        return getattr(self._thread, "micro_batch", 0)

    @micro_batch.setter
    def micro_batch(self, number: int) -> None:
        self._thread.micro_batch = number

    def close(self) -> None:
        """Remove all hooks."""
        self._stack.close()

    # ---- notes -------------------------------------------------------------------------------------------------------

    def note(self, phase: str, name: str, value: Tensor, place: Place | None, once: object = None, **options) -> None:
        """Keep a copy of a tensor. Nothing happens without a place, or if `once` names what this step has noted."""
        key = (self.step, phase, name, once)
        if place is None or once is not None and key in self._noted:
            return
        self._noted.add(key)
        value = copied(value).reshape([] if options.get("total") else [len(each) for each in place])
        self.notes.append(Note(self.step, phase, name, place, value, **options))

    def note_output(self, name: str, y: Tensor, place: Place | None, summand: bool = False) -> None:
        """Note a tensor that the forward has made and, when the backward has computed it, its gradient.

        With recomputation it is made twice: the first value counts, and the gradient of the second. What a module
        returns as it has got it from one within it has been noted under that one's name.

        Args:
            summand: other ranks hold the same elements, each with a part of the gradient.
        """
        if hasattr(y, "noted"):
            return
        y.noted = name
        self.note_value_and_gradient(name, y, place, summand)

    def note_value_and_gradient(
        self,
        name: str,
        y: Tensor,
        place: Place | None,
        summand: bool = False,
        arrange: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """The same for a tensor that may have been noted under another name.

        Args:
            arrange: brings it, and its gradient, into the shape of its place.
        """
        self.note("forward", name, arrange(y.detach()), place, once=("output", self.micro_batch))
        if place is None or not y.requires_grad:
            return
        step, shape = self.step, [len(each) for each in place]

        def note(gradient: Tensor) -> None:
            value = copied(arrange(gradient)).reshape(shape)
            self.notes.append(Note(step, "backward", name, place, value, summand=summand))

        y.register_hook(note)

    def note_weights(self, module: nn.Module, *_) -> None:
        """Note a module's own weights as it finds them when it is used for the first time in a step."""
        for weight in module.parameters(recurse=False):
            for place, value in boxes(weight.spec, weight.detach()):
                self.note("forward", weight.spec.name, value, place, once=("weight", id(weight)))

    def note_pieces(self, phase: str, owners: list[Tensor], values: list[Tensor]) -> None:
        """Note what belongs to parameters or to pieces of them, `owners`, which have specs."""
        for owner, value in zip(owners, values, strict=True):
            for place, part in boxes(owner.spec, value.detach()):
                self.note(phase, owner.spec.name, part, place)

    def note_gradients(self, model: nn.Module) -> None:
        """Note the gradients in `.grad` as those that an optimizer gets: summed over ranks, if several hold them."""
        parameters = [each for each in model.parameters() if each.grad is not None]
        self.note_pieces("gradient", parameters, [each.grad for each in parameters])

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Note the weights and outputs of all modules of a model, of those that are called."""
        attach_specs(model)
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                self.keep(module.register_forward_pre_hook(self.note_weights))
            if name and not isinstance(module, nn.Identity | nn.ModuleDict | nn.ModuleList):
                self.keep(module.register_forward_hook(partial(self._called, name)))

    def keep(self, handle) -> None:
        """Remove this hook, too, in `close`."""
        self._stack.callback(handle.remove)

    def _called(self, name: str, module: nn.Module, inputs: tuple, output) -> None:
        several = isinstance(output, tuple)
        for index, y in enumerate(output if several else (output,)):
            if isinstance(y, Tensor):
                self.note_output(f"{name}[{index}]" if several else name, y, self._place_of(module, inputs, y))

    def _place_of(self, module: nn.Module, inputs: tuple, y: Tensor) -> Place | None:
        shape = y.shape
        if y.dim() == 2 and inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() == 3:
            if len(y) == inputs[0].shape[:2].numel():  # a router forgets which tokens belong to which sample
                shape = (*inputs[0].shape[:2], y.shape[1])
        elif y.dim() == 2 and self.tokens.positions is not None:
            return None  # rows of an expert, say
        return self.tokens.place(shape, self.micro_batch, features_of(module))

    def replace(self, owner: object, attribute: str, make: Callable) -> None:
        """Set `owner.attribute` to `make(what it is)` until `close`."""
        real, own = getattr(owner, attribute), attribute in vars(owner)
        setattr(owner, attribute, make(real))
        self._stack.callback(lambda: setattr(owner, attribute, real) if own else delattr(owner, attribute))

    def watch_sums(self, sums: object) -> None:
        """Note what this rank itself adds to the gradient of each parameter, over all micro-batches of a step.

        `sums` has an `accumulate(parameter, gradient, whole=True)` that is called for each of them; `gradient` may be a
        function that adds to a tensor.
        """

        def make(accumulate: Callable) -> Callable:
            def accumulate_noted(parameter, gradient, *more, **options):
                if callable(gradient):
                    add, gradient = gradient, torch.empty_like(parameter)
                    add(gradient, True)
                self.note_own(parameter, gradient)
                return accumulate(parameter, gradient, *more, **options)

            return accumulate_noted

        self.replace(sums, "accumulate", make)

    def note_own(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to what this rank's tokens have contributed to the gradient of a parameter in this step."""
        if not self.tokens.adds(parameter.spec):
            return
        pieces = boxes(parameter.spec, gradient.detach())
        key = self.step, id(parameter)
        if key in self._own:
            for (note, last), (_, value) in zip(self._own[key], pieces, strict=True):
                note.value[...] += (now := copied(value))
                last.value[...] = now
            return
        self._own[key] = []
        for place, value in pieces:  # three copies: the sum, and the first and the last summand
            sum_, first, last = (
                Note(self.step, phase, parameter.spec.name, place, copied(value), summand=True)
                for phase in ("own", "first", "last")
            )
            self._own[key].append((sum_, last))
            self.notes += [sum_, first, last]


def copied(tensor: Tensor) -> np.ndarray:
    """A copy for NumPy, in float64 unless it is of integers."""
    copy = tensor.detach().clone().cpu()  # first: what NumPy has seen can never be resized, and ZeRO frees weights so
    return (copy.double() if copy.is_floating_point() else copy).numpy()


@contextmanager
def record(model: nn.Module, part: Tokens, seen: Seen | None = None) -> Iterator[Recorder]:
    """In this block, note what a model of any kind computes: one process's step, or a rank's.

    Args:
        seen: the rank, where there are several.
    """
    recorder = Recorder(part, seen or Seen())
    recorder.watch(model)
    for parameter in model.parameters():
        recorder.keep(parameter.register_hook(partial(recorder.note_own, parameter)))
    try:
        yield recorder
    finally:
        recorder.close()
