"""Known-wrong variants of products in FP8. Their curves look healthy: see test_fp8.py."""

from tests.mutants.patches.mutants import Mutants

MUTANTS = Mutants(r"""
@ step08_5d.narrow_numbers.linear:Products._narrow
# Every rank takes the largest number of its own part
scale not reduced over tp: largest_of(x, block, groups) => largest_of(x, block, [])
# The scale of the first micro-batch's gradient serves for all that follow
gradient scale reused: return quantise(x, dtype, block, scales) =>
    if what == "gradient": scales = self.__dict__.setdefault("kept", scales)\n    …
@ step08_5d.narrow_numbers.linear:Products.input_gradient
scale of the wrong operand: dx = multiply(rows, weight, gradient.dtype) =>
    dx = multiply(rows, weight._replace(scales=rows.scales), gradient.dtype)
@ step08_5d.narrow_numbers.linear:Products.weight_gradient
weight gradient in bfloat16: return multiply(left, right, at_least_float32(x.dtype)) =>
    return multiply(left, right, x.dtype)
@ step08_5d.narrow_numbers.linear:Products._tokens_last
blocks across sequences: -x.shape[-2] % (columns or 1) => 0
@ step08_5d.narrow_numbers.scaling:cast
saturation left out: return x.clamp(-top, top).where(x.isfinite(), torch.nan).to(dtype) => return x.to(dtype)
@ step08_5d.narrow_numbers.history:largest_of_all
# What a rank has seen, it keeps to itself: the scales of one weight drift apart
notes not compared: collectives.all_reduce(joined, every[name], op="max") => pass
@ step08_5d.narrow_numbers.gather:NarrowGather._find_scales
# Every rank casts its shard with the scales of what it holds
scale not reduced over the shards: (group, *holders[part]) => holders[part]
# The shards of each tensor rank have another scale
gathered scale not reduced over tp: (group, *holders[part]) => (group,)
@ step08_5d.narrow_numbers.layers:_cut
# Whole matrices, as of shared experts, take the largest numbers of their own tokens: sequence parallelism divides them
scale of a part of the shared tokens: (mesh.cp, mesh.tp) if whole => (mesh.cp,) if whole
@ step08_5d.narrow_numbers.history:History.scales
delayed scale of the last step alone: mine[1:].amax() => mine[1]
@ step08_5d.narrow_numbers.history:finish_step
what nobody has seen is noted: torch.where(each[..., :1] > 0, each.roll(1, -1), each) => each.roll(1, -1)
history one step too short: each[..., 0] = 0 => each[..., ::STEPS] = 0
@ step08_5d.narrow_numbers.layers:StepScales.finish
# The scales of the first step serve for all
scales never renewed: products.gathered = None => pass
""")
