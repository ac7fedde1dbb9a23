"""Stage 3, layer by layer: weights are gathered right before a region of the model uses them, and freed right after.

Hooks run at the borders between regions. This is one micro-batch of a model with the regions 0, 1 and 2:

    at the start                begin to gather 0's weights
    before the forward of 0     wait for them, begin to gather 1
    after the forward of 0      free 0
    before the forward of 1     wait for 1, begin to gather 2
    after the forward of 1      free 1
    before the forward of 2     wait for 2, which stays: the backward begins with it
    before the backward of 2    begin to gather 1
    before the backward of 1    free 2, wait for 1, begin to gather 0, begin to reduce 2's gradients
    before the backward of 0    free 1, wait for 2's gradients and for 0, begin to reduce 1's
    at the end                  wait for 1's gradients, begin to reduce 0's, wait for them

If 0 is an embedding, its backward reads no weights, and they are not gathered again.
"""

from functools import partial

import torch
from torch import nn

from step03_zero.zero import Region, Zero


class ZeroByLayer(Zero):
    """`Zero` for stage 3 that gathers the weights of one region at a time, and those of the next one in advance."""

    def _add_hooks(self, index: int) -> None:
        super()._add_hooks(index)
        self.regions[index].last.register_forward_hook(partial(self._after_forward, index))

    def gather(self) -> None:
        """Start a step: begin to gather the first region's weights."""
        for unit in self.regions[0].units:
            unit.fetch()

    def _before_forward(self, index: int, *_) -> None:
        super()._before_forward(index)
        if index + 1 < len(self.regions):
            self._prefetch(self.regions[index + 1])

    def _prefetch(self, region: Region) -> None:
        """Begin to gather the weights that are needed next, while another region computes."""
        for unit in region.units:
            unit.fetch()

    def _after_forward(self, index: int, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if not isinstance(output, torch.Tensor):
            what = f"{type(module).__name__} returns a {type(output).__name__}"
            raise TypeError(f"the last module of a region must return one tensor, and {what}")
        if output.requires_grad:
            output.register_hook(lambda gradient: self._before_backward(index))
        # The last region stays, because the backward begins with it; but without gradients there will be no backward
        if index + 1 < len(self.regions) or not output.requires_grad:
            self._free(self.regions[index])

    def _before_backward(self, index: int) -> None:
        """The gradient of region `index`'s output has been computed, so the backward of `done`, which used this output,
        is over. That of `index` (or its recomputation) begins.
        """
        region = self.regions[index]
        done = self.regions[index + 1] if index + 1 < len(self.regions) else None
        if done:
            self._free(done)
        self._complete()  # frees gradients before the next gather needs memory
        if region.backward_reads_weights:
            for unit in region.units:
                unit.fetch().wait()
            if index > 0 and self.regions[index - 1].backward_reads_weights:
                self._prefetch(self.regions[index - 1])
        if done and self.synchronising:
            self._reduce(done)

    def _free(self, region: Region) -> None:
        for unit in region.units:
            unit.free()

    def _reduce(self, region: Region) -> None:
        """Launch the units that no earlier region needs. Autograd has accumulated all of their gradients by now."""
        for unit in region.owned:
            if self.index_of[unit.parameters[0]] >= self.next_unit:  # else the region before it runs twice in a row
                self._launch(unit)

    def _launch_complete(self) -> None:
        """Launch nothing between borders: a rank that does not use some weight would launch its unit among other
        gathers than its peers."""
