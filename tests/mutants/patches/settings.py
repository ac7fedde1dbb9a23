"""Wrong settings, and mistakes that begin in the middle of a run: no layout is wrong, but two curves come apart.

The diagnosis of curves (tests/diagnosis) is tried on them.
"""

import torch
import torch.nn.functional as F

from tests.mutants.patches.mutants import Mutants


def one_token_ahead(q, k, v):
    """Attention that sees the next token as well, whose identity is what the model is to predict."""
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


SETTINGS = Mutants(r"""
# ---- after a resume
@ step01_single_gpu.running.run:Run.resume
count of updates lost: self.optimizer.loaded(self.updates) => self.optimizer.loaded(0)
moments lost: self.optimizer.loaded(self.updates) => …; [each[key].zero_()
    for each in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq") if key in each]
@ step01_single_gpu.data.batches:Batches.micro_batch
data from the beginning again: step * self.global_batch =>
    (step - self.__dict__.setdefault("first", step)) * self.global_batch
@ common.config:TrainConfig.learning_rate
warm-up again: (step + 1) => (step + 1 - self.__dict__.setdefault("first", step))

# ---- at the 13th step
@ step01_single_gpu.mixed_precision:Optimizer.step
an update skipped: if not self.masters: => self.calls = getattr(self, "calls", 0) + 1\n    if self.calls == 13 or not
    self.masters:
@ step01_single_gpu.train:train_step
gradients doubled once: gradients = gradient_sums.finish() =>
    …; torch._foreach_mul_(gradients, 2.0 if step == 12 else 1.0)

# ---- from the beginning
@ step01_single_gpu.train:build
one token ahead: ATTENTION_CORES[config.attention] =>
    __import__("tests.mutants.patches.settings", fromlist=["one_token_ahead"]).one_token_ahead
@ common.layers:RMSNorm.forward
ten times the epsilon: self.eps) => 10 * self.eps)
@ step01_single_gpu.mixed_precision:Optimizer.__init__
another second beta: (0.9, 0.95) => (0.9, 0.99)
@ step01_single_gpu.data.batches:Batches._sample
data in another order: random_order(self.seed, => random_order(self.seed + 1,
""")
